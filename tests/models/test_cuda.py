"""Steps of models at real sizes, as JAX lowers them for an H100 that is described: Mosaic and Triton refuse here what
they cannot compile, and no weights are needed.

The sizes are those of a published checkpoint, or, of architectures that have none in published.json, those of a tiny
checkpoint made wide.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llmjax.engine.device.batch import BatchLayout, make_buckets
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.device.step import step
from llmjax.models import Attention, ModelConfig, abstract_model, model_config
from llmjax.models.families import ARCHITECTURES
from llmjax.models.layers.state import make_stacks
from llmjax.models.registry import family_of
from llmjax.sampling.state import make_sampler_state
from tests.checkpoints import GOLDEN, POOLED
from tests.described_card import H100, lower_for
from tests.levels import at_levels
from tests.models.test_published import CHECKPOINTS, config_of

pytestmark = pytest.mark.jax_api

BF16, REQUESTS, PAGES_EACH = jnp.dtype(jnp.bfloat16), 4, 256
FAST = ("Qwen/Qwen3-0.6B",)
# Kinds of layers that kernels are made for, and sizes of heads from 64 to 256.
SLOW = (
    *("google/gemma-3-1b-it", "microsoft/Phi-3-mini-128k-instruct", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"),
    *("bigscience/bloom-560m", "deepseek-ai/DeepSeek-V3.2", "Qwen/Qwen3-Next-80B-A3B-Instruct", "LiquidAI/LFM2-1.2B"),
    *("tiiuae/Falcon-H1-0.5B-Instruct", "google/gemma-3n-E2B-it", "BAAI/bge-small-en-v1.5"),
)
# Whose 80 layers decay at rates of their own, so that each is traced by itself, which takes minutes.
LONG = ("MiniMaxAI/MiniMax-Text-01", "MiniMaxAI/MiniMax-M1-40k")


# Tiny checkpoints of the other architectures.
TINY = {
    **dict.fromkeys(("apertus", "arcee", "bamba", "dots1", "gemma4", "granite-moe-shared"), GOLDEN),
    **dict.fromkeys(("jamba", "mamba", "minimax", "nemotron", "olmo", "qwen3_5"), GOLDEN),
    **dict.fromkeys(
        ("bert-reranker", "gte", "gte-labels", "modernbert-labels", "new", "roberta", "roberta-labels"), POOLED
    ),
}
WIDE = {
    "vocab_size": 32000,
    "vocab_size_per_layer_input": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "global_head_dim": 256,
    "max_position_embeddings": 4096,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 1024,
    "moe_intermediate_size": 1408,
    "shared_intermediate_size": 1024,
    "n_routed_experts": 64,
    "num_experts": 64,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "state_size": 16,
    "time_step_rank": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "block_size": 256,
    "local_attention": 128,
}


def published_first() -> dict[str, str]:
    """The first published checkpoint of each architecture."""
    found: dict[str, str] = {}
    for name in (name for name in CHECKPOINTS if name not in LONG):
        found.setdefault(config_of(name)["architectures"][0], name)
    return found


def widened(name: str) -> dict[str, Any]:
    """The config.json of a tiny checkpoint, with sizes as published ones have them."""
    config = json.loads((TINY[name] / name / "config.json").read_text())
    return {key: WIDE.get(key, value) for key, value in config.items()}


def lowered_for(architecture: str) -> str:
    """Which checkpoint's steps are lowered, its own or those of an architecture that is read the same way."""
    if architecture in LOWERED:
        return LOWERED[architecture]
    family = family_of(architecture)
    same = (name for other, name in LOWERED.items() if other in ARCHITECTURES and family_of(other) is family)
    return next(same, "")


LOWERED = {widened(name)["architectures"][0]: name for name in TINY} | published_first()


def lowered(config: ModelConfig, *, tokens: int) -> str:
    """The lowered text of a step of ``tokens`` tokens; 0: a decode step."""
    graph, shapes = abstract_model(config, dtype=BF16, activation_dtype=BF16)
    groups, pages = len(config.spans), dict.fromkeys(config.spans, 64)
    make = partial(make_stacks, config.states, num_pages=pages, page_size=16, dtype=BF16)
    pools = config.pooler is not None
    sampler = partial(make_sampler_state, num_slots=REQUESTS, vocab_size=1 if pools else config.vocab_size)
    rows = partial(make_row_state, num_slots=REQUESTS, num_groups=groups, pages_per_sequence=PAGES_EACH)
    state = DeviceState(
        kv=jax.eval_shape(make),
        rows=jax.eval_shape(rows),
        sampler=jax.eval_shape(sampler),
        pooled=jax.ShapeDtypeStruct((REQUESTS, config.hidden_size), jnp.float32) if pools else None,
    )
    buckets = make_buckets(max_num_seqs=REQUESTS, max_num_batched_tokens=tokens or 16, decode_steps=1)
    bucket = [bucket for bucket in buckets if bucket.decode is not bool(tokens)][-1]
    layout = BatchLayout(bucket=bucket, num_slots=REQUESTS, pages_per_sequence=PAGES_EACH, num_groups=groups)
    run = partial(step, graph=graph, names=tuple(shapes), layout=layout, max_logprobs=20)
    batch = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    return str(lower_for(H100, run, tuple(shapes.values()), state, batch, donated=1).as_text())


@pytest.mark.parametrize("name", at_levels(LOWERED.values(), fast=FAST, slow=SLOW))
def test_steps_are_lowered(name: str) -> None:
    config = model_config(widened(name) if name in TINY else config_of(name), max_model_len=4096)
    for tokens in (64,) if config.pooler is not None else (0, 64):
        text = lowered(config, tokens=tokens)
        assert "callback" not in text
        # Attention is a kernel, unless it has ALiBi or tokens see later ones.
        mixers = [layer.mixer for layer in config.layers]
        if any(isinstance(mixer, Attention) and mixer.slopes is None and mixer.causal for mixer in mixers):
            assert "xla.gpu.triton" in text or "mosaic_gpu" in text
