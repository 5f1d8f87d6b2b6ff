"""Which implementation an operation picks, and what it says of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.registry import Implementation, Operation, traced_for

pytestmark = pytest.mark.jax_api


def only_even(x: jax.Array, **_: object) -> str | None:
    return "odd" if x.shape[0] % 2 else None


SCALE = Operation(
    "scale",
    (
        Implementation("even", lambda x, by: x * by + 100, platform="cpu", refuses=only_even),
        Implementation("elsewhere", lambda x, by: x * by + 1000, platform="cuda"),
        Implementation("any", lambda x, by: x * by),
    ),
)


def test_the_first_that_fits_platform_and_shape_runs():
    assert SCALE(jnp.ones(2), by=3).tolist() == [103, 103]
    assert SCALE(jnp.ones(3), by=3).tolist() == [3, 3, 3]
    assert jax.jit(lambda x: SCALE(x, by=2))(jnp.ones(2)).tolist() == [102, 102]


def test_it_can_be_asked():
    even, odd = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
    assert SCALE.pick("cpu", even, by=1).name == "even"
    assert SCALE.pick("cuda", odd, by=1).name == "elsewhere"
    assert SCALE.pick(None, even, by=1).name == "any"
    assert SCALE.explain("cpu", odd, by=1) == "any (even: odd)"
    assert SCALE.explain("gcu", odd, by=1) == "any"


def test_nothing_fits():
    operation = Operation("x", SCALE.implementations[:1])
    with pytest.raises(LookupError, match="x: no implementation"):
        operation.pick("cpu", jnp.ones(3), by=1)


def test_each_platform_gets_its_own_when_lowered_for_it():
    traced = jax.jit(lambda x: SCALE(x, by=2)).trace(jnp.ones(2))
    assert "1.000000e+03" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "1.000000e+02" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_only_the_one_of_the_platform_is_traced_if_that_is_said():
    traced: list[str] = []

    def noting(name: str | None) -> Implementation:
        return Implementation(str(name), lambda x: (traced.append(str(name)), x)[1], platform=name)

    operation = Operation("noting", tuple(map(noting, ("cpu", "cuda", None))))
    inner = jax.jit(lambda x: operation(x))  # whose trace JAX keeps
    for platform, expected in (("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"), ("gcu", "None")):
        traced.clear()
        with traced_for(platform):
            jax.jit(lambda x: inner(x)).trace(jnp.ones(2))
        assert traced == [expected]
    traced.clear()
    jax.jit(lambda x: inner(x)).trace(jnp.ones(2))
    assert sorted(traced) == ["None", "cpu", "cuda"]


@pytest.mark.parametrize("rows", [1, 4096])
def test_other_weights_are_for_xla(rows: int):
    x, weight = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float8_e4m3fn)
    assert LINEAR.pick("cpu", x, weight, None).name == "XLA"
