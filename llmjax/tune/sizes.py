"""Sizes of a model's weights and KV cache, from its files alone."""

from __future__ import annotations

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.resolve import resolve_model
from llmjax.config import EngineConfig
from llmjax.engine.loading.memory import SMALLER, kv_footprint, weight_bytes
from llmjax.errors import ConfigError
from llmjax.models.config import ModelConfig
from llmjax.platforms import Platform
from llmjax.quantization.plan import QuantizationPlan
from llmjax.tune.facts import KVType, Memory, Weights

TOKENS = 8192  # wanted length of a request where no setting says
INT8 = "int8"  # the smaller type of KV caches


def sizes_of(config: EngineConfig, platform: Platform) -> tuple[ModelConfig, Memory]:
    """Reads the model's files, not their weights. Settings that the configuration has are not varied.

    Returns:
        The model, and its sizes.

    Raises:
        CheckpointError: the model cannot be found or read.
        ConfigError: it generates no text.
    """
    checkpoint = open_checkpoint(resolve_model(config), overrides=config.hf_overrides)
    model = checkpoint.model_config(max_model_len=config.max_model_len)
    if not model.causal:
        raise ConfigError("llmjax tune measures how fast a model writes, and this one only reads: it makes vectors")
    schemes = (config.quantization,) if config.quantization is not None else (None, *SMALLER)
    weights: list[Weights] = []
    for scheme in schemes:
        plan = QuantizationPlan.of(scheme, config.quantization_rules, model, stored=checkpoint.quantization)
        size = weight_bytes(checkpoint.tensors, platform, plan=plan)
        if not weights or size < weights[-1].num_bytes:  # what is stored in four bits is not made eight
            weights.append(Weights(quantization=scheme, num_bytes=size))
    longest = config.max_model_len or model.max_position
    tokens = config.max_model_len or min(longest, TOKENS)
    requests = config.with_sizes(platform.step_sizes).max_num_seqs
    kinds = (config.kv_cache_dtype,) if config.kv_cache_dtype != "auto" else ("auto", INT8)
    kv_types = []
    for kind in kinds:
        kv = kv_footprint(model, platform.kv_dtype(kind), page_size=config.page_size)
        page = config.page_size  # a request's last page, and the dummy page
        one = kv.bytes_of(tokens + 2 * page)
        most = requests * kv.bytes_of(longest + page)
        kv_types.append(KVType(name=kind, request_bytes=int(one), most_bytes=int(max(one, most))))
    return model, Memory(free=platform.free_memory(), tokens=tokens, weights=tuple(weights), kv_types=tuple(kv_types))
