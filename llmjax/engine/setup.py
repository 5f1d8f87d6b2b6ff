"""From a configuration to an engine with its text side: what ``LLM`` and ``AsyncLLM`` have in common."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmjax.config import EngineConfig
from llmjax.engine.build import build_engine
from llmjax.engine.engine import Engine
from llmjax.engine.frontend import Frontend
from llmjax.engine.kv_cache import KVStats
from llmjax.engine.stats import EngineTotals, RequestStats, StatLogger
from llmjax.models.config import ModelConfig
from llmjax.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Keys of generation_config.json that are defaults for requests, as in vLLM, with their names in SamplingParams.
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

# Keys that would change what is generated, and have no counterpart here, with the values that change nothing.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}


class LoadedLLM:
    """A model with its tokenizer, ready to take requests: what ``LLM`` and ``AsyncLLM`` share.

    Args:
        config: everything; loads the model and starts to compile.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine = build_engine(config)
        try:
            self.tokenizer = _tokenizer(config, self.engine)
        except BaseException:
            self.engine.close()  # or its compiler threads would go on for nobody
            raise
        generation = self.engine.model.checkpoint.generation_config
        eos = set(_ints(generation.get("eos_token_id"))) | set(self.model_config.eos_token_ids)
        if self.tokenizer is not None:
            eos |= self.tokenizer.eos_token_ids
        self._frontend = Frontend(
            config,
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset(eos),
        )
        self.model_name = config.served_model_name or _model_name(config, self.engine.model.path)
        self.default_sampling_params = sampling_defaults(generation)

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model.config

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.engine.kv_plan.max_model_len

    @property
    def stats(self) -> EngineTotals:
        """Counts since the start."""
        return self.engine.totals

    def kv_stats(self) -> KVStats:
        """Pages by state."""
        return self.engine.kv_stats()

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        self.engine.loggers.append(stat_logger)

    def _record(self, stats: RequestStats) -> None:
        for stat_logger in self.engine.loggers:
            stat_logger.record_request(stats)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a model's makers recommend.

    ``do_sample: false`` means greedy, as in transformers, whatever temperature stands beside it. Where the key is
    absent the numbers count, as in vLLM, although transformers would be greedy then too.
    """
    ignored = [k for k, neutral in WITHOUT_EFFECT.items() if generation_config.get(k) not in (None, *neutral)]
    if ignored:
        logger.warning("generation_config: %s have no effect here", ", ".join(ignored))
    found = {
        field: value for key, field in SAMPLING_DEFAULTS.items() if (value := generation_config.get(key)) is not None
    }
    return {**found, "temperature": 0.0} if generation_config.get("do_sample") is False else found


def _tokenizer(config: EngineConfig, engine: Engine) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(_tokenizer_path(config), chat_template=config.chat_template)
    gguf = engine.model.checkpoint.gguf
    return load_tokenizer(engine.model.path, gguf=gguf, chat_template=config.chat_template)


def _tokenizer_path(config: EngineConfig) -> Path:
    from llmjax.checkpoint.resolve import resolve

    assert config.tokenizer is not None
    path = Path(config.tokenizer).expanduser()
    if path.exists():
        return path  # a folder with a tokenizer alone is no model, so resolve would refuse it
    return resolve(
        config.tokenizer,
        revision=None,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        offline=config.offline,
    )


def _model_name(config: EngineConfig, path: Path) -> str:
    """A file or folder is known by its name, without the path that led to it; anything else as the user named it."""
    if path.suffix == ".gguf":
        return path.stem
    local = os.path.expanduser(config.model)
    return Path(local).resolve().name if os.path.exists(local) else config.model


def _ints(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
