"""An engine with its tokenizer: the common base of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmjax.adapters.locate import locate
from llmjax.adapters.reference import AdapterReference
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control, EngineClient
from llmjax.engine.core.stats import EngineTotals, KVStats, RequestStats, StatLogger
from llmjax.engine.front.adapters import AdapterRegistry, NamedAdapter
from llmjax.engine.front.frontend import Frontend
from llmjax.engine.front.images import Images
from llmjax.engine.info import EngineInfo, SleepState
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.step_sizes import StepSizes
from llmjax.tokenizer import Tokenizer, load_tokenizer

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # what leaves the device when an engine sleeps


class LoadedLLM:
    """An engine with a tokenizer, ready to take requests: what ``LLM`` and ``AsyncLLM`` share.

    Args:
        config: everything; the sizes of steps that it leaves open are filled in once the engine has chosen them.
        client: an engine of that configuration, which may still be loading its model. It is closed if loading fails or
            there is no tokenizer for it.

    Attributes:
        info: what the engine says of itself.
        images: makes prompts with images; None: the model sees none.
        adapters: the adapters that requests may have.
    """

    client: EngineClient

    def __init__(self, config: EngineConfig, client: EngineClient) -> None:
        self.config = config
        self.client = client
        self._away: frozenset[str] = frozenset()  # which of WEIGHTS and KV_CACHE have left
        self._asleep: SleepState = "weights_offloaded"  # the state while something is away
        try:
            # Where a process loads the model, the tokenizer is read meanwhile.
            self.tokenizer = tokenizer_of(config, client.located(), gguf=client.gguf)
            self.info = client.wait_loaded()
            chosen = StepSizes(self.info.max_num_seqs // config.data_parallel_size, self.info.max_num_batched_tokens)
            self.config = config = config.with_sizes(chosen)
            self.images = images_of(config, self.info, self.tokenizer)
        except BaseException:
            client.close()  # otherwise its compiler threads would continue in vain
            raise
        self.adapters = AdapterRegistry(config, names={self.info.model_name, *config.served_names, config.model})
        try:
            self._load_adapters()
        except BaseException:
            client.close()
            raise
        self._frontend = Frontend(
            config,
            info=self.info,
            new_id=client.new_id,
            tokenizer=self.tokenizer,
            compiles=client.in_process,
            images=self.images,
        )

    def _load_adapters(self) -> None:
        """Reads the model's own adapter, and those that the settings name.

        Raises:
            ConfigError: a name cannot be an adapter's.
            LLMJaxError: one cannot be read, or does not fit the model or the settings.
        """
        if self.info.vision is not None and (own := self.info.vision.adapter) is not None:
            self.client.control(Control.LOAD_ADAPTER, own).result()
        for module in self.config.adapter_modules:
            try:
                self.adapters.check_new(module.name, replace=False)
            except InvalidRequest as error:
                raise ConfigError(f"lora_modules: {error}") from error
            reference = self._read_adapter(module.name, module.path)
            self.adapters.add(NamedAdapter(reference=reference, source=module.path, base=module.base))
        fixed = [(Path(one.path).name, one) for one in self.config.fixed_adapters]
        self.adapters.fix([(self._read_adapter(name, one.path), one.scale) for name, one in fixed])

    def _read_adapter(self, name: str, path: str, *, number: int | None = None) -> AdapterReference:
        """An adapter's reference, when every engine has read it."""
        number = number or self.adapters.new_number()
        reference = AdapterReference.read(name, locate(path, self.config), number=number)
        self.client.control(Control.LOAD_ADAPTER, reference).result()
        return reference

    @property
    def model_name(self) -> str:
        """What the API calls the model."""
        return self.info.model_name

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.info.max_model_len

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """Fields of ``SamplingParams`` that the model's makers recommend."""
        return self.info.default_sampling_params

    @property
    def stats(self) -> EngineTotals:
        """Counts since the start."""
        return self.client.totals

    @property
    def renders_pairs(self) -> bool:
        """Whether pairs of texts go through a template."""
        return self._frontend.pooling.renders_pairs

    def kv_stats(self) -> KVStats:
        """Pages by state."""
        stats: KVStats = self.client.control(Control.KV_STATS).result()
        return stats

    @property
    def is_sleeping(self) -> bool:
        """Whether something that requests need has left the device."""
        return bool(self._away)

    @property
    def sleep_state(self) -> SleepState:
        """How deeply the engine sleeps."""
        return self._asleep if self._away else "awake"

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        self.client.loggers.append(stat_logger)

    def _record(self, stats: RequestStats) -> None:
        for stat_logger in self.client.loggers:
            stat_logger.record_request(stats)


def asleep_at(level: int) -> SleepState:
    """What ``sleep`` of a level leads to."""
    return "weights_offloaded" if level == 1 else "discard_all"


def sleep_control(level: int) -> Control:
    """What puts an engine to sleep.

    Args:
        level: 1: weights wait in the host's memory; 2: they are loaded again.

    Raises:
        InvalidRequest: there is no such level.
    """
    if level not in (1, 2) or isinstance(level, bool):
        raise InvalidRequest(f"level must be 1 or 2, not {level!r}", field="level")
    return Control.SLEEP if level == 1 else Control.SLEEP_DEEPLY


def wake_controls(tags: Sequence[str] | None, away: frozenset[str]) -> dict[str, Control]:
    """What wakes an engine, by what comes back, in the order in which it does.

    Args:
        tags: what is to come back; None: everything.
        away: what has left.

    Raises:
        InvalidRequest: a tag is not known.
    """
    controls = {WEIGHTS: Control.WAKE_WEIGHTS, KV_CACHE: Control.WAKE_KV_CACHE}
    if unknown := next((tag for tag in tags or () if tag not in controls), None):
        raise InvalidRequest(f"tags must be {WEIGHTS} or {KV_CACHE}, not {str(unknown)[:80]!r}", field="tags")
    return {tag: control for tag, control in controls.items() if tag in away and tag in (tags or controls)}


def tokenizer_of(config: EngineConfig, model_path: str, *, gguf: GGUFFile | None = None) -> Tokenizer | None:
    """The tokenizer for an engine; None: there is to be none.

    Args:
        model_path: the model's folder or file.
        gguf: the model's GGUF file, if it is already open.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(_tokenizer_path(config), chat_template=config.chat_template)
    return load_tokenizer(Path(model_path), gguf=gguf, chat_template=config.chat_template)


def images_of(config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None) -> Images | None:
    """What makes prompts with images for an engine; None: its model sees none, or there is no tokenizer."""
    if info.vision is None or tokenizer is None:
        return None
    return Images.of(
        Path(info.model_path),
        info.vision,
        tokenize=partial(tokenizer.encode, add_special_tokens=False),
        detokenize=partial(tokenizer.decode, skip_special_tokens=False),
        limit=config.most_images,
        video_limit=config.most_videos,
        special=tokenizer.all_special_ids,
        mmproj=config.mmproj,
        keywords=config.mm_processor_kwargs,
    )


def _tokenizer_path(config: EngineConfig) -> Path:
    from llmjax.checkpoint.resolve import resolve

    assert config.tokenizer is not None
    path = Path(config.tokenizer).expanduser()
    if path.exists():
        return path  # a folder with only a tokenizer is not a model, so resolve would refuse it
    return resolve(
        config.tokenizer,
        revision=None,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        offline=config.offline,
    )
