"""Attention of single queries in fragments of tensor cores: simulated thread by thread against the reference, and
compiled for cards that are described."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.attention import KVPages, reference
from llmjax.kernels.cuda import split as split_module
from llmjax.kernels.cuda import threads
from llmjax.kernels.cuda.decode import decode
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.lowering import MOSAIC_ON_AMPERE
from llmjax.kernels.cuda.mosaic_decode import refuses
from llmjax.kernels.cuda.mosaic_pages import Codes
from llmjax.kernels.cuda.pages import PageReader
from llmjax.kernels.cuda.split import Split
from llmjax.kernels.cuda.threads import QUAD, THREADS, WARPS, Threads, launch
from tests.described_card import H100, dumped, lower_for, needs_plugin, on_mosaic_cards
from tests.kernels.attention_case import Case, Data, empty_pages, filled_pages, make_data, without_unseen
from tests.kernels.test_cuda_lowering import Attention

pytestmark = pytest.mark.jax_api

HURRY = {"xla_backend_optimization_level": "0"}
BF16: dict[str, Any] = {"activations": "bfloat16", "cache": "bfloat16", "decode": True}
F16: dict[str, Any] = {"activations": "float16", "cache": "float16", "decode": True}
LENGTHS = ((1, 700), (1, 3), (0, 0), (1, 40), (1, 129))
PLAIN = Case(LENGTHS, heads=4, kv_heads=2, **BF16)
CASES = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=299, softcap=5.0, sinks=True),
    "f16": Case(LENGTHS, heads=5, kv_heads=1, sinks=True, **F16),
    "head size 128": Case(LENGTHS, heads=6, kv_heads=3, head_dim=128, window=130, page_size=24, **BF16),
    "int8": Case(
        LENGTHS, heads=6, kv_heads=2, head_dim=128, window=299, activations="bfloat16", cache="int8", decode=True
    ),
    "12 heads share keys": Case(LENGTHS, heads=12, kv_heads=1, page_size=8, **BF16),
    "20 heads share keys": Case(LENGTHS, heads=20, kv_heads=1, head_dim=128, sinks=True, page_size=64, **BF16),
    "a head alone": Case(LENGTHS, heads=2, kv_heads=2, head_dim=128, softcap=2.0, **F16),
}


def stored(case: Case, data: Data) -> KVPages:
    pages = filled_pages(case, data.filling, as_bits=False)
    return reference.write_kv(pages, data.k, data.v, data.batch.places(case.page_size))


def error(case: Case, *, shares: int, keys: int = 64, heads: int = 16) -> float:
    """Error of the kernels, relative to the norm of the reference. What no query sees is not a number."""
    data = make_data(case)
    pages, clean = stored(case, without_unseen(data)), stored(case, data)
    assert refuses(jnp.asarray(data.q), pages) is None
    split = Split(shares=shares, heads=heads, keys=keys, mosaic=1)
    run = partial(decode, rules=QueryRules(**data.rules), split=split, interpret=True)
    arguments = jnp.asarray(data.q), pages, data.batch, data.sinks
    out = np.asarray(jax.jit(run).lower(*arguments).compile(HURRY)(*arguments), np.float32)
    expected = reference.ragged_paged_attention(data.q, clean, data.batch, sinks=data.sinks, **data.rules)
    assert (out[~data.real] == 0).all()
    out, expected = out[data.real], np.asarray(expected, np.float32)[data.real]
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


# Outputs and weights are rounded to bf16 or f16.
MOST = {"bfloat16": 3e-3, "float16": 4e-4, "int8": 3e-3}


def test_whole_rows_equal_the_reference() -> None:
    """Each warp has two runs at most; nothing is merged."""
    whole = replace(PLAIN, lengths=((1, 220), (1, 3), (0, 0), (1, 129)), window=200)
    assert error(whole, shares=5, keys=256) < MOST["bfloat16"]


@pytest.mark.slow
def test_tables_are_read_up_to_the_last_page_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation forgives what is after an array; a card does not."""
    places: set[int] = set()
    look_up = Threads.look_up

    def recorded(self: Threads, ref: Any, at: jax.Array) -> jax.Array:
        jax.debug.callback(lambda at: places.update(np.asarray(at).ravel().tolist()), at)
        return look_up(self, ref, at)

    monkeypatch.setattr(Threads, "look_up", recorded)
    case = replace(PLAIN, lengths=((1, 100), (1, 17)), kv_heads=1, padding=0)
    error(case, shares=2, keys=128)
    jax.effects_barrier()
    width = -(-100 // case.page_size) + 1
    assert places == {*range(7), width, width + 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_heads_pages_and_rules(name: str) -> None:
    case = CASES[name]
    assert error(case, shares=3) < MOST[case.cache]


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "keys", "heads"), [(1, 64, 16), (40, 16, 16), (3, 128, 8)])
def test_however_rows_are_divided(shares: int, keys: int, heads: int) -> None:
    """With rows whole, with more parts than are merged at a time, and with heads of a key on several programs."""
    assert error(CASES["12 heads share keys"], shares=shares, keys=keys, heads=heads) < MOST["bfloat16"]


@pytest.mark.slow
def test_rows_of_any_length() -> None:
    case = Case(((1, 400), (1, 300), (1, 200)), heads=2, kv_heads=1, window=150, padding=0, **F16)
    data = make_data(case)
    pages = stored(case, data)
    split = Split(shares=4, heads=16, keys=32, mosaic=1)
    run = partial(decode, rules=QueryRules(**data.rules), split=split, interpret=True)
    # Windows begin anywhere, and all pages are there.
    table = jnp.arange(1, 79, dtype=jnp.int32).reshape(3, 26) % case.num_pages
    batch = replace(data.batch, page_table=table)
    compiled = jax.jit(run).lower(jnp.asarray(data.q), pages, batch, None).compile(HURRY)

    @settings(max_examples=20, deadline=None)
    @given(lengths=st.lists(st.integers(0, 400), min_size=3, max_size=3))
    def check(lengths: list[int]) -> None:
        now = replace(batch, kv_len=jnp.asarray(lengths, jnp.int32))
        out = np.asarray(compiled(jnp.asarray(data.q), pages, now, None), np.float32)
        expected = reference.ragged_paged_attention(data.q, pages, now, sinks=None, **data.rules)
        seen = np.asarray(lengths) > 0
        np.testing.assert_allclose(out[seen], np.asarray(expected, np.float32)[seen], atol=2e-3)
        assert (out[~seen] == 0).all()

    check()


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_maxima_and_sums_over_lanes() -> None:
    quads = numbers(2, *QUAD)
    for how, of in (("max", np.max), ("sum", np.sum)):
        found = np.asarray(Threads(interpret=True).reduced([jnp.asarray(q) for q in quads], how, (4, 8, 16)))
        for i, each in enumerate(quads):
            lanes = each.reshape(WARPS, 8, 4, 4)  # lane 4 * g + c
            expected = np.broadcast_to(of(lanes, axis=(1, 3))[:, None], (WARPS, 8, 4)).reshape(THREADS)
            np.testing.assert_allclose(found[:, i], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found[:, i + 2], found[:, i])


def test_transposed_matrices_are_the_instructions() -> None:
    """Element by element, as the PTX ISA says where movmatrix has them (9.7.14.5.17)."""
    halves = np.random.default_rng(0).integers(0, 1 << 16, (*QUAD, 2)).astype(np.uint16)
    found = Threads(interpret=True).transposed(jnp.asarray(halves.view(np.uint32)[..., 0]))
    found = np.asarray(found).view(np.uint16).reshape(*QUAD, 2)
    for thread in range(THREADS):
        warp, lane = thread - thread % 32, thread % 32
        for half in (0, 1):
            row, column = lane // 4, lane % 4 * 2 + half
            np.testing.assert_array_equal(found[thread, :, half], halves[warp + column * 4 + row // 2, :, row % 2])


def test_quads_are_turned_and_paired() -> None:
    quads = numbers(4, *QUAD)
    np.testing.assert_array_equal(
        Threads(interpret=True).turned(list(map(jnp.asarray, quads))), quads.transpose(2, 1, 0)
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        pairs = np.asarray(Threads(interpret=True).pairs(jnp.asarray(quads[0]), jnp.asarray(quads[1]), dtype))
        expected = np.stack([quads[0], quads[1]], -1).astype(dtype)
        np.testing.assert_array_equal(pairs.view(dtype).reshape(*QUAD, 2), expected)


def test_every_code_of_int8_is_exact() -> None:
    codes = np.random.default_rng(0).permuted(np.tile(np.arange(-128, 128, dtype=np.int8), 32)).reshape(4, *QUAD, 4)
    words = [jnp.asarray(each.view(np.uint32)[..., 0]) for each in codes]
    for number, factors in enumerate(Codes(Threads(interpret=True)).keys(words)):  # of a word of each of four keys
        expected = codes[:, :, number].swapaxes(0, 1).astype(np.float32)
        for first, words_of_two in enumerate(factors):
            halves = np.asarray(words_of_two).view(jnp.bfloat16).reshape(*QUAD, 2).astype(np.float32)
            np.testing.assert_array_equal(halves, expected[..., first::2])


def _copy(threads: Threads, place: Any, data: Any, table: Any, out: Any) -> None:
    thread = threads.index()
    block = threads.look_up(table, thread & 3)
    threads.store(out, thread * 8, threads.load(data, (thread >> 2) * 8, 256, block=block, of=1024))


def test_blocks_of_an_array_are_read_where_they_lie() -> None:
    data, table = numbers(4096, dtype=jnp.bfloat16), np.asarray([3, 0, 2, 1], np.int32)
    out = launch(
        "copy",
        partial(_copy, Threads(interpret=True)),
        jax.ShapeDtypeStruct((1024,), jnp.bfloat16),
        [jnp.asarray(data), jnp.asarray(table)],
        grid=(1, 1, 1),
        interpret=True,
    )
    expected = data.reshape(4, 1024)[table, 256:512].reshape(4, 32, 8).swapaxes(0, 1)
    np.testing.assert_array_equal(np.asarray(out).reshape(32, 4, 8), expected)


def test_says_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "queries are float32": {"activations": "float32", "cache": "float32"},
        "queries are bfloat16, pages float16": {"cache": "float16"},
        "queries are float16, pages int8": {"cache": "int8", "activations": "float16"},
        "size 64 of int8 pages": {"cache": "int8"},
        "pages float8_e4m3fn": {"cache": "float8_e4m3fn"},
        "queries are bfloat16, pages int8": {"cache": "int8", "calibration": ((0.03, 0.25), (0.02, -0.5))},
        "head size 80": {"head_dim": 80},
        "head size 256": {"head_dim": 256},
        "latent": {"head_dim": 128, "value_dim": 64, "kv_heads": 1},
        "pages of 4": {"page_size": 4},
    }
    q, pages = arguments_of(PLAIN)
    assert refuses(q, pages) is None
    for reason, changes in cases.items():
        assert reason in str(refuses(*arguments_of(replace(PLAIN, **changes))))
    for capability in ("8.0", "8.9", "9.0", "12.0"):
        card = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(threads, "default_device", lambda card=card: card)
        assert (refuses(q, pages) is not None) is (capability in ("8.0", "8.9") and not MOSAIC_ON_AMPERE)


def arguments_of(case: Case) -> tuple[jax.ShapeDtypeStruct, KVPages]:
    q = jax.ShapeDtypeStruct((8, case.heads, case.head_dim), jnp.dtype(case.activations))
    return q, empty_pages(case, as_bits=False)


COMPILED = {
    "bf16, 4 heads": Attention(tokens=0),
    "bf16, 16 heads": Attention(tokens=0, heads=64, kv_heads=4),
    "bf16, head size 64": Attention(tokens=0, heads=32, kv_heads=8, head_dim=64),
    "f16, all rules": Attention(tokens=0, cache="float16", activations="float16"),
    "int8, 4 heads": Attention(tokens=0, cache="int8"),
}


def program(name: str, **changes: Any) -> tuple:
    case = COMPILED[name]
    q, _, _, pages, batch = case.arguments(64)
    split = replace(Split.of(case.heads // case.kv_heads, pages, PageReader.of(pages, q)), mosaic=1, **changes)
    rules, sinks = QueryRules(scale=0.1, window=None, softcap=None), None
    if "rules" in name:
        rules, sinks = QueryRules(scale=0.1, window=1000, softcap=30.0), jax.ShapeDtypeStruct((32,), jnp.float32)
    return partial(decode, rules=rules, split=split), (q, pages, batch, sinks)


@pytest.mark.parametrize("name", COMPILED)
def test_lowers_for_hopper_without_triton(name: str) -> None:
    call, arguments = program(name)
    text = lower_for(H100, call, *arguments).as_text()
    assert text.count("@mosaic_gpu") == 2  # one merges
    assert "xla.gpu.triton" not in text


def test_triton_does_it_where_there_is_no_other_word(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, _, pages, _ = COMPILED["bf16, 4 heads"].arguments(64)
    reader = PageReader.of(pages, q)
    assert Split.of(4, pages, reader).mosaic == 0
    monkeypatch.setattr(split_module, "has_triton", lambda: False)
    assert Split.of(4, pages, reader).mosaic == 1


def test_what_mosaic_refuses_is_tritons() -> None:
    q, _, _, pages, batch = Attention(tokens=0, cache="float8_e4m3fn").arguments(64)
    split = Split(shares=64, heads=16, keys=64, mosaic=1)
    call = partial(decode, rules=QueryRules(0.1, None, None), split=split)
    assert "@mosaic_gpu" not in lower_for(H100, call, q, pages, batch, None).as_text()


COMPILE = """
import sys, tempfile
from pathlib import Path
from tests import described_card
from tests.kernels.test_cuda_mosaic_decode import COMPILED, program

card = described_card.MOSAIC_CARDS[sys.argv[1]]
for name in COMPILED:
    print("CASE", name, flush=True)
    call, arguments = program(name)
    with tempfile.TemporaryDirectory() as folder:
        how = {"donated": (), "options": {}, "folder": Path(folder), "card": card}
        compiled = described_card.compile_for_card(lambda *given: call(*given), *arguments, **how)
    print("\\nCOPIES", compiled.text.split("ENTRY")[1].count(" copy("), flush=True)
"""
# PTX in the loop, for 32 keys of a warp.
MOST_INSTRUCTIONS = {
    "bf16, 4 heads": 560,
    "bf16, 16 heads": 700,
    "bf16, head size 64": 380,
    "f16, all rules": 710,
    "int8, 4 heads": 1180,
}


@needs_plugin
@pytest.mark.slow
@on_mosaic_cards
def test_compiles_to_whole_fragments(name: str) -> None:
    """Keys and values are read once, by 16 bytes, and multiplied by tensor cores; all within registers; what was
    computed of whole rows stays where it is when others are merged."""
    parts = dumped(COMPILE, name)
    assert len(parts) == len(COMPILED)
    for (title, case), text in zip(COMPILED.items(), parts, strict=True):
        assert text.startswith(title)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        assert len(spilled) == 4 and not any(spilled), title
        assert max(int(n) for n in re.findall(r"Used (\d+) registers", text)) <= 255
        assert "COPIES 0" in text
        loop = text.split("$L__BB0_3:")[1].split("bra")[0]
        found = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]*)\s", loop, re.MULTILINE)
        tiles = 2 if case.heads // case.kv_heads > 8 else 1
        kind = {"bfloat16": "bf16", "float16": "f16"}[case.activations]
        # Of 32 keys, for keys and for values: loads of 16 bytes, products of 16 x 16 numbers.
        loads = found.count("ld.global.nc.v4.b32") + found.count("ld.global.nc.v2.b64")
        assert loads == (2 * case.head_dim // 16 + 2 if case.cache == "int8" else 2 * case.head_dim // 8)
        assert found.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32") == tiles * case.head_dim // 4
        assert found.count("movmatrix.sync.aligned.m8n8.trans.b16") == 4 * tiles
        assert found.count("shfl.sync.bfly.b32") == 6 * tiles
        assert sum(not instruction.startswith("mov.") for instruction in found) < MOST_INSTRUCTIONS[title], title


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_the_reference_on_a_card(head_dim: int, cuda_device: jax.Device) -> None:
    for case in (
        Case(((1, 4000), (1, 70), (1, 1), (0, 0)), heads=32, kv_heads=8, head_dim=head_dim, **BF16),
        Case(((1, 9000), (1, 700)), heads=32, kv_heads=2, head_dim=head_dim, window=900, sinks=True, **F16),
    ):
        data = make_data(case)
        pages, clean = stored(case, without_unseen(data)), stored(case, data)
        if reason := refuses(jnp.asarray(data.q), pages):
            pytest.skip(reason)
        for shares in (4, 64):
            split = Split(shares=shares, heads=16, keys=128, mosaic=1)
            run = jax.jit(partial(decode, rules=QueryRules(**data.rules), split=split))
            out = np.asarray(run(jnp.asarray(data.q), pages, data.batch, data.sinks), np.float32)
            expected = reference.ragged_paged_attention(data.q, clean, data.batch, sinks=data.sinks, **data.rules)
            out, expected = out[data.real], np.asarray(expected, np.float32)[data.real]
            assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < MOST[case.cache]
