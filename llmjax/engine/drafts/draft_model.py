"""Loads the smaller model that makes drafts, and checks that it can make them for the target model."""

from __future__ import annotations

import logging
from pathlib import Path

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.resolve import resolve_model
from llmjax.config import EngineConfig
from llmjax.engine.drafts.speculation import check_speculative
from llmjax.engine.loading.memory import weight_bytes
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.errors import ConfigError, TokenizerError
from llmjax.models.config import ModelConfig
from llmjax.platforms import Platform
from llmjax.quantization.plan import QuantizationPlan
from llmjax.speculative import SpeculativeConfig

logger = logging.getLogger(__name__)


def check_draft(config: EngineConfig, speculative: SpeculativeConfig, platform: Platform) -> None:
    """Raises ConfigError if the engine cannot use a draft model, before anything is loaded."""
    devices, model = len(platform.devices), speculative.model
    if devices > 1 or config.has_ranks:
        where = f"{devices} devices (tensor_parallel_size)" if devices > 1 else "several processes"
        raise ConfigError(
            f"speculative_config: the draft model {model} runs on one device and in one process so far, this engine "
            f'on {where}; the method "ngram" makes drafts there, without a model'
        )
    if config.kv_offloading_size:
        raise ConfigError(
            f"kv_offloading_size: what the draft model {model} keeps of a page stays on the device; leave one out"
        )


def load_draft(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    platform: Platform,
    target: LoadedModel,
    *,
    cache_dir: Path | None,
    progress: bool,
) -> LoadedModel:
    """Loads the model that makes drafts.

    Args:
        config: the engine's configuration; its settings for the model's files do not apply to the draft model.
        speculative: which model.
        platform: where.
        target: the model that verifies.
        cache_dir, progress: as for `load_model`.

    Raises:
        CheckpointError: it cannot be found or read.
        ConfigError: it cannot make drafts for the target model.
    """
    draft_config = config_of_draft(config, speculative)
    path = resolve_model(draft_config)
    checkpoint = open_checkpoint(path, runner=draft_config.runner_of_task, convert=draft_config.conversion)
    model = checkpoint.model_config(max_model_len=draft_config.max_model_len)
    check_speculative(speculative, model, max_num_batched_tokens=config.max_num_batched_tokens)
    _check_vocabulary(config, path, model, target)
    return load_model(draft_config, platform, cache_dir=cache_dir, progress=progress)


def config_of_draft(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """The configuration of the model that makes drafts."""
    assert speculative.model is not None
    return config.replace(
        model=speculative.model,
        revision=speculative.revision,
        quantization=speculative.quantization,
        gguf_file=None,
        quantization_rules={},
        quantization_param_path=None,
        hf_overrides={},
        num_experts_offload_per_rank=0,
        speculative_config=None,
    )


def draft_bytes(config: EngineConfig, platform: Platform) -> int:
    """Bytes of the weights of the model that makes drafts; 0: there is none."""
    speculative = config.speculative
    if speculative is None or speculative.model is None:
        return 0
    draft_config = config_of_draft(config, speculative)
    checkpoint = open_checkpoint(
        resolve_model(draft_config), runner=draft_config.runner_of_task, convert=draft_config.conversion
    )
    model = checkpoint.model_config(max_model_len=draft_config.max_model_len)
    plan = QuantizationPlan.of(draft_config.quantization, {}, model, stored=checkpoint.quantization)
    return weight_bytes(checkpoint.tensors, platform, plan=plan)


def _check_vocabulary(config: EngineConfig, path: Path, draft: ModelConfig, target: LoadedModel) -> None:
    """Raises ConfigError unless the same tokens have the same ids; ``path`` is the draft model's."""
    start = f"speculative_config: the draft model {path} and the model {target.path}"
    sizes = draft.vocab_size, target.config.vocab_size
    tokens = None
    if not config.skip_tokenizer_init:
        tokens = _tokens_of(path, Path(config.tokenizer or target.path).expanduser(), count=min(sizes))
    if tokens is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{start} must have one vocabulary; theirs have {sizes[0]} and {sizes[1]} tokens")
        return
    for token, (one, other) in enumerate(zip(*tokens, strict=True)):
        if one != other and one and other:
            raise ConfigError(
                f"{start} must have one vocabulary; token {token} is {one!r} in one and {other!r} in the other"
            )


def _tokens_of(*paths: Path, count: int) -> list[list[str]] | None:
    """The first tokens of models as texts, empty where there is none; None: not all have a tokenizer."""
    from llmjax.tokenizer import load_tokenizer  # an engine in its own process has no other use for it

    try:
        tokenizers = [load_tokenizer(path) for path in paths]
    except TokenizerError as error:
        logger.warning("speculative_config: vocabularies are compared by their sizes alone, for %s", error)
        return None
    return [[tokenizer.id_to_token(token) for token in range(count)] for tokenizer in tokenizers]
