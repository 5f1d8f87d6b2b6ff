"""Products with weights that have adapters, each row with its own.

In C++ the rows of each adapter are multiplied with its matrices alone. Elsewhere two products serve every row: one with
all ``a`` gives S * r numbers of a row, of which those of other places are zeroed, and one with all ``b`` adds up the
rest. That is exact, moves no matrix, and costs little while S * r is small beside the matrix; rows sorted by place
(Punica, Chen et al. 2023, arXiv:2310.18547) would have to be moved. Both take the row as it is, whatever the kernel of
the weight rounds it to, and what is between the two products is f32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted, Delta, Places
from llmjax.kernels.cpu import adapted as cpu
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.registry import Implementation, Operation


def changed(product: jax.Array, x: jax.Array, adapted: Adapted, used: jax.Array | None = None) -> jax.Array:
    """A product with a weight, changed by the adapters of its rows: ``gain * product + b (a x) + bias``.

    Args:
        product: f32 [T, out], ``x @ weight.T``.
        x: [T, in], as it was before kernels rounded it.
        used: as ``llmjax.kernels.linear.linear`` has it.

    Returns:
        f32 [T, out].
    """
    delta, places = adapted.delta, adapted.places.over(len(x))
    if delta is None:
        return product
    out: jax.Array = CHANGED(product, x.astype(jnp.float32), delta.here(places), places, used)
    return out


def changed_side_by_side(
    product: jax.Array, x: jax.Array, delta: Delta, places: Places, used: jax.Array | None = None
) -> jax.Array:
    """`changed` by products with the matrices of all places; ``x`` is f32."""
    vectors, chosen = delta.vectors, places.chosen
    assert vectors is not None

    def specially(product: jax.Array) -> jax.Array:
        bias, gain = (jnp.dot(chosen, part, precision="highest") for part in jnp.split(vectors, 2))
        return product * (1 + gain) + bias

    product = jax.lax.cond(jnp.any(places.special[places.of] != 0), specially, lambda product: product, product)
    shrunk = places.only_own(LINEAR(x, delta.a, None, used).astype(jnp.float32))
    return product + jnp.dot(shrunk, delta.b.astype(jnp.float32), precision="highest")


def changed_rows(rows: jax.Array, at: jax.Array, adapted: Adapted) -> jax.Array:
    """Rows of an embedding, changed by the adapters of the tokens: ``row + b a[:, id]``.

    Args:
        rows: [T, D].
        at: i32 [T], their numbers; those outside of the matrix read some row.

    Returns:
        f32 [T, D].
    """
    if adapted.delta is None:
        return rows
    shrunk = adapted.delta.a.at[at].get(mode="clip", wrap_negative_indices=False).astype(jnp.float32)
    added = jnp.dot(adapted.places.only_own(shrunk), adapted.delta.b.astype(jnp.float32), precision="highest")
    return rows.astype(jnp.float32) + added


# Positional: product, x, delta, places, used.
CHANGED = Operation(
    "adapters",
    (
        Implementation("C++", cpu.changed, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA, side by side", changed_side_by_side),
    ),
)
