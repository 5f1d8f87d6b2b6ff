"""ggml's quantizers in C++: the blocks that NumPy makes, to the bit, whatever the weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.cpu.library import forced_isa, library
from llmjax.kernels.cpu.quantizers import TYPES, Quantized, quantize_blocks, quantizes
from llmjax.weights.ggml.reference import QUANTIZERS, fill_blocks
from llmjax.weights.ggml.types import GGML_TYPES, TYPE_IDS

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C++ kernels")
NAMES = [GGML_TYPES[number].name.lower() for number in sorted(TYPES)]
ISAS = ["generic", "avx2"]
SHAPE = (60, 512)


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(SHAPE)
    sizes = 10.0 ** rng.integers(-12, 5, (SHAPE[0], SHAPE[1] // 32))
    return {
        "normal": normal,
        "tiny": normal * 1e-7,
        "subnormal": normal * 1e-38,
        "of all sizes": normal * 10.0 ** rng.integers(-12, 4, SHAPE),
        "of sizes by block": normal * np.repeat(sizes, 32, axis=1),
        "small integers": rng.integers(-3, 4, SHAPE).astype(float),
        "signs": np.sign(normal),
        "zeros of both signs": np.where(normal < 0, -0.0, 0.0),
        "positive": np.abs(normal),
        "negative": -np.abs(normal),
        "one of a block": np.eye(*SHAPE) * -7,
        "large": normal * 3e5,
    }[kind]


def check(name: str, x: np.ndarray) -> None:
    block = QUANTIZERS[name].block
    x = np.ascontiguousarray(x, np.float32).reshape(-1, block.elems)
    expected = np.zeros(len(x), block.layout)
    fill_blocks(x, name, expected)
    found = np.full(len(x) * block.nbytes, 0xAA, np.uint8)
    done = quantize_blocks(x, found, type_id=TYPE_IDS[block.name])
    np.testing.assert_array_equal(found.reshape(len(x), -1), expected.view(np.uint8).reshape(len(x), -1))
    scales = [expected[field] for field in ("d", "m", "dmin") if field in (block.layout.names or ())]
    fits = all(np.isfinite(scale).all() for scale in scales)
    assert done is (Quantized.DONE if fits else Quantized.TOO_LARGE)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_blocks(name: str, isa: str) -> None:
    native = library()
    if native is None or isa not in native.usable:
        pytest.skip(f"this machine has no {isa}")
    with forced_isa(isa):
        for kind in ("normal", "tiny", "subnormal", "of all sizes", "of sizes by block", "small integers"):
            check(name, weights(kind))
        for kind in ("signs", "zeros of both signs", "positive", "negative", "one of a block", "large"):
            check(name, weights(kind))


@given(
    name=st.sampled_from(NAMES),
    count=st.integers(1, 20),
    values=st.lists(st.floats(-(2.0**29), 2.0**29, width=32), min_size=1, max_size=300),
    seed=st.integers(0, 9),
)
@settings(max_examples=150)
def test_any_numbers(name: str, count: int, values: list[float], seed: int) -> None:
    elems = QUANTIZERS[name].block.elems
    chosen = np.random.default_rng(seed).choice(np.array(values, np.float32), (count, elems))
    check(name, chosen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "verdict"),
    [(np.inf, Quantized.NOT_FINITE), (np.nan, Quantized.NOT_FINITE), (2.0**30, Quantized.TOO_LARGE)],
)
@pytest.mark.parametrize("at", [(0, 0), (8, 31), (10, 5)])
def test_what_cannot_be_quantized_is_said(name: str, value: float, verdict: Quantized, at: tuple[int, int]) -> None:
    block = QUANTIZERS[name].block
    x = np.ones((11, block.elems), np.float32)
    x[at] = value
    assert quantize_blocks(x, np.empty(11 * block.nbytes, np.uint8), type_id=TYPE_IDS[block.name]) is verdict


def test_other_types_are_said_to_be_unknown() -> None:
    assert quantizes(TYPE_IDS["Q4_K"]) and not quantizes(TYPE_IDS["Q2_K"])
    with pytest.raises(AssertionError, match="type 10 is not quantized"):
        quantize_blocks(np.zeros((1, 256), np.float32), np.empty(84, np.uint8), type_id=TYPE_IDS["Q2_K"])
