"""The C++ attention against the reference, for every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmjax.kernels.attention
from llmjax.kernels.attention import reference
from llmjax.kernels.attention.types import KVPages
from llmjax.kernels.cpu import attention as cpu
from llmjax.kernels.cpu.library import forced_isa, library
from tests.kernels.attention_case import Case, Data, filled_pages, make_data, owned, without_unseen
from tests.kernels.instruction_sets import USABLE, each_isa

FEW_ROWS = 8  # kFewRows in attention_kernel.h
pytestmark = pytest.mark.skipif(library() is None, reason="the C++ library is not built")


def tolerance(case: Case, isa: str) -> float:
    """f32 products agree to rounding; those of bf16 round q and the softmax weights to 8 bits of mantissa, or to 16."""
    if case.activations == "bfloat16":
        return 3e-2
    if isa not in ("avx512bf16", "amx") or case.cache in ("float32", "float16"):
        return 2e-5
    few = max(count for count, _ in case.lengths) * case.heads // case.kv_heads <= FEW_ROWS
    return 2e-4 if few and isa == "amx" else 3e-2


@lru_cache(maxsize=1)
def specified(case: Case, seed: int) -> tuple[Data, KVPages, np.ndarray, KVPages]:
    """Inputs, pages before, and what the reference makes of them; the same for all instruction sets."""
    data = make_data(case, seed)
    stored = pages_of(data)
    return data, stored, *_reference(data, stored)


def check(case: Case, isa: str, seed: int = 0) -> None:
    data, stored, expected, expected_pages = specified(case, seed)
    out, pages = run(data, stored)
    # Every page but the dummy one must be equal to the bit.
    np.testing.assert_array_equal(owned(case, pages.data), owned(case, expected_pages.data))
    assert out.dtype == data.q.dtype
    values = np.asarray(out, np.float32)
    assert (values[~data.real] == 0).all()
    np.testing.assert_allclose(values[data.real], expected[data.real], atol=tolerance(case, isa), rtol=0)


def pages_of(data: Data) -> KVPages:
    return filled_pages(data.case, data.filling, as_bits=True)


def run(data: Data, pages: KVPages) -> tuple[jax.Array, KVPages]:
    q, k, v = (None if x is None else jnp.asarray(x) for x in (data.q, data.k, data.v))
    return cpu.attend(q, k, v, pages, data.batch, sinks_of(data), **data.rules)


def sinks_of(data: Data) -> jax.Array | None:
    return None if data.sinks is None else jnp.asarray(data.sinks)


def _reference(data: Data, pages: KVPages) -> tuple[np.ndarray, KVPages]:
    pages = reference.write_kv(pages, data.k, data.v, data.batch.places(pages.page_size))
    return reference.ragged_paged_attention(data.q, pages, data.batch, sinks=data.sinks, **data.rules), pages


DECODES = ((1, 1), (1, 37), (1, 300), (1, 64))
MIX = ((1, 50), (0, 0), (13, 13), (70, 200), (1, 3), (2, 2))
CASES = {
    "decodes": Case(DECODES, decode=True),
    "decodes of bf16": Case(DECODES, decode=True, cache="bfloat16", window=17, sinks=True),
    "empty rows among decodes": Case(((1, 5), (0, 0), (1, 20)), decode=True, cache="float16"),
    "mix": Case(MIX, page_size=4),
    "both sides": Case(MIX, page_size=4, causal=False),
    "both sides, many queries": Case(((200, 200), (1, 1), (150, 150)), causal=False, heads=3, kv_heads=3, head_dim=32),
    "window on both sides": Case(((200, 200), (70, 70), (33, 33)), causal=False, window=31, cache="bfloat16"),
    "wide window on both sides": Case(((600, 600),), causal=False, window=300, heads=2, kv_heads=1),
    "mix of bf16": Case(MIX, page_size=4, cache="bfloat16", softcap=20.0),
    "mix of f16": Case(MIX, page_size=1, cache="float16", sinks=True),
    "window edges": Case(MIX, window=1),
    "window edges of bf16": Case(MIX, window=32, cache="bfloat16", page_size=64),
    "everything": Case(MIX, window=31, softcap=5.0, sinks=True, cache="bfloat16"),
    "one long decode": Case(((1, 1100),), heads=2, kv_heads=1, cache="bfloat16", padding=0),
    "one long decode, window": Case(((1, 1100),), heads=2, kv_heads=1, window=700, sinks=True),
    "chunk of a long prompt": Case(((9, 2100),), heads=3, kv_heads=1, cache="bfloat16", sinks=True),
    "bf16 activations": Case(MIX, activations="bfloat16", cache="bfloat16"),
    "bf16 activations, f32 pages": Case(MIX, activations="bfloat16"),
    "many heads share": Case(MIX, heads=16, kv_heads=1, cache="bfloat16"),
    "seven heads share, many queries": Case(((130, 700), (70, 200)), heads=14, kv_heads=2, cache="bfloat16"),
    "no heads share": Case(MIX, heads=4, kv_heads=4, cache="bfloat16"),
    "int8": Case(MIX, cache="int8", padding=1),
    "int8 decodes": Case(DECODES, decode=True, cache="int8", window=17, sinks=True, softcap=4.0),
    "int8, one long decode": Case(((1, 1100),), heads=3, kv_heads=1, cache="int8", padding=0, page_size=32),
    "int8, one token a page": Case(MIX, cache="int8", page_size=1, head_dim=32),
    "int8, pages of 3": Case(((1, 70), (1, 31)), cache="int8", page_size=3, decode=True),
    "int8, head size 128": Case(MIX, cache="int8", head_dim=128, page_size=32),
    "int8, head size 40": Case(MIX, cache="int8", head_dim=40),
    "int8, bf16 activations": Case(MIX, activations="bfloat16", cache="int8"),
    "int8, calibrated": Case(MIX, cache="int8", calibration=((0.03, 0.0), (0.02, 0.0))),
    "int8, calibrated, zero points": Case(
        MIX, cache="int8", calibration=((0.03, 0.25), (0.02, -0.5)), softcap=5.0, sinks=True
    ),
    "int8, calibrated decodes": Case(
        ((1, 900), (1, 20)), decode=True, cache="int8", calibration=((0.03, 0.25), (0.02, -0.5)), sinks=True
    ),
    "e4m3": Case(MIX, cache="float8_e4m3fn"),
    "e4m3 decodes": Case(DECODES, decode=True, cache="float8_e4m3fn"),
    "e4m3, calibrated": Case(MIX, cache="float8_e4m3fn", calibration=((0.005, 0.0), (0.5, 0.0))),
    "e5m2": Case(MIX, cache="float8_e5m2", softcap=20.0),
    "e5m2 decodes, head size 256": Case(DECODES, decode=True, cache="float8_e5m2", head_dim=256, heads=4, kv_heads=1),
    "short pages of bf16, decodes": Case(DECODES, decode=True, cache="bfloat16", page_size=3),
    "window that starts in the middle of pages": Case(DECODES, decode=True, cache="bfloat16", window=45),
    "eight rows share": Case(DECODES, decode=True, heads=8, kv_heads=1, cache="bfloat16"),
    "seven rows share, window": Case(
        DECODES, decode=True, heads=7, kv_heads=1, cache="bfloat16", head_dim=96, window=45
    ),
    "eight rows share int8": Case(
        DECODES, decode=True, heads=16, kv_heads=2, cache="int8", head_dim=128, page_size=32, window=45
    ),
    "five rows share int8, head size 256": Case(
        DECODES, decode=True, heads=5, kv_heads=1, cache="int8", head_dim=256, page_size=64, sinks=True
    ),
    "seven rows share e4m3": Case(
        DECODES, decode=True, heads=7, kv_heads=1, cache="float8_e4m3fn", head_dim=128, page_size=32, window=45
    ),
    "head size 32": Case(MIX, head_dim=32, cache="bfloat16"),
    "head size 40": Case(MIX, head_dim=40, cache="bfloat16"),
    "head size 80": Case(MIX, head_dim=80, cache="bfloat16"),
    "head size 128": Case(MIX, head_dim=128, cache="float16"),
    "head size 256": Case(MIX, head_dim=256, heads=4, kv_heads=1, cache="bfloat16"),
}
COMMON_DECODES = ((1, 700), (1, 513), (0, 0), (1, 1100), (1, 769))
COMMON_PROMPTS = {
    "decodes": Case(COMMON_DECODES, decode=True, common=512),
    "decodes of bf16": Case(COMMON_DECODES, decode=True, common=512, cache="bfloat16", softcap=5.0),
    "decodes of f16, short pages": Case(COMMON_DECODES, decode=True, common=512, cache="float16", page_size=3),
    "decodes of int8": Case(COMMON_DECODES, decode=True, common=512, cache="int8", head_dim=32, heads=10),
    "decodes of int8, calibrated": Case(
        COMMON_DECODES, decode=True, common=512, cache="int8", calibration=((0.03, 0.25), (0.02, -0.5))
    ),
    "decodes of int8, seven rows": Case(
        COMMON_DECODES, decode=True, common=512, cache="int8", heads=7, kv_heads=1, head_dim=128, page_size=32
    ),
    "decodes of e4m3": Case(COMMON_DECODES, decode=True, common=512, cache="float8_e4m3fn"),
    "decodes of e5m2, five rows": Case(COMMON_DECODES, decode=True, common=512, cache="float8_e5m2", heads=10),
    "window and sinks": Case(COMMON_DECODES, common=512, window=512, sinks=True, cache="bfloat16", page_size=8),
    "drafts, a chunk and decodes": Case(
        ((3, 700), (3, 550), (1, 601), (1, 532), (200, 712)), common=512, cache="bfloat16"
    ),
    "many heads share": Case(((1, 1100), (1, 1029), (5, 1200), (5, 1200)), common=1024, heads=24, kv_heads=2),
    "many heads share, bf16": Case(((1, 1100), (1, 1029)), common=1024, heads=24, kv_heads=2, cache="bfloat16"),
}
CASES |= {f"common prompt: {name}": case for name, case in COMMON_PROMPTS.items()}


def latent(lengths: tuple[tuple[int, int], ...], *, heads: int = 16, cache: str = "bfloat16", **others: Any) -> Case:
    """Pages whose keys begin with their values, and one of them for all heads."""
    sizes = {"head_dim": 96, "value_dim": 64, **others}
    return Case(lengths, heads=heads, kv_heads=1, cache=cache, **sizes)


LATENT = {
    "decodes": latent(DECODES, decode=True),
    "decodes of f32": latent(DECODES, decode=True, cache="float32", head_dim=72, value_dim=40),
    "one long decode of many heads": latent(((1, 1100),), heads=128, padding=0),
    "few heads": latent(((1, 700), (3, 40)), heads=4, sinks=True),
    "three heads of f32": latent(MIX, heads=3, cache="float32", head_dim=24, value_dim=8, page_size=3),
    "mix": latent(MIX, page_size=4),
    "mix of f32": latent(MIX, cache="float32", softcap=20.0),
    "mix of f16": latent(MIX, cache="float16", page_size=1),
    "mix of int8": latent(MIX, cache="int8"),
    "decodes of int8": latent(DECODES, decode=True, cache="int8", heads=7),
    "int8, calibrated": latent(MIX, cache="int8", calibration=((0.03, 0.25),)),
    "mix of e4m3": latent(MIX, cache="float8_e4m3fn"),
    "chunk of a long prompt": latent(((40, 900),), cache="float32"),
    "many heads": latent(((9, 300), (1, 300)), heads=96),
    "bf16 activations": latent(MIX, activations="bfloat16"),
    "common prompt": latent(COMMON_DECODES, decode=True, common=512),
    "values as large as keys": latent(MIX, head_dim=64),
}
CASES |= {f"latent: {name}": case for name, case in LATENT.items()}


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, isa: str) -> None:
    check(CASES[name], isa)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=4))
    decode = draw(st.booleans())
    lengths = [(min(count, 1) if decode else count, past) for count, past in counts]
    common = draw(st.sampled_from([0, 0, 320, 600]))
    return Case(
        lengths=tuple((count, common + count + past) if count else (0, 0) for count, past in lengths),
        heads=draw(st.sampled_from([1, 2, 3, 7, 16])) * (kv_heads := draw(st.integers(1, 2))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 24, 32, 64, 96, 128])),
        page_size=draw(st.sampled_from([1, 3, 8, 16, 64])),
        cache=draw(st.sampled_from(["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"])),
        window=draw(st.sampled_from([None, 1, 2, 16, 33])),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.booleans()),
        decode=decode,
        padding=draw(st.integers(1, 3)),
        common=common,
    )


@pytest.mark.slow
@settings(max_examples=12, derandomize=True)
@given(case=cases(), seed=st.integers(0, 99))
def test_equals_reference_anywhere(case: Case, seed: int) -> None:
    for isa in USABLE:
        with forced_isa(isa):
            check(case, isa, seed)


def test_result_of_a_request_does_not_depend_on_the_batch() -> None:
    case = Case(((1, 700),), cache="bfloat16", decode=True, padding=0)
    alone = make_data(case)
    pages = pages_of(alone)
    out, _ = run(alone, pages)

    def twelve(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x] * 12)

    batch = replace(
        alone.batch,
        query_start=jnp.arange(13, dtype=jnp.int32),
        kv_len=twelve(alone.batch.kv_len) - jnp.arange(12, dtype=jnp.int32) * 50,
        page_table=twelve(alone.batch.page_table),
        kv_index=twelve(alone.batch.kv_index),
    )
    q, k, v = (np.concatenate([x] * 12) for x in (alone.q, alone.k, alone.v))
    many, _ = run(replace(alone, q=q, k=k, v=v, batch=batch), pages)
    assert jnp.array_equal(many[0], out[0])


DRAFTED = {
    "bfloat16": Case(((1, 40), (4, 300), (9, 700), (17, 270)), cache="bfloat16", padding=0),
    "one head each": Case(((3, 600), (2, 9)), heads=4, kv_heads=4, head_dim=32, padding=0),
    "many heads": Case(((5, 530),), heads=32, kv_heads=2, cache="bfloat16", padding=0),
    "int8, window": Case(((4, 300), (9, 700)), cache="int8", window=70, sinks=True, padding=0),
    "latent": Case(((4, 300), (9, 520)), heads=16, kv_heads=1, head_dim=96, value_dim=64, padding=0),
}


@each_isa
@pytest.mark.parametrize("name", DRAFTED)
def test_tokens_that_are_verified_get_what_decodes_get(name: str, isa: str) -> None:
    """Drafts change no bit: each token of a step that verifies them is what a decode of it alone gives."""
    together = make_data(DRAFTED[name])
    start, length = np.asarray(together.batch.query_start), np.asarray(together.batch.kv_len)
    row = np.repeat(np.arange(len(length)), np.diff(start))
    batch = replace(
        together.batch,
        query_start=jnp.arange(len(row) + 1, dtype=jnp.int32),
        kv_len=jnp.asarray(length[row] - start[row + 1] + 1 + np.arange(len(row)), jnp.int32),
        page_table=together.batch.page_table[row],
        decode=True,
    )
    with forced_isa(isa):
        out, pages = run(replace(together, batch=replace(together.batch, verify=True)), pages_of(together))
        decodes, _ = run(replace(together, batch=batch), pages)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(decodes))


CUT = {
    "plain": Case(((90, 90),), padding=0),
    "bfloat16, behind a prefix": Case(((70, 1000),), cache="bfloat16", padding=0),
    "int8, many heads": Case(((70, 300),), heads=32, kv_heads=2, cache="int8", padding=0),
    "seven heads share, many queries": Case(((160, 900),), heads=14, kv_heads=2, cache="bfloat16", padding=0),
    "latent": Case(((40, 250),), heads=16, kv_heads=1, head_dim=96, value_dim=64, padding=0),
}


@each_isa
@pytest.mark.parametrize("name", CUT)
def test_how_a_prompt_is_cut_changes_nothing(name: str, isa: str) -> None:
    """Up to as many keys as few queries read in one piece, and in pieces of two tokens or more."""
    whole = make_data(CUT[name])
    ((count, length),) = CUT[name].lengths
    with forced_isa(isa):
        out, pages = run(whole, pages_of(whole))
        for cuts in ((2, count - 2), (count // 2, count - count // 2), (3, 4, 5, count - 12)):
            start = np.cumsum([0, *cuts])
            batch = replace(
                whole.batch,
                query_start=jnp.asarray(start, jnp.int32),
                kv_len=jnp.asarray(length - count + start[1:], jnp.int32),
                page_table=jnp.repeat(whole.batch.page_table, len(cuts), axis=0),
            )
            in_pieces, _ = run(replace(whole, batch=batch), pages)
            np.testing.assert_array_equal(np.asarray(out), np.asarray(in_pieces))


@each_isa
@pytest.mark.parametrize("name", COMMON_PROMPTS)
def test_rows_that_share_pages_get_what_each_gets_alone(name: str, isa: str) -> None:
    case = COMMON_PROMPTS[name]
    together = make_data(case)
    pages = pages_of(together)
    out = np.asarray(run(together, pages)[0])
    start = np.asarray(together.batch.query_start)
    for r, (count, _) in enumerate(case.lengths):
        if not count:
            continue
        own = slice(start[r], start[r] + count)
        batch = replace(
            together.batch,
            query_start=jnp.asarray([0, count], jnp.int32),
            kv_len=together.batch.kv_len[r : r + 1],
            page_table=together.batch.page_table[r : r + 1],
            kv_index=together.batch.kv_index[own],
        )
        k, v = together.k[own], None if together.v is None else together.v[own]
        alone, _ = run(replace(together, q=together.q[own], k=k, v=v, batch=batch), pages)
        np.testing.assert_array_equal(out[own], np.asarray(alone))


@pytest.mark.parametrize(
    "field,change,message",
    [
        ("page_table", lambda x: x.at[0, 0].set(10_000), "row 0: page 10000 does not exist"),
        ("page_table", lambda x: x.at[0, 0].set(-1), "row 0: page -1 does not exist"),
        ("kv_index", lambda x: x.at[1].set(1 << 20), "token 1: slot 1048576 does not exist"),
        ("kv_index", lambda x: x.at[2].set(-5), "token 2: slot -5 does not exist"),
        ("kv_len", lambda x: x.at[0].set(10_000), "row 0: kv_len 10000 out of range"),
        ("kv_len", lambda x: x.at[0].set(2), "row 0: kv_len 2 out of range"),
        ("first_page", lambda x: x + 1, r"row 0: page \d does not exist|slot \d+ does not exist"),
        ("first_page", lambda x: x - 3, "page -1 does not exist"),
        ("first_page", lambda x: x + 50, "page 52 does not exist"),
        ("query_start", lambda x: x.at[1].set(99), "row 0: query_start out of range"),
        ("query_start", lambda x: x.at[0].set(-1), "row 0: query_start out of range"),
    ],
)
def test_what_points_outside_is_refused(field: str, change: Callable[[jax.Array], jax.Array], message: str) -> None:
    data = make_data(Case(((5, 9),), head_dim=8))
    batch = replace(data.batch, **{field: change(getattr(data.batch, field))})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(replace(data, batch=batch), pages_of(data)))


def test_attend_uses_the_kernel_in_place() -> None:
    data = make_data(replace(CASES["mix of bf16"], softcap=None))
    stored = pages_of(data)

    def step(q, k, v, pages, batch):  # type: ignore[no-untyped-def]
        return llmjax.kernels.attention.attend(q, k, v, pages, batch, scale=0.1)

    compiled = jax.jit(step, donate_argnums=3).lower(data.q, data.k, data.v, stored, data.batch).compile()
    text = compiled.as_text()
    assert 'custom_call_target="llmjax_attention"' in text
    assert not any(" copy(" in line and "u16[" in line for line in text.splitlines())
    before = stored.data.unsafe_buffer_pointer()
    _, pages = compiled(data.q, data.k, data.v, stored, data.batch)
    assert pages.data.unsafe_buffer_pointer() == before


def test_sizes_without_a_kernel_take_the_portable_way() -> None:
    data = make_data(Case(((5, 9),), head_dim=12, heads=2, kv_heads=1))
    pages = pages_of(data)
    attend = jax.jit(lambda *arguments: llmjax.kernels.attention.attend(*arguments, **data.rules)[0])
    out = attend(data.q, data.k, data.v, pages, data.batch)
    np.testing.assert_allclose(out[data.real], _reference(data, pages)[0][data.real], atol=1e-5)


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [DECODES, MIX])
def test_nothing_leaks_from_places_that_nobody_sees(rows: tuple[tuple[int, int], ...], cache: str) -> None:
    """Another request's NaN for example; a weight of 0 would not keep it out."""
    data = make_data(Case(rows, decode=rows is DECODES, cache=cache, window=20))
    for isa in USABLE:
        with forced_isa(isa):
            expected, _ = run(data, pages_of(data))
            found, _ = run(data, pages_of(without_unseen(data)))
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), err_msg=isa)


MEANS = {
    "decodes": Case(DECODES, decode=True, padding=0),
    "decodes in a window": Case(DECODES, decode=True, window=45),
    "eight rows share": Case(DECODES, decode=True, heads=16, kv_heads=2, page_size=32, head_dim=128),
    "five rows share": Case(DECODES, decode=True, heads=5, kv_heads=1, page_size=64),
    "one long decode": Case(((1, 1100),), heads=2, kv_heads=1, padding=0),
    "prompts": Case(MIX, page_size=4),
    "prompts in a window": Case(MIX, window=31),
    "common prompt": Case(((1, 700), (1, 513), (0, 0), (1, 1100), (1, 769)), decode=True, common=512),
}
# Integers that a type holds, and the largest number, which gives a token the scale 1.
EXACT = {
    "float32": (100, None),
    "bfloat16": (100, None),
    "float16": (100, None),
    "int8": (100, 127),
    "float8_e4m3fn": (16, 448),
    "float8_e5m2": (8, 57344),
}


@each_isa
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("cache", EXACT)
def test_queries_of_zero_give_the_mean_of_what_they_see(name: str, cache: str, isa: str) -> None:
    """Values are integers, so that a key too few or too many shows, however coarse a type is."""
    case = replace(MEANS[name], cache=cache)
    data = integers_of(case)
    out = np.asarray(run(data, pages_of(data))[0], np.float64)
    expected = means(data)
    np.testing.assert_allclose(out[data.real], expected[data.real], rtol=3e-6, atol=3e-5)


@each_isa
@pytest.mark.parametrize("decode", [False, True])
def test_means_in_bfloat16_are_exact(decode: bool, isa: str) -> None:
    """The mean of 64 keys is one that bfloat16 holds."""
    lengths = ((1, 64), (1, 200), (1, 128)) if decode else ((3, 70), (40, 140), (1, 64))
    case = Case(lengths, decode=decode, window=64, cache="bfloat16", activations="bfloat16")
    data = integers_of(case, largest=3)
    out = np.asarray(run(data, pages_of(data))[0], np.float64)
    np.testing.assert_array_equal(out[data.real], means(data)[data.real])


def integers_of(case: Case, largest: int | None = None) -> Data:
    """A case whose queries are 0 and whose values are integers that its pages hold."""
    data = make_data(case)
    most, peak = EXACT[case.cache]
    rng = np.random.default_rng(8)
    values = rng.integers(-(largest or most), (largest or most) + 1, data.filling[1].shape).astype(np.float32)
    assert data.v is not None
    own = rng.integers(-(largest or most), (largest or most) + 1, data.v.shape).astype(data.v.dtype)
    if peak is not None:
        values[..., 0] = own[..., 0] = peak
    filling = np.stack([data.filling[0], values])
    return replace(data, q=np.zeros_like(data.q), v=own, filling=filling)


def means(data: Data) -> np.ndarray:
    """f64 [T, H, h]: of the values that each token sees."""
    case, batch = data.case, data.batch
    assert data.v is not None
    values = data.filling[1].astype(np.float64)
    values[np.asarray(batch.places(case.page_size))[data.real]] = data.v[data.real]
    table = int(batch.first_page) + np.asarray(batch.page_table)
    start = np.asarray(batch.query_start)
    found = np.zeros(data.q.shape)
    for row, (count, length) in enumerate(case.lengths):
        for i in range(count):
            position = length - count + i
            seen = np.arange(0 if case.window is None else max(0, position - case.window + 1), position + 1)
            mean = values[table[row, seen // case.page_size] * case.page_size + seen % case.page_size].mean(axis=0)
            found[start[row] + i] = np.repeat(mean, case.heads // case.kv_heads, axis=0)
    return found
