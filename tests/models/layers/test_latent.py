"""Latent attention as users run it on a CPU: bfloat16 weights, activations of f32."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import RaggedBatch
from llmjax.models import abstract_model, init_random, merge, model_config
from llmjax.models.layers.state import make_stacks
from tests.checkpoints import GOLDEN

TOKENS = 24


@pytest.mark.slow
def test_bfloat16_weights_of_many_rows() -> None:
    """XLA takes batched products of bfloat16 for a few rows only."""
    config = model_config(json.loads((GOLDEN / "minicpm3" / "config.json").read_text()))
    rounded = init_random(config, jax.random.key(0), dtype=jnp.dtype(jnp.bfloat16))
    kv = make_stacks(config.states, num_pages=dict.fromkeys(config.spans, 2), page_size=32, dtype=jnp.dtype("float32"))
    batch = RaggedBatch(
        query_start=jnp.array([0, TOKENS], jnp.int32),
        kv_len=jnp.array([TOKENS], jnp.int32),
        page_table=jnp.ones((1, 1), jnp.int32),
        kv_index=jnp.arange(32, 32 + TOKENS, dtype=jnp.int32),
    )

    def logits(dtype: str) -> np.ndarray:
        graph, shapes = abstract_model(config, dtype=jnp.dtype(dtype), activation_dtype=jnp.dtype("float32"))
        params = {name: rounded[name].astype(like.dtype) for name, like in shapes.items()}

        @jax.jit
        def run(params: dict[str, jax.Array]) -> jax.Array:
            model, position = merge(graph, params), jnp.arange(TOKENS)
            return model.logits(model(position, position, kv, (batch,) * len(config.spans)).hidden)

        return np.asarray(run(params))

    np.testing.assert_allclose(logits("bfloat16"), logits("float32"), rtol=0, atol=2e-2)
