"""Choices of methods: what follows from what was measured, and that products obey, to the bit."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.choices import (
    BY_XLA,
    NATIVE,
    TABLE,
    Choice,
    Choices,
    Timing,
    choice_of,
    choosing,
    decide,
    kind_of,
)
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.linear import linear
from llmjax.kernels.cpu.matrices import candidates, tabled
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.qtensor import INT8_DECODES, INT8_VECTORS, QTensor
from llmjax.kernels.row_format import Codes, RowFormat

native = library()
needs_library = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")
ROWS = (1, 8, 64)


def timings(**seconds: tuple[float, float, float]) -> list[Timing]:
    return [
        Timing("kind", method, (64, 32), rows, spent)
        for method, all_rows in seconds.items()
        for rows, spent in zip(ROWS, all_rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("seconds", "table", "steps"),
    [
        ({"a": (1, 2, 3), "b": (2, 3, 4)}, "aaa", ()),
        ({"a": (1, 2, 3), "b": (2, 1, 1)}, "aaa", ((1, "a"), (64, "b"))),
        ({"a": (1, 2, 3), "b": (0.95, 1.9, 2.9)}, "aaa", ()),  # within noise
        ({"a": (1, 2, 3), "b": (2, 1, 2.9)}, "aaa", ((1, "a"), (64, "b"))),  # as for fewer rows
        ({"a": (1, 2, 3), "b": (2, 1, 1)}, "abb", ()),
        ({"a": (1, 2, 1), "b": (2, 1, 2)}, "bbb", ((1, "a"), (8, "b"), (64, "a"))),
    ],
)
def test_a_method_that_is_clearly_faster_is_taken(
    seconds: dict[str, tuple[float, float, float]], table: str, steps: tuple[tuple[int, str], ...]
) -> None:
    assert decide(timings(**seconds), dict(zip(ROWS, table, strict=True))) == steps


def test_times_of_several_shapes_are_added() -> None:
    one, other = timings(a=(1, 1, 1), b=(2, 2, 2)), timings(a=(3, 3, 3), b=(1, 1, 1))
    assert decide([*one, *other], dict.fromkeys(ROWS, "a")) == ((64, "b"),)


def test_a_choice_holds_down_to_the_one_before_and_the_last_for_more() -> None:
    choice = Choice("kind", ((4, "a"), (16, "b")))
    assert [choice.method(rows) for rows in (1, 4, 5, 16, 17, 1000)] == ["a", "a", "b", "b", "b", "b"]


def quantized(activations: str = "float", *, form: RowFormat | None = None, dtype: str = "bfloat16") -> QTensor:
    form = form or RowFormat(64, Codes(4), 32, "f16", zero=8)
    words = np.random.default_rng(0).integers(0, 1 << 32, (2, form.num_words, 16), dtype=np.uint32)
    for entry in form.fields.values():
        words[:, entry.start : entry.start + entry.num_words] = {"f32": 0x3A800000, "f16": 0x14001400}[entry.number]
    return QTensor(jnp.asarray(words), None, form, 32, jnp.dtype(dtype), activations)


def test_kinds_differ_where_methods_may() -> None:
    weights = [
        jnp.zeros((8, 8), jnp.bfloat16),
        jnp.zeros((8, 8), jnp.float32),
        quantized(),
        quantized("int8"),
        quantized(dtype="float32"),
        quantized(form=RowFormat(64, Codes(4), 64, "f16", zero=8)),
        quantized(form=RowFormat(64, Codes(5), 32, "f16", zero=8)),
        quantized(form=RowFormat(64, Codes(4), 32, "f32", zero=8)),
        quantized(form=RowFormat(64, Codes(4, levels=(0.0, 1.0)), 32, "f16", zero=8)),
    ]
    assert len({kind_of(weight) for weight in weights}) == len(weights)
    assert kind_of(quantized(form=RowFormat(96, Codes(4), 32, "f16", zero=8))) == kind_of(quantized())


@needs_library
def test_what_is_promised_to_be_the_same_in_any_batch_has_one_method() -> None:
    assert native is not None
    without_tiles, with_tiles = replace(native, forced="avx2"), replace(native, forced="amx")
    assert candidates(quantized(INT8_VECTORS), with_tiles) == ("int8 vectors",)
    assert candidates(quantized("int8"), without_tiles) == ("int8 vectors",)
    assert set(candidates(quantized("int8"), with_tiles)) == {TABLE, "int8 vectors", "bf16 tiles", "int8 tiles"}
    assert "int8 vectors" not in candidates(quantized(INT8_DECODES), with_tiles)
    assert candidates(quantized(dtype="float32"), with_tiles) == (TABLE, "float vectors", "float panels")
    assert candidates(jnp.zeros((8, 8), jnp.bfloat16), without_tiles) == (NATIVE, BY_XLA)
    assert candidates(jnp.zeros((8, 8), jnp.float16), without_tiles) == ()
    assert candidates(jnp.zeros((8, 9), jnp.float32), without_tiles) == ()


@needs_library
@pytest.mark.parametrize("activations", ["int8", INT8_VECTORS])
def test_rows_are_the_same_in_any_batch_by_every_method_that_may_be_chosen(activations: str) -> None:
    assert native is not None
    weight = quantized(activations)
    x = np.random.default_rng(1).standard_normal((70, 64), np.float32)
    methods = candidates(weight, native)
    if native.best == "amx" and activations == "int8":
        pytest.skip("tiles round otherwise than vectors; --batch-invariant says int8 vectors")
    for method in methods:
        with choosing(Choices((Choice(kind_of(weight), ((512, method),)),))):
            together = np.asarray(linear(jnp.asarray(x), weight))
            for rows in (1, 3, 9, 17, 65):
                np.testing.assert_array_equal(np.asarray(linear(jnp.asarray(x[:rows]), weight)), together[:rows])


@needs_library
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 33])
def test_products_with_quantized_matrices_go_by_the_choice_for_their_rows(rows: int) -> None:
    weight = quantized()
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 64)), jnp.float32)
    steps = ((4, "float panels"), (16, "int16 panels"), (32, "float vectors"))
    with choosing(Choices((Choice("another", ((1, "float panels"),)), Choice(kind_of(weight), steps)))):
        choice = choice_of(weight)
        found = linear(x, weight)
    assert choice is not None
    expected = linear(x, weight, method=choice.method(rows))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    others = {name: linear(x, weight, method=name) for name in ("float panels", "int16 panels", "float vectors")}
    assert np.any(np.asarray(others["int16 panels"]) != np.asarray(others["float vectors"]))  # so it says something


@needs_library
def test_a_method_that_the_instruction_set_lacks_is_the_tables() -> None:
    assert native is not None
    weight = quantized()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
    lacking = "bf16 panels"  # which no set has for codes that are integers
    with choosing(Choices((Choice(kind_of(weight), ((512, lacking),)),))):
        found = linear(x, weight)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(linear(x, weight)))


@needs_library
def test_products_with_plain_matrices_go_by_the_choice_for_their_rows() -> None:
    assert native is not None
    weight = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def picks() -> list[str]:
        shapes = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (1, 8, 9, 512)]
        return [LINEAR.pick("cpu", x, weight, None).name for x in shapes]

    with choosing(Choices((Choice("bfloat16", ((8, NATIVE), (512, BY_XLA))),))):
        assert picks() == ["C++", "C++", "XLA", "XLA"]
    with choosing(Choices((Choice("bfloat16", ((512, NATIVE),)),))):
        assert picks() == ["C++"] * 4
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    assert tabled(512, weight, native) == LINEAR.pick("cpu", x, weight, None).name
