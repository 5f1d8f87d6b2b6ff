"""The portable attention against the reference over ragged mixes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import ATTENTION, attend, portable, reference
from llmjax.kernels.attention.types import KVPages, make_pages
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cuda import attention as cuda
from llmjax.kernels.loops import bounded_loops
from tests.kernels.attention_case import Case, empty_pages, filled_pages, make_data, owned, without_unseen

PAGE = 4
SLOW = pytest.mark.slow

MIXES = {
    "decodes": ((1, 1), (1, 37), (1, 9), (1, 64)),
    "one prefill": ((29, 29),),
    "chunk of a long prompt": ((7, 61),),
    "decodes and chunks": ((1, 50), (1, 3), (13, 13), (21, 60), (1, 12), (2, 2)),
}


RULES = {
    "plain": {},
    "window": {"window": 6},
    "softcap, sinks": {"softcap": 20.0, "sinks": True},
    "slopes": {"slopes": True},
    "both sides": {"causal": False, "slopes": True},
    "window on both sides": {"causal": False, "window": 6},
    "all": {"window": 17, "softcap": 5.0, "sinks": True, "slopes": True},
}
KINDS = {
    "f32": (6, 2, jnp.float32, False),
    "f16 bits": (4, 4, jnp.float16, True),
    "bf16 bits": (8, 1, jnp.bfloat16, True),
    "bf16": (2, 1, jnp.bfloat16, False),
    "int8": (6, 2, jnp.int8, True),
    "e4m3": (4, 1, jnp.float8_e4m3fn, False),
    "e5m2": (2, 2, jnp.float8_e5m2, True),
    "latent": (6, 1, jnp.float32, False),
    "latent int8": (3, 1, jnp.int8, True),
}
# Every mix with every rule in one type, every type in two of these; the slow ones are others put together anew.
GRID = [(mix, rule, "f32") for mix in MIXES for rule in RULES]
GRID += [
    (*case, kind) for kind in KINDS if kind != "f32" for case in (("decodes", "all"), ("decodes and chunks", "plain"))
]


def marked(mix: str, rule: str, kind: str) -> Any:
    fast = (
        rule == "all"
        or (mix == "one prefill" and "both sides" in rule)
        or (mix == "decodes and chunks" and kind in ("f32", "int8", "latent"))
    )
    return pytest.param(mix, rule, kind, marks=() if fast else SLOW)


@pytest.mark.parametrize("mix,rule,kind", [marked(*case) for case in GRID])
def test_portable_equals_reference(mix, rule, kind, monkeypatch):
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    monkeypatch.setattr(portable, "QUERY_BLOCK", 8)
    heads, kv_heads, dtype, as_bits = KINDS[kind]
    case = Case(
        MIXES[mix],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        page_size=PAGE,
        cache=jnp.dtype(dtype).name,
        decode=all(count == 1 for count, _ in MIXES[mix]),
        padding=5,
        value_dim=5 if kind.startswith("latent") else None,
        **RULES[rule],
    )
    data = make_data(case)

    @jax.jit
    def compute(q, k, v, pages, batch, sinks, slopes):
        written = portable.write_kv(pages, k, v, batch.places(PAGE))
        rules = {**data.rules, "sinks": sinks, "slopes": slopes}
        return written, portable.ragged_paged_attention(q, written, batch, **rules)

    pages = filled_pages(case, data.filling, as_bits=as_bits)
    written, out = compute(data.q, data.k, data.v, pages, data.batch, data.sinks, data.slopes)
    expected_pages = reference.write_kv(pages, data.k, data.v, data.batch.places(PAGE))
    rules = {**data.rules, "sinks": data.sinks, "slopes": data.slopes}
    expected = reference.ragged_paged_attention(data.q, expected_pages, data.batch, **rules)
    np.testing.assert_array_equal(owned(case, written.data), owned(case, expected_pages.data))  # to the bit
    out = np.asarray(out)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[data.real], expected[data.real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_tokens_of_images_see_one_another(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of each row's chunk end at its middle and at its end; no kernel of a device takes them."""
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    monkeypatch.setattr(portable, "QUERY_BLOCK", 8)
    case = Case(((1, 9), (21, 60), (13, 13)), heads=6, kv_heads=2, head_dim=8, page_size=PAGE, window=window, padding=5)
    data, last_key, at = make_data(case), [], 0
    for count, length in case.lengths:
        first = length - count
        middle = first + count // 2
        last_key += [first + i if i < 2 else middle if first + i <= middle else length - 1 for i in range(count)]
        at += count
    spans = np.array([*last_key, *[0] * (len(data.q) - at)], np.int32)
    batch = replace(data.batch, last_key=jnp.asarray(spans))
    pages = filled_pages(case, data.filling, as_bits=False)

    @jax.jit
    def compute(q, k, v, pages, batch):
        return portable.attend(q, k, v, pages, batch, None, **{"window": None, "softcap": None, **data.rules})

    out, written = compute(data.q, data.k, data.v, pages, batch)
    expected = reference.ragged_paged_attention(data.q, written, batch, **data.rules)
    np.testing.assert_allclose(np.asarray(out)[data.real], expected[data.real], atol=2e-6, rtol=1e-5)
    causal = reference.ragged_paged_attention(data.q, written, data.batch, **data.rules)
    assert np.abs(expected - causal)[data.real].max() > 0.1
    assert cuda.refuses(data.q, data.k, data.v, pages, batch) == "tokens see others than those before them"


@pytest.mark.parametrize("mix", ["decodes", "decodes and chunks"])
@pytest.mark.parametrize("window", [None, 6])
def test_tokens_see_a_part_of_the_keys(mix: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that sees none has zeros; kernels of devices refuse all of them."""
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    monkeypatch.setattr(portable, "QUERY_BLOCK", 8)
    decode = mix == "decodes"
    case = Case(MIXES[mix], heads=6, kv_heads=2, head_dim=8, page_size=PAGE, window=window, padding=5, decode=decode)
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)

    @jax.jit
    def compute(q, k, v, pages, batch):
        return portable.attend(q, k, v, pages, batch, None, **{"window": None, "softcap": None, **data.rules})

    for keys in ({"first_key": 11}, {"end_key": 11}, {"first_key": 3, "end_key": 14}):
        batch = replace(data.batch, **keys)
        out, written = compute(data.q, data.k, data.v, pages, batch)
        expected = reference.ragged_paged_attention(data.q, written, batch, **data.rules)
        np.testing.assert_allclose(np.asarray(out)[data.real], expected[data.real], atol=2e-6, rtol=1e-5)
        positions, first = np.asarray(batch.positions)[data.real], batch.first_key
        assert not np.asarray(out)[data.real][positions < first].any() and (positions > 11).any()
        assert cuda.refuses(data.q, data.k, data.v, pages, batch) == "tokens see others than those before them"


PLUGIN = {
    "decodes": ("decodes", "all", jnp.float32, None),
    "decodes and chunks": ("decodes and chunks", "all", jnp.float32, None),
    "window on both sides": ("one prefill", "window on both sides", jnp.float32, None),
    "words of int8": ("decodes and chunks", "window", jnp.int8, None),
    "words of latent e4m3": ("decodes and chunks", "plain", jnp.float8_e4m3fn, 5),
}


@pytest.mark.parametrize("name", PLUGIN)
def test_loops_of_fixed_length_and_pages_of_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What devices get that nothing is known of."""
    mix, rule, dtype, value_dim = PLUGIN[name]
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    monkeypatch.setattr(portable, "QUERY_BLOCK", 8)
    case = Case(
        MIXES[mix],
        heads=6,
        kv_heads=1 if value_dim else 2,
        head_dim=8,
        page_size=PAGE,
        cache=jnp.dtype(dtype).name,
        decode=mix == "decodes",
        padding=5,
        value_dim=value_dim,
        **RULES[rule],
    )
    data = make_data(case)
    pages, words = filled_pages(case, data.filling, as_bits=False), empty_pages(case, as_words=True)
    assert words.in_words == (jnp.dtype(dtype).itemsize == 1) and words.head_dim == case.head_dim

    @jax.jit
    def compute(q, k, v, pages, batch, sinks, slopes):
        return portable.attend(q, k, v, pages, batch, sinks, slopes, **{"window": None, "softcap": None, **data.rules})

    given = words.with_data(jnp.asarray(np.asarray(pages.data).view(words.data.dtype)))
    with bounded_loops(True):
        arguments = (data.q, data.k, data.v, given, data.batch, data.sinks, data.slopes)
        text = compute.lower(*arguments).as_text()
        out, written = compute(*arguments)
    assert "stablehlo.case" in text or "stablehlo.if" in text
    rules = {**data.rules, "sinks": data.sinks, "slopes": data.slopes}
    expected_pages = reference.write_kv(pages, data.k, data.v, data.batch.places(PAGE))
    expected = reference.ragged_paged_attention(data.q, expected_pages, data.batch, **rules)
    stored = np.asarray(written.data).view(np.asarray(expected_pages.data).dtype)
    np.testing.assert_array_equal(owned(case, stored), owned(case, expected_pages.data))
    np.testing.assert_allclose(np.asarray(out)[data.real], expected[data.real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("decode", [True, False])
def test_products_are_of_the_queries_type_with_sums_in_f32(decode: bool) -> None:
    mix = MIXES["decodes" if decode else "chunk of a long prompt"]
    case = Case(mix, heads=6, kv_heads=2, head_dim=8, page_size=PAGE, cache="bfloat16", decode=decode)
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)
    q, k, v = (np.asarray(x).astype(jnp.bfloat16) for x in (data.q, data.k, data.v))

    def compute(q, k, v, pages, batch):
        return portable.attend(q, k, v, pages, batch, None, **{"window": None, "softcap": None, **data.rules})

    text = jax.jit(compute).lower(q, k, v, pages, data.batch).as_text()
    products = re.findall(r"dot_general.*\((.*)\) -> tensor<[^>]*x(b?f\d+)>", text)
    assert products
    for operands, result in products:
        assert re.findall(r"x(b?f\d+)>", operands) == ["bf16", "bf16"] and result == "f32"
    out, _ = jax.jit(compute)(q, k, v, pages, data.batch)
    assert out.dtype == jnp.bfloat16
    expected_pages = reference.write_kv(pages, k, v, data.batch.places(PAGE))
    expected = reference.ragged_paged_attention(q, expected_pages, data.batch, **data.rules)
    # Weights and results are rounded to 8 bits.
    np.testing.assert_allclose(np.asarray(out, np.float32)[data.real], expected[data.real], atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("device", ["portable", pytest.param("CUDA", marks=SLOW)])
def test_latent_pages_give_multi_head_latent_attention(device: str, decode: bool) -> None:
    """DeepSeek-V2 (arXiv:2405.04434, section 2.1) as it is written: keys and values of every head are expanded from the
    compressed vector, in NumPy; pages hold the compressed vectors and queries come multiplied with the key's matrix."""
    heads, latent, nope, rope, value = 5, 32, 24, 16, 20
    case = Case(
        ((1, 9), (0, 0), (1, 30)) if decode else ((7, 20), (1, 33), (12, 12)),
        heads=heads,
        kv_heads=1,
        head_dim=latent + rope,
        value_dim=latent,
        decode=decode,
        page_size=PAGE,
    )
    data, rng = make_data(case), np.random.default_rng(5)
    batch, tokens = data.batch, len(data.batch.kv_index)
    key_matrix, value_matrix = rng.standard_normal((heads, nope, latent)), rng.standard_normal((heads, value, latent))
    q_nope, q_rope = rng.standard_normal((tokens, heads, nope)), rng.standard_normal((tokens, heads, rope))
    new = rng.standard_normal((tokens, latent + rope))  # the compressed vector, and the key that all heads share
    scale = (nope + rope) ** -0.5

    filled = np.array(data.filling[0, :, 0], np.float64)  # what all places hold once the step's tokens are stored
    filled[np.asarray(batch.places(PAGE))[data.real]] = new[data.real]
    expected = np.zeros((tokens, heads, value))
    for row, length in enumerate(np.asarray(batch.kv_len)):
        first, stop = (row, row + int(length > 0)) if decode else np.asarray(batch.query_start)[[row, row + 1]]
        position = np.arange(length)
        at = np.asarray(batch.first_page + batch.page_table)[row, position // PAGE] * PAGE + position % PAGE
        keys = np.concatenate(
            [
                np.einsum("lc,hnc->lhn", filled[at, :latent], key_matrix),
                np.repeat(filled[at, None, latent:], heads, 1),
            ],
            -1,
        )
        values = np.einsum("lc,hvc->lhv", filled[at, :latent], value_matrix)
        for token in range(first, stop):
            seen = length - (stop - token) + 1
            query = np.concatenate([q_nope[token], q_rope[token]], -1)
            logits = np.einsum("hd,lhd->hl", query, keys[:seen]) * scale
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            expected[token] = np.einsum("hl,lhv->hv", weights / weights.sum(-1, keepdims=True), values[:seen])

    absorbed = np.concatenate([np.einsum("thn,hnc->thc", q_nope, key_matrix), q_rope], -1).astype(np.float32)
    pages = filled_pages(case, data.filling, as_bits=False)
    call = partial(attend, scale=scale) if device == "portable" else partial(cuda.attend, scale=scale, interpret=True)
    out, _ = jax.jit(call)(absorbed, new[:, None].astype(np.float32), None, pages, batch)
    assert out.shape == (tokens, heads, latent)
    found = np.einsum("thc,hvc->thv", np.asarray(out, np.float64), value_matrix)
    np.testing.assert_allclose(found[data.real], expected[data.real], atol=1e-4)


def test_latent_pages_have_kernels() -> None:
    shapes = [jax.ShapeDtypeStruct((2, heads, 48), jnp.float32) for heads in (4, 1)]
    pages = make_pages(num_pages=2, page_size=4, num_kv_heads=1, head_dim=48, dtype=jnp.dtype("float32"), value_dim=32)
    assert library() is None or ATTENTION.explain("cpu", *shapes, None, pages) == "C++"
    assert ATTENTION.explain("gpu", *shapes, None, pages) == "Pallas"


def values_of(pages: KVPages) -> np.ndarray:
    """Every key and value as f32 [2, N, K, page_size, h]."""
    return np.asarray(pages.decode(jnp.moveaxis(pages.data, 1, 0)))


@pytest.mark.parametrize("dtype,largest", [("int8", 127), ("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
@pytest.mark.parametrize("calibration", [None, ((0.02, 0.25), (0.5, -0.5))], ids=["token scales", "calibrated"])
@pytest.mark.parametrize("write", [reference.write_kv, jax.jit(portable.write_kv)], ids=["reference", "portable"])
def test_one_byte_pages_hold_the_nearest_values(dtype, largest, calibration, write) -> None:
    """Against NumPy and ml_dtypes, with a row of zeros, of tiny and of huge numbers."""
    rng, places, kv_heads, head_dim = np.random.default_rng(1), 3 * PAGE, 2, 8
    pages = make_pages(
        num_pages=3,
        page_size=PAGE,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(dtype),
        calibration=None if calibration is None else jnp.asarray(calibration, jnp.float32),
    )
    new = rng.standard_normal((2, places, kv_heads, head_dim)).astype(np.float32)
    new[:, 1], new[:, 2], new[:, 3, 0, 0] = 0, new[:, 2] * 1e-20, 1e9
    given = np.asarray(calibration or ((1, 0), (1, 0)), np.float32).reshape(2, 2, 1, 1, 1)
    scale, zero = given[:, 0], given[:, 1]
    if calibration is None:
        scale = np.maximum(np.abs(new).max(-1, keepdims=True), np.float32(1e-30)) * np.float32(1 / largest)
    stored = np.clip((new - zero) * (np.float32(1) / scale), -largest, largest)
    stored = (np.round(stored) if dtype == "int8" else stored).astype(jnp.dtype(dtype)).astype(np.float32)
    expected = (stored * scale + zero).reshape(2, 3, PAGE, kv_heads, head_dim).swapaxes(2, 3)
    found = values_of(write(pages, new[0], new[1], np.arange(places)))
    np.testing.assert_array_equal(found, expected)
    if calibration is None:
        step = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype]
        error = np.abs(found.swapaxes(2, 3).reshape(new.shape) - new)
        assert (error <= step * 1.001 * np.abs(new).max(-1, keepdims=True)).all()


@pytest.mark.parametrize("kind", ["f32", *(pytest.param(kind, marks=SLOW) for kind in ("bf16 bits", "int8", "latent"))])
@pytest.mark.parametrize("mix", ["decodes", "decodes and chunks"])
def test_nothing_leaks_from_places_that_nobody_sees(mix, kind, monkeypatch):
    """Another request's NaN for example; a weight of 0 would not keep it out."""
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    heads, kv_heads, dtype, as_bits = KINDS[kind]
    case = Case(
        MIXES[mix],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        page_size=PAGE,
        cache=jnp.dtype(dtype).name,
        decode=all(count == 1 for count, _ in MIXES[mix]),
        window=11,
        value_dim=5 if kind.startswith("latent") else None,
    )
    data = make_data(case)

    @jax.jit
    def compute(q, k, v, pages, batch):
        written = portable.write_kv(pages, k, v, batch.places(PAGE))
        return portable.ragged_paged_attention(q, written, batch, **data.rules)

    found, expected = (
        np.asarray(compute(data.q, data.k, data.v, filled_pages(case, some.filling, as_bits=as_bits), data.batch))
        for some in (without_unseen(data), data)
    )
    np.testing.assert_array_equal(found, expected)
