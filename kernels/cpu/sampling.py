"""Tokens from rows of logits in C++ (``src/sampling.cc``)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Edits:
    """What changes the logits of R rows before one is sampled; S slots, V tokens, M bans. `sampler._edit` in
    llmjax/sampling/ says what is made of them."""

    which: jax.Array  # bool [R, 3]: the row has biases, bans, penalties
    slot: jax.Array  # i32 [R]; others than 0 to S - 1 have none of the three
    last_token: jax.Array  # i32 [R]
    penalties: jax.Array  # f32 [R, 3]: repetition, frequency, presence
    mask: jax.Array  # i32 [R, ceil(V / 32)], the tokens that may be sampled, a bit each; [R, 0]: all
    uncounted: jax.Array  # i32 [R, K], K at most 64: of the output, beside what is counted; V where there are fewer
    bias: jax.Array  # f32 [S, V]
    ban_previous: jax.Array  # i32 [S, M]
    ban_token: jax.Array  # i32 [S, M]
    output_count: jax.Array  # u16 [S, V]
    prompt_seen: jax.Array  # bool [S, V]


def no_edits(rows: int, vocab_size: int) -> Edits:
    """Edits that change nothing in any row."""
    none = jnp.zeros((rows, 0), jnp.int32)
    return Edits(
        which=jnp.zeros((rows, 3), bool),
        slot=jnp.zeros(rows, jnp.int32),
        last_token=jnp.zeros(rows, jnp.int32),
        penalties=jnp.zeros((rows, 3)),
        mask=none,
        uncounted=none,
        bias=jnp.zeros((0, vocab_size)),
        ban_previous=jnp.zeros((0, 0), jnp.int32),
        ban_token=jnp.zeros((0, 0), jnp.int32),
        output_count=jnp.zeros((0, vocab_size), jnp.uint16),
        prompt_seen=jnp.zeros((0, vocab_size), bool),
    )


def argmax(x: jax.Array) -> jax.Array:
    """``llmjax.kernels.argmax.argmax`` by the library."""
    call = jax.ffi.ffi_call("llmjax_argmax", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    out: jax.Array = call(x)
    return out


def finite_rows(x: jax.Array) -> jax.Array:
    """``llmjax.kernels.finite.finite_rows`` by the library."""
    call = jax.ffi.ffi_call("llmjax_finite", jax.ShapeDtypeStruct(x.shape[:1], jnp.bool_))
    out: jax.Array = call(x)
    return out


def sample(
    x: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    samples: jax.Array | None = None,
    edits: Edits | None = None,
) -> jax.Array:
    """``llmjax.sampling.draw.draw`` by the library, of logits that are edited row by row.

    Args:
        samples: bool [R], rows that do; the others give token 0. None: all.
        edits: None: there are none.
    """
    call = jax.ffi.ffi_call("llmjax_sample", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    e = no_edits(*x.shape) if edits is None else edits
    out: jax.Array = call(
        x,
        jnp.ones(x.shape[0], bool) if samples is None else samples,
        keys,
        temperature,
        min_p,
        top_k,
        top_p,
        e.which,
        e.slot,
        e.last_token,
        e.penalties,
        e.mask,
        e.uncounted,
        e.bias,
        e.ban_previous,
        e.ban_token,
        e.output_count,
        e.prompt_seen,
    )
    return out
