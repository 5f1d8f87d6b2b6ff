"""Products of codes as fragments of tensor cores: simulated thread by thread against the dequantized weights, and
compiled for cards that are described."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.kernels.cuda import fragments, threads
from llmjax.kernels.cuda.fragments import FragmentPlan, refuses
from llmjax.kernels.cuda.lowering import MOSAIC_ON_AMPERE
from llmjax.kernels.cuda.quantized_linear import MAX_FRAGMENT_ROWS, key_of, multiplies_fragments, plan_of
from llmjax.kernels.cuda.threads import QUAD, THREADS, WARPS, Threads
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR
from llmjax.kernels.row_format import Codes, RowFormat
from tests.described_card import H100, dumped, lower_for, needs_plugin, on_mosaic_cards
from tests.kernels import test_cuda_lowering, test_cuda_quantized_linear
from tests.kernels.test_cuda_quantized_linear import inputs, product, random_tensor

FORMATS = {
    name: form
    for name, form in test_cuda_quantized_linear.FORMATS.items()
    if refuses(random_tensor(form, size_out=1, dtype="bfloat16")) is None
}


def error(
    name: str, rows: int, plan: FragmentPlan | None = None, *, size_out: int = 75, permuted: bool = False
) -> float:
    """The largest, of the sum of the products' sizes: what f32 sums round. Neither codes nor scales are rounded."""
    form, size_out = FORMATS[name], 75
    weight = random_tensor(form, size_out=size_out, dtype="bfloat16", permuted=permuted)
    assert multiplies_fragments(rows, weight)
    x = np.asarray(jnp.asarray(inputs(rows, form.size_in), jnp.bfloat16))
    bias = np.arange(size_out, dtype=np.float32)
    out = product(x, weight, bias, plan)
    assert out.shape == (rows, size_out)
    assert out.dtype == np.float32
    x, dense = x.astype(np.float64), np.asarray(weight.dequantize(), np.float64)
    sizes = np.abs(x) @ np.abs(dense).T + bias
    return float((np.abs(out - bias - x @ dense.T) / sizes).max())


def test_formats_are_those_of_files() -> None:
    left = set(test_cuda_quantized_linear.FORMATS) - set(FORMATS)
    assert left == {"15 levels", "nvfp4"}  # as the table of tests has it, with levels that are not E2M1


def test_codes_of_four_bits_with_scales_and_minima() -> None:
    assert error("q4_k", 5) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_exact(name: str) -> None:
    assert error(name, 3) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,rows,plan",
    [
        ("gptq", 17, FragmentPlan(rows=24, tiles=1, splits=2)),
        ("q4_1", 20, FragmentPlan(rows=16, tiles=2, splits=3)),  # more splits than steps
        ("q8_0", 70, FragmentPlan(rows=64, tiles=4, splits=2)),
        ("bits3", 40, None),
        ("q6_k", 130, None),
    ],
)
def test_rows_divisions_bias_and_columns(name: str, rows: int, plan: FragmentPlan | None) -> None:
    assert error(name, rows, plan, permuted=True) < 1e-6


@pytest.mark.slow
def test_every_code_of_eight_bits_is_exact() -> None:
    """Each alone in its product."""
    for kind in ("int", "e4m3"):
        form = RowFormat(256, Codes(8, kind), 256, "f32")
        weight = random_tensor(form, size_out=1, dtype="bfloat16")
        words = np.asarray(weight.words).copy()
        codes = np.arange(256, dtype=np.uint8)
        if kind == "e4m3":
            codes[[0x7F, 0xFF]] = 0  # not a number
        words[0, :64, 0] = codes.view(np.uint32)
        words[0, 64] = np.float32(1).view(np.uint32)
        weight = replace(weight, words=jnp.asarray(words))
        found = product(np.eye(256, dtype=np.float32), weight)
        np.testing.assert_array_equal(found[:, 0], np.asarray(weight.dequantize())[0])


def test_products_of_fragments_are_the_instructions() -> None:
    """Element by element, as the PTX ISA says where mma.m16n8k16 has them (9.7.14.5.8)."""
    rng = np.random.default_rng(0)
    halves = {name: rng.standard_normal((*QUAD, 2)).astype(jnp.bfloat16) for name in ("low", "high", "x")}
    quads = {name: jnp.asarray(numbers.view(np.uint32)[..., 0]) for name, numbers in halves.items()}
    before = [rng.standard_normal(QUAD).astype(np.float32) for _ in range(2)]
    for step in (0, 1):
        sums = Threads(interpret=True).multiply([jnp.asarray(s) for s in before], **quads, step=step)
        for warp in range(WARPS):
            for first in (0, 2):  # the two instructions, each with rows 4 * g + first and 4 * g + first + 1
                a, b, expected = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
                found = np.zeros((16, 8))
                for lane in range(32):
                    group, in_group, thread = lane >> 2, lane & 3, 32 * warp + lane
                    registers = [halves[name][thread, first + j] for name in ("low", "high") for j in (0, 1)]
                    for i, value in enumerate(np.concatenate(registers)):
                        row = group + (0 if i % 4 < 2 else 8)
                        a[row, in_group * 2 + (i & 1) + (0 if i < 4 else 8)] = value
                    for i, value in enumerate(halves["x"][thread, 2 * step : 2 * step + 2].reshape(-1)):
                        b[in_group * 2 + (i & 1) + (0 if i < 2 else 8), group] = value
                    for i in range(4):
                        place = (group + (0 if i < 2 else 8), in_group * 2 + (i & 1))
                        expected[place] = before[i & 1][thread, first + (i >> 1)]
                        found[place] = sums[i & 1][thread, first + (i >> 1)]
                np.testing.assert_allclose(found, expected + a @ b, rtol=1e-5, atol=1e-5)


def test_sums_and_scales_of_pairs() -> None:
    threads = Threads(interpret=True)
    numbers = np.zeros((*QUAD, 2), jnp.bfloat16)
    numbers[:, :, 0], numbers[:, :, 1] = 128 + np.arange(THREADS)[:, None] % 64, -256.0
    quads = jnp.asarray(numbers.view(np.uint32)[..., 0])
    twice = np.asarray(threads.add(quads, quads)).view(jnp.bfloat16).reshape(*QUAD, 2)
    np.testing.assert_array_equal(twice, 2 * numbers)
    smallest = jnp.full(QUAD, 0x8001_0040, jnp.uint32)  # -2^-133 and 2^-127
    scaled = np.asarray(threads.scale(smallest, 126)).view(jnp.bfloat16).reshape(*QUAD, 2)
    np.testing.assert_array_equal(scaled[0, 0].astype(np.float64), [0.5, -(2.0**-7)])


@given(rows=st.integers(1, MAX_FRAGMENT_ROWS), size_in=st.integers(1, 30_000), size_out=st.integers(1, 200_000))
def test_plans_cover_every_matrix(rows: int, size_in: int, size_out: int) -> None:
    chunks = -(-size_in // 32)
    plan = FragmentPlan.of(rows, size_out=size_out, chunks=chunks)
    assert plan.rows % 8 == 0 and 8 <= plan.rows <= 64
    assert plan.rows >= min(rows, 64)
    assert plan.tiles in (1, 2, 4)
    each = -(-chunks // (fragments.STEP * plan.splits * (WARPS // plan.tiles)))  # steps of a warp
    assert plan.splits * (WARPS // plan.tiles) * each * fragments.STEP >= chunks
    assert plan.splits == 1 or (plan.splits - 1) * (WARPS // plan.tiles) * fragments.STEP < chunks


def test_says_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_tensor(FORMATS["q4_k"], size_out=40, dtype="bfloat16")
    assert refuses(weight) is None
    assert refuses(replace(weight, dtype=jnp.dtype("float16"))) == "weights are float16"
    levels = random_tensor(test_cuda_quantized_linear.FORMATS["nvfp4"], size_out=40, dtype="bfloat16")
    assert refuses(levels) == "codes have levels of their own"
    assert refuses(random_tensor(RowFormat(64, Codes(8, "e5m2"), 64, "f32"), size_out=32, dtype="bfloat16"))
    for capability in ("8.0", "8.9", "9.0", "12.0"):
        card = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(threads, "default_device", lambda card=card: card)
        refused = capability < "9" and capability != "12.0" and not MOSAIC_ON_AMPERE
        assert (refuses(weight) is not None) is refused


def test_8_bit_activations_and_what_has_no_fragments_have_their_own_kernels() -> None:
    weight = random_tensor(FORMATS["channel"], size_out=40, dtype="bfloat16")
    assert {key_of(rows, weight).kernel for rows in (1, 2, 3, 512)} == {"fragments"}
    assert isinstance(plan_of(1, weight), FragmentPlan)
    assert {key_of(rows, replace(weight, dtype=jnp.dtype("float16"))).kernel for rows in (1, 3)} == {"product"}
    symmetric = random_tensor(RowFormat(64, Codes(8, "int"), 64, "f32"), size_out=32, dtype="bfloat16")
    integers = [key_of(rows, replace(symmetric, activations="int8")).kernel for rows in (1, 2, 3)]
    assert integers == ["fragments", "fragments", "integers"]
    codes = random_tensor(RowFormat(128, Codes(8, "e4m3"), 128, "f32"), size_out=32, dtype="bfloat16")
    assert key_of(3, replace(codes, activations="fp8")).kernel == "float8"


# PTX a code, mma and loads included; Triton's tiles of dequantized weights take some 8 without them.
MOST_INSTRUCTIONS = {"gptq, 16": 2.6, "q4_0, 16": 3.5, "q4_k, 8": 4.1, "q8_0, 16": 4.3}
CASES = ["q4_0, 16", "gptq, 16", "gptq, 64", "q4_k, 8", "q6_k, 32", "q8_0, 16", "mxfp4, 16", "fp8, 16"]


def program(case: str) -> tuple:
    name, rows = case.split(", ")
    form = test_cuda_lowering.FORMATS[name]
    x = jax.ShapeDtypeStruct((int(rows), form.size_in), jnp.bfloat16)
    return partial(QUANTIZED_LINEAR), (x, test_cuda_lowering.matrix(form), None)


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_hopper(case: str) -> None:
    call, arguments = program(case)
    text = lower_for(H100, call, *arguments).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert "xla.gpu.triton" not in text


def test_layers_that_are_alike_have_one_kernel() -> None:
    """Lowering it takes a second."""
    _, (x, weight, _) = program("q4_0, 16")
    layers = [weight, weight, replace(weight, size_out=weight.size_out - 1)]
    text = lower_for(H100, lambda x, layers: [QUANTIZED_LINEAR(x, w, None) for w in layers], x, layers).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert text.count("call @_launched") == 3


COMPILE = """
import json, re, sys, tempfile
from pathlib import Path
from llmjax.engine.programs.graphs import GRAPHS
from tests import described_card
from tests.kernels.test_cuda_fragments import CASES, program

card = described_card.MOSAIC_CARDS[sys.argv[1]]
for case in CASES:
    print("CASE", case, flush=True)
    call, arguments = program(case)
    options = {**GRAPHS, "xla_gpu_graph_min_graph_size": "1"}
    with tempfile.TemporaryDirectory() as folder:
        how = {"donated": (), "options": options, "folder": Path(folder), "card": card}
        # A function of its own: else JAX knows it as it was traced before.
        compiled = described_card.compile_for_card(lambda *given: call(*given), *arguments, **how)
    print("\\nTHUNKS", json.dumps(compiled.started), flush=True)
"""


@needs_plugin
@pytest.mark.slow
@on_mosaic_cards
def test_compiles_to_whole_fragments(name: str) -> None:
    """In the loop, two mma for each 8 rows of x and 16 columns and no more, whose inputs are 16-byte loads and two
    instructions for two codes; within registers; in one CUDA graph with what prepares x."""
    parts = dumped(COMPILE, name)
    assert len(parts) == len(CASES)
    for case, text in zip(CASES, parts, strict=True):
        form, rows = case.split(", ")
        assert text.startswith(case)
        column_tiles, blocks = int(rows) // 8, 2 * fragments.STEP  # of 16 columns
        assert text.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == 2 * column_tiles * blocks, case
        loop = text.split("$L__BB0_1:")[1].split("bra")[0]
        loads = re.findall(r"ld\.global\.nc\.(\S+)", loop)  # two quads of what is fetched ahead are pairs at times
        words = fragments.STEP * {"q6_k": 2, "q8_0": 2, "fp8": 2}.get(form, 1)
        assert sum(kind in ("v4.b32", "v2.b64") for kind in loads) >= fragments.STEP * column_tiles + words, case
        assert set(loads) <= {"v4.b32", "v2.b64", "v2.b32"}
        spilled = int(text.split(" bytes spill stores")[0].split()[-1])
        assert spilled <= (32 if rows == "64" else 0), case
        assert json.loads(text.split("THUNKS ")[1].splitlines()[0]) == ["kCommandBuffer"], case
        found = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]*)\s", loop, re.MULTILINE)
        count = sum(not instruction.startswith("mov") for instruction in found)
        assert count / (4 * 8 * fragments.STEP) < MOST_INSTRUCTIONS.get(case, math.inf), (case, count)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 33, 64, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_a_card(name: str, rows: int, cuda_device: jax.Device) -> None:
    form = replace(FORMATS[name], size_in=32 * FORMATS[name].size_in)
    weight = random_tensor(form, size_out=1000, dtype="bfloat16")
    x = np.asarray(jnp.asarray(inputs(rows, form.size_in), jnp.bfloat16))
    out = product(x, weight, interpret=False)
    x, dense = x.astype(np.float64), np.asarray(weight.dequantize(), np.float64)
    assert (np.abs(out - x @ dense.T) / (np.abs(x) @ np.abs(dense).T)).max() < 1e-5
