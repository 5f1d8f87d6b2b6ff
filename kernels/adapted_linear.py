"""Products with weights that have adapters, each row with its own.

Two products serve every row: one with all ``a`` gives S * r numbers of a row, of which those of other places are
zeroed, and one with all ``b`` adds up the rest. That is exact, moves no matrix, and costs little while S * r is small
beside the matrix; rows sorted by place (Punica, Chen et al. 2023, arXiv:2310.18547) would have to be moved. Both
products take the row as it is, whatever the kernel of the weight rounds it to, and what is between them is f32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.sharding import own_number, parts


def changed(product: jax.Array, x: jax.Array, adapted: Adapted, used: jax.Array | None = None) -> jax.Array:
    """A product with a weight, changed by the adapters of its rows: ``gain * product + b (a x) + bias``.

    Args:
        product: f32 [T, out], ``x @ weight.T``.
        x: [T, in], as it was before kernels rounded it.
        used: as ``llmjax.kernels.linear.linear`` has it.

    Returns:
        f32 [T, out].
    """
    delta, places = adapted.delta, adapted.places
    if delta is None:
        return product
    chosen = places.chosen
    if (gain := delta.gain) is not None:
        product = jax.lax.cond(
            places.gained,
            lambda product: product * (1 + jnp.dot(chosen[:, : places.count], gain.T, precision="highest")),
            lambda product: product,
            product,
        )
    shrunk = places.only_own(LINEAR(x.astype(jnp.float32), delta.a, None, used))
    once = chosen
    if delta.summed is not None and parts(delta.summed) > 1:  # only one device adds the bias to the sum
        once = jnp.where(own_number(delta.summed) == 0, chosen, 0)
    added: jax.Array = LINEAR(jnp.concatenate([shrunk, once], axis=1), delta.b, None, used)
    return product + added.astype(jnp.float32)


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
    added: jax.Array = LINEAR(adapted.places.only_own(shrunk), adapted.delta.b, None)
    return rows.astype(jnp.float32) + added
