"""Attention for CUDA, run as XLA operations, against the reference."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.attention import RaggedBatch, reference
from llmjax.kernels.attention.types import KVPages
from llmjax.kernels.cuda import attention as cuda
from tests.kernels.attention_case import Case, filled_pages, make_data

HURRY = {"xla_backend_optimization_level": "0"}


def run(case: Case, seed: int = 0, *, interpret: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Output and the reference's, f32 [real tokens, H, h]; those of other tokens must be 0."""
    data = make_data(case, seed)

    @jax.jit
    def compute(
        q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch, sinks: jax.Array | None
    ) -> tuple[jax.Array, KVPages]:
        assert cuda.refuses(q, k, v, pages) is None
        return cuda.attend(q, k, v, pages, batch, sinks, **data.rules, interpret=interpret)

    arguments = (data.q, data.k, data.v, filled_pages(case, data.filling, as_bits=False), data.batch, data.sinks)
    compiled = compute.lower(*arguments).compile(HURRY if interpret else None)
    out, pages = compiled(*arguments)
    expected = reference.ragged_paged_attention(data.q, pages, data.batch, sinks=data.sinks, **data.rules)
    out = np.asarray(out)
    assert out.dtype == data.q.dtype
    assert (out[~data.real] == 0).all()
    return out[data.real].astype(np.float32), expected[data.real]


def check(case: Case, seed: int = 0) -> None:
    out, expected = run(case, seed)
    tolerance = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}[case.activations]
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=0)


DECODES = ((1, 1), (1, 37), (0, 0), (1, 150), (1, 64))
MIX = ((1, 50), (0, 0), (13, 13), (40, 100), (1, 3), (2, 2))
CALIBRATION = ((0.03, 0.25), (0.02, -0.5))
BF16 = {"activations": "bfloat16", "cache": "bfloat16"}
CASES = {
    "decodes": Case(DECODES, decode=True),
    "mix": Case(MIX, page_size=4),
    "decodes, everything": Case(DECODES, decode=True, window=17, softcap=4.0, sinks=True, cache="int8"),
    "everything": Case(MIX, window=31, softcap=5.0, sinks=True, cache="bfloat16"),
    "one key": Case(MIX, window=1, cache="float16"),
    "one token a page": Case(MIX, page_size=1, head_dim=32, cache="int8"),
    "pages of 3": Case(DECODES, decode=True, page_size=3, cache="bfloat16", window=45),
    "int8, calibrated": Case(MIX, cache="int8", calibration=CALIBRATION, softcap=5.0, sinks=True),
    "int8, calibrated decodes": Case(DECODES, decode=True, cache="int8", calibration=CALIBRATION, sinks=True),
    "e4m3": Case(MIX, cache="float8_e4m3fn", head_dim=40),
    "e4m3, calibrated": Case(DECODES, decode=True, cache="float8_e4m3fn", calibration=((0.005, 0), (0.5, 0))),
    "e5m2": Case(DECODES, decode=True, cache="float8_e5m2", head_dim=256, heads=4, kv_heads=1),
    "bf16": Case(MIX, activations="bfloat16", cache="bfloat16", head_dim=80),
    "f16, 16 heads share": Case(MIX, activations="float16", cache="float16", heads=16, kv_heads=1, head_dim=128),
    "bf16 with int8, no heads share": Case(MIX, activations="bfloat16", cache="int8", heads=3, kv_heads=3),
    "latent decodes": Case(DECODES, decode=True, heads=20, kv_heads=1, head_dim=80, value_dim=64),
    "latent": Case(MIX, heads=5, kv_heads=1, head_dim=80, value_dim=64, window=31, softcap=5.0, sinks=True),
    "latent, int8": Case(MIX, heads=4, kv_heads=1, head_dim=80, value_dim=64, cache="int8"),
    "latent, e4m3, calibrated": Case(
        DECODES,
        decode=True,
        heads=4,
        kv_heads=1,
        head_dim=48,
        value_dim=32,
        cache="float8_e4m3fn",
        calibration=((0.03, 0.5),),
    ),
    "latent, DeepSeek's": Case(MIX, heads=40, kv_heads=1, head_dim=576, value_dim=512, **BF16),
    "80 heads share": Case(DECODES, decode=True, heads=80, kv_heads=1, head_dim=16),
    "head size 256": Case(MIX, head_dim=256, heads=4, kv_heads=1, cache="bfloat16"),
}


# What the others add is for a card: sizes that kernels are compiled for, and types that the kernels here read alike.
INTERPRETED = (
    "decodes, everything",
    "everything",
    "pages of 3",
    "int8, calibrated",
    "e4m3",
    "e5m2",
    "latent",
    "latent, e4m3, calibrated",
    "80 heads share",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_equals_reference(name: str) -> None:
    check(CASES[name])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=4))
    decode = draw(st.booleans())
    lengths = [(min(count, 1) if decode else count, past) for count, past in counts]
    kv_heads = draw(st.integers(1, 2))
    return Case(
        lengths=tuple((count, count + past) if count else (0, 0) for count, past in lengths),
        heads=draw(st.sampled_from([1, 2, 3, 7, 16])) * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 24, 64, 96])),
        page_size=draw(st.sampled_from([1, 3, 8, 16, 64])),
        cache=draw(st.sampled_from(cuda.CACHE_TYPES)),
        window=draw(st.sampled_from([None, 1, 2, 16, 33])),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.booleans()),
        decode=decode,
        padding=draw(st.integers(1, 3)),
    )


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(case=cases(), seed=st.integers(0, 99))
def test_equals_reference_anywhere(case: Case, seed: int) -> None:
    check(case, seed)


ON_A_CARD = {
    **CASES,
    "decodes of 4096 keys": Case(((1, 4096), (1, 3000)), heads=32, kv_heads=8, head_dim=128, decode=True),
    "chunk of 512 after 1536": Case(((512, 2048), (1, 4096)), heads=32, kv_heads=8, head_dim=128),
}


@pytest.mark.cuda
@pytest.mark.parametrize("cache", [*cuda.CACHE_TYPES, "as it is"])
@pytest.mark.parametrize("name", ON_A_CARD)
def test_equals_reference_on_a_card(name: str, cache: str, cuda_device: jax.Device) -> None:
    """The cases as they are, and with bf16 activations and every type of pages."""
    case = ON_A_CARD[name]
    if cache != "as it is":
        calibration = None if jnp.dtype(cache).itemsize > 1 else case.calibration
        case = replace(case, activations="bfloat16", cache=cache, calibration=calibration)
    out, expected = run(case, interpret=False)
    limit = 1e-4 if case.activations == "float32" else 1e-2
    assert np.linalg.norm(out - expected) <= limit * np.linalg.norm(expected)
