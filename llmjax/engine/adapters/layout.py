"""The layout of the devices' places for adapters: which parameters adapters change, and the arrays that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted, Delta, Places

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Use(Enum):
    """What a model does with a parameter."""

    PRODUCT = "product"  # multiplies with it
    ROWS = "rows"  # looks rows up
    EXPERTS = "experts"  # multiplies with the matrices of a stack

    @property
    def arrays(self) -> int:
        """Arrays that hold what adapters change of it: ``a``, ``b``, and vectors."""
        return 3 if self is Use.PRODUCT else 2


@dataclass(frozen=True)
class AdaptedParameter:
    """A parameter that adapters may change.

    Attributes:
        name: the model's name of it; of a tied head, the one that it would have alone.
        summed: logical axis along which devices add its products up; None: none.
    """

    name: str
    use: Use
    summed: str | None = None


@dataclass(frozen=True)
class AdapterLayout:
    """All parameters that adapters may change, and the sizes of places. Static in programs.

    A device's arrays are: i32 [places + 1], whether the adapter of a place has biases or gains (place 0: none), and
    then those of `Delta` for each parameter.

    Attributes:
        places: adapters that the devices have room for.
        rank: rank of each place; smaller adapters are filled up with zeros.
        parameters: in the order of their arrays.
    """

    places: int
    rank: int
    parameters: tuple[AdaptedParameter, ...]

    @property
    def of_head(self) -> AdapterLayout:
        """The layout of what heads use after the layers."""
        kept = tuple(one for one in self.parameters if one.name == HEAD)
        return replace(self, parameters=kept)

    def head_arrays(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays of `of_head` among all."""
        special, *rest = arrays
        kept = [array for one, own in self._in_turn(rest) for array in own if one.name == HEAD]
        return (special, *kept)

    def _in_turn(self, rest: Sequence[Any]) -> Iterator[tuple[AdaptedParameter, Sequence[Any]]]:
        at = 0
        for one in self.parameters:
            yield one, rest[at : at + one.use.arrays]
            at += one.use.arrays

    def applied(self, params: Mapping[str, Any], arrays: Sequence[jax.Array], of: jax.Array) -> dict[str, Any]:
        """A model's parameters with adapters, while a program is traced.

        Args:
            arrays: those of this layout.
            of: i32 [T], the place of each row of the step, 0: none; i32 []: that of all.
        """
        special, *rest = arrays
        places = Places(of, special)
        found = dict(params)
        for one, own in self._in_turn(rest):
            a, b, *vectors = own
            delta = Delta(a, b, vectors[0] if vectors else None, one.summed)
            if one.name in params:
                found[one.name] = Adapted(params[one.name], delta, places)
            else:
                tied = found[EMBEDDING]
                tied = tied if isinstance(tied, Adapted) else Adapted(tied, None, places)
                found[EMBEDDING] = replace(tied, head=delta)
        return found


def put_adapter(
    arrays: tuple[jax.Array, ...], values: tuple[jax.Array, ...], place: jax.Array, *, layout: AdapterLayout
) -> tuple[jax.Array, ...]:
    """The arrays with another adapter in a place.

    Args:
        arrays: those of the layout; donated.
        values: i32 [], whether the adapter has biases or gains; for each parameter ``a`` [rank, in] and ``b`` [rank,
            out], and if it is multiplied with, [2, out], a bias and gains less one. An embedding's ``a`` is
            [vocabulary, rank]; those of experts have an axis before, [E, rank, in] and [E, rank, out].
        place: i32 [], 1 to ``layout.places``.
    """
    special, *rest = arrays
    is_special, *given = values
    index, rank = place - 1, layout.rank
    found, at = [special.at[place].set(is_special)], 0

    def put(array: jax.Array, value: jax.Array, *start: jax.Array | int) -> jax.Array:
        starts = [jnp.asarray(one, jnp.int32) for one in start]
        return jax.lax.dynamic_update_slice(array, value.astype(array.dtype), starts)

    for one in layout.parameters:
        own, new = rest[at : at + one.use.arrays], given[at : at + one.use.arrays]
        at += one.use.arrays
        if one.use is Use.EXPERTS:
            found += [put(array, value[None], index, 0, 0, 0) for array, value in zip(own, new, strict=True)]
        else:
            first = (0, index * rank) if one.use is Use.ROWS else (index * rank, 0)
            found += [put(own[0], new[0], *first), put(own[1], new[1], index * rank, 0)]
        if one.use is Use.PRODUCT:
            bias, gain = jnp.split(new[2], 2)
            found.append(put(put(own[2], bias, index, 0), gain, layout.places + index, 0))
    return tuple(found)
