"""Storing keys and values by Mosaic GPU: simulated thread by thread against the reference, and compiled for cards that
are described."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import KVPages, reference
from llmjax.kernels.cuda import kv_write
from llmjax.kernels.cuda.kv_write import Storing, write_kv
from llmjax.kernels.cuda.mosaic_kv_write import refuses
from llmjax.kernels.cuda.threads import QUAD, Threads
from tests.described_card import H100, dumped, lower_for, needs_plugin, on_mosaic_cards
from tests.kernels.attention_case import Case, empty_pages, filled_pages, make_data, owned
from tests.kernels.test_cuda_kv_write import check_nearly_same
from tests.kernels.test_cuda_lowering import Attention

pytestmark = pytest.mark.jax_api

MIX = ((1, 50), (0, 0), (13, 13), (9, 30))
CASES = {
    "bf16": Case(MIX, cache="bfloat16", activations="bfloat16"),
    "f16, head size 24": Case(MIX, cache="float16", activations="float16", head_dim=24, page_size=3),
    "bf16, latent": Case(MIX, heads=2, kv_heads=1, head_dim=48, value_dim=32, cache="bfloat16", activations="bfloat16"),
    "int8": Case(MIX, cache="int8", activations="bfloat16"),
    "int8 of f16, head size 16": Case(MIX, cache="int8", activations="float16", head_dim=16, page_size=5),
    "int8, head size 512": Case(((1, 5),), decode=True, cache="int8", activations="bfloat16", head_dim=512),
}
MOSAIC = Storing(tokens=8, mosaic=1)


def written(case: Case, *, interpret: bool) -> tuple[KVPages, KVPages]:
    """By the kernel and by the reference."""
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)
    k, v = data.q[:, : case.kv_heads], data.v
    assert refuses(jnp.asarray(k), pages) is None
    write = jax.jit(partial(write_kv, storing=MOSAIC, interpret=interpret))
    return write(pages, k, v, data.batch), reference.write_kv(pages, k, v, data.batch.places(case.page_size))


@pytest.mark.parametrize("name", CASES)
def test_stores_the_same_bits(name: str) -> None:
    """Where nothing is stored, pages keep what they had."""
    found, expected = written(CASES[name], interpret=True)
    bits = [owned(CASES[name], pages.data).view(np.uint8) for pages in (found, expected)]
    np.testing.assert_array_equal(bits[0], bits[1])


def test_halves_become_floats() -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        halves = np.random.default_rng(0).standard_normal((*QUAD, 2)).astype(dtype)
        found = Threads(interpret=True).floats(jnp.asarray(halves.view(np.uint32)[..., 0]), dtype)
        np.testing.assert_array_equal(np.stack(found, -1), halves.astype(np.float32))


def test_says_what_it_refuses() -> None:
    cases: dict[str, dict[str, Any]] = {
        "keys are float32": {"activations": "float32"},
        "keys are float16, pages bfloat16": {"activations": "float16"},
        "20 numbers": {"head_dim": 20},
        "pages are float8_e4m3fn": {"cache": "float8_e4m3fn"},
        "pages int8": {"cache": "int8", "calibration": ((0.03, 0.25), (0.02, -0.5))},
        "records of 48 bytes": {"cache": "int8", "head_dim": 48},
    }
    for reason, changes in cases.items():
        case = replace(CASES["bf16"], **changes)
        k = jax.ShapeDtypeStruct((8, case.kv_heads, case.head_dim), jnp.dtype(case.activations))
        assert reason in str(refuses(k, empty_pages(case)))


def program(cache: str, storing: Storing | None) -> tuple:
    _, k, v, pages, batch = Attention(cache=cache).arguments()
    return partial(write_kv, storing=storing), (pages, k, v, batch)


@pytest.mark.parametrize(
    ("cache", "storing", "mosaic"),
    [("bfloat16", MOSAIC, True), ("int8", MOSAIC, True), ("float8_e5m2", MOSAIC, False), ("bfloat16", None, False)],
)
def test_lowers_as_is_said(cache: str, storing: Storing | None, mosaic: bool) -> None:
    call, arguments = program(cache, storing)
    text = lower_for(H100, call, *arguments).as_text()
    assert (text.count("@mosaic_gpu"), text.count("xla.gpu.triton")) == (int(mosaic), int(not mosaic))


def test_does_it_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Storing.of(512) == Storing(8, mosaic=0)
    monkeypatch.setattr(kv_write, "has_triton", lambda: False)
    assert Storing.of(512) == Storing(8, mosaic=1)


COMPILE = """
import sys, tempfile
from pathlib import Path
from tests import described_card
from tests.kernels.test_cuda_mosaic_kv_write import MOSAIC, program

card = described_card.MOSAIC_CARDS[sys.argv[1]]
for cache in ("bfloat16", "int8"):
    print("CASE", cache, flush=True)
    call, arguments = program(cache, MOSAIC)
    with tempfile.TemporaryDirectory() as folder:
        how = {"donated": 0, "options": {}, "folder": Path(folder), "card": card}
        compiled = described_card.compile_for_card(lambda *given: call(*given), *arguments, **how)
    copies = compiled.text.split("ENTRY")[1].count(" copy(")
    print("\\nMEMORY", compiled.memory.alias_size_in_bytes, compiled.memory.temp_size_in_bytes, copies, flush=True)
"""


@needs_plugin
@pytest.mark.slow
@on_mosaic_cards
def test_compiles_in_place(name: str) -> None:
    """By 16 bytes; pages are not copied."""
    for cache, text in zip(("bfloat16", "int8"), dumped(COMPILE, name), strict=True):
        assert text.startswith(cache)
        assert " 0 bytes spill stores" in text
        assert len(re.findall(r"st\.global\.(?:v4\.b32|v2\.b64)", text)) == 2  # keys and values
        assert len(re.findall(r"st\.global\.b32", text)) == (2 if cache == "int8" else 0)
        alias, temporary, copies = map(int, text.split("MEMORY ")[1].splitlines()[0].split())
        _, (pages, *_) = program(cache, MOSAIC)
        assert alias == pages.data.size * pages.data.dtype.itemsize
        assert temporary < 1 << 20
        assert copies == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_stores_the_same_on_a_card(name: str, cuda_device: jax.Device) -> None:
    check_nearly_same(CASES[name], *written(CASES[name], interpret=False))
