"""Routers and shared experts, against their formulas in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmjax.kernels.attention import RaggedBatch, make_pages
from llmjax.models import RMS, ExpertGroups, Experts, SharedExpert
from llmjax.models.layers.context import Context
from llmjax.models.modules.moe import ExpertsModule
from llmjax.models.modules.norm import RMSNorm, build_norm

SIZE, COUNT = 16, 6
F32 = jnp.dtype(jnp.float32)


def module(**experts: Any) -> tuple[ExpertsModule, dict[str, np.ndarray]]:
    """A layer with random weights, and these by name."""
    moe = ExpertsModule(Experts(count=COUNT, inner=8, activation="silu", **experts), SIZE, dtype=F32)
    rng, values = np.random.default_rng(0), {}
    graph, state = nnx.split(moe)
    for path, parameter in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        values[name] = rng.standard_normal(parameter.get_value().shape).astype(np.float32) * 0.5
    flat = {tuple(name.split(".")): nnx.Param(jnp.asarray(value)) for name, value in values.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat)), values


def run(moe: ExpertsModule, x: Any, tokens: int, *, after: RMSNorm | None = None) -> jax.Array:
    """Runs the sublayer for one row of ``tokens`` tokens."""
    empty = jnp.zeros((1, 1), jnp.int32)
    batch = RaggedBatch(jnp.array([0, tokens]), jnp.array([tokens]), empty, jnp.zeros(tokens, jnp.int32))
    pages = make_pages(num_pages=1, page_size=1, num_kv_heads=1, head_dim=1, dtype=F32)
    out: jax.Array = moe.sublayer(jnp.asarray(x), moe, norm(), after, Context(None, pages, batch))
    return out


def norm() -> RMSNorm:
    made = build_norm(RMS(1e-6), SIZE)
    made.weight = nnx.Param(jnp.ones(SIZE))
    return made


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", [1, 3, COUNT])
def test_against_numpy(per_token: int, normalize: bool, shared: int) -> None:
    moe, w = module(per_token=per_token, normalize=normalize, shared=SharedExpert(inner=shared) if shared else None)
    x = np.random.default_rng(1).standard_normal((5, SIZE)).astype(np.float32)
    n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    scores = np.exp(n @ w["gate.weight"].T)
    scores /= scores.sum(-1, keepdims=True)
    out = x.copy()
    for token in range(5):
        best = np.argsort(-scores[token])[:per_token]
        total = scores[token, best].sum() if normalize else 1
        for e in best:
            parts = [w[f"experts.{part}_proj.weight"][e] for part in ("gate", "up", "down")]
            out[token] += scores[token, e] / total * gated(n[token], *parts)
    if shared:
        parts = [w[f"shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")]
        out += gated(n, *parts) / (1 + np.exp(-n @ w["shared_expert_gate.weight"].T))
    found = run(moe, x, 5)
    np.testing.assert_allclose(np.asarray(found), out, rtol=1e-4, atol=1e-4)


def test_groups_limit_the_choice() -> None:
    groups = ExpertGroups(count=3, kept=2)
    moe, w = module(per_token=3, normalize=False, scaling=2.5, groups=groups)
    n = np.random.default_rng(1).standard_normal((9, SIZE)).astype(np.float32)
    chosen, shares = moe.route(jnp.asarray(n))
    scores = np.exp(n @ w["gate.weight"].T)
    scores /= scores.sum(-1, keepdims=True)
    limited = 0
    for token in range(len(n)):
        best = np.argsort(-scores[token].reshape(3, 2).max(-1))[:2]
        allowed = [e for e in range(COUNT) if e // 2 in best]
        expected = sorted(allowed, key=lambda e, token=token: -scores[token, e])[:3]  # type: ignore[misc]
        limited += set(expected) != set(np.argsort(-scores[token])[:3].tolist())
        assert chosen[token].tolist() == expected
        np.testing.assert_allclose(shares[token], 2.5 * scores[token, expected], rtol=1e-5)
    assert limited


def test_padding_goes_to_no_expert() -> None:
    moe, _ = module(per_token=2, normalize=True)
    x = jax.random.normal(jax.random.key(0), (6, SIZE))
    found = run(moe, x, 4)
    np.testing.assert_array_equal(found[4:], x[4:])
    np.testing.assert_allclose(found[:4], run(moe, x[:4], 4), rtol=1e-5, atol=1e-5)


def test_a_norm_behind_the_experts() -> None:
    moe, _ = module(per_token=2, normalize=True)
    x = jax.random.normal(jax.random.key(0), (3, SIZE))
    added = run(moe, x, 3) - x
    found = run(moe, x, 3, after=norm())
    np.testing.assert_allclose(found, x + norm()(added), rtol=1e-4, atol=1e-4)
