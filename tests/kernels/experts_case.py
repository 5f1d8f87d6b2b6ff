"""Random experts and choices of them, for the tests of every place and platform that they run on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.row_format import Codes, RowFormat

TILE = 16


class Maker:
    """Random stacks of one kind.

    Args:
        kind: a dtype; ``q4``; ``columns``: as q4, in an order of each expert's own; ``rounding``: as q4, with weights
            in bf16 and products that may round activations to int8.
        count: experts.
        size, inner: sizes of the model and of an expert.
    """

    def __init__(self, kind: str, count: int, *, size: int, inner: int) -> None:
        self.kind, self.count, self.size, self.inner = kind, count, size, inner
        self.rng = np.random.default_rng(0)

    def floats(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape).astype(np.float32))

    def tokens(self, rows: int) -> jax.Array:
        return self.floats(rows, self.size)

    def stack(self, size_out: int, size_in: int, *, bias: bool) -> Projection:
        added = self.floats(self.count, size_out) if bias else None
        if self.kind not in ("q4", "columns", "rounding"):
            weight = self.rng.standard_normal((self.count, size_out, size_in)).astype(np.float32) * size_in**-0.5
            return Projection(jnp.asarray(weight.astype(jnp.dtype(self.kind))), added)
        form = RowFormat(size_in, Codes(4), 32, "f32", minimum="f32")
        words = self.rng.integers(0, 1 << 32, (self.count, -(-size_out // TILE), form.num_words, TILE), np.uint32)
        for entry, most in ((form.fields["scales"], 0.2), (form.fields["minima"], 1.5)):
            values = self.rng.random((*words.shape[:2], entry.num_words, TILE), np.float32) * most * size_in**-0.5
            words[:, :, entry.start : entry.start + entry.num_words] = values.view(np.uint32)
        columns = None
        if self.kind == "columns":
            in_order = np.tile(np.arange(size_in, dtype=np.int32), (self.count, 1))
            columns = jnp.asarray(self.rng.permuted(in_order, axis=1))
        dtype, activations = ("bfloat16", "int8") if self.kind == "rounding" else ("float32", "float")
        return Projection(
            QTensor(jnp.asarray(words), columns, form, size_out, jnp.dtype(dtype), activations=activations), added
        )

    def weights(self, *, bias: bool = False) -> ExpertWeights:
        return ExpertWeights(
            gate=self.stack(self.inner, self.size, bias=bias),
            up=self.stack(self.inner, self.size, bias=bias),
            down=self.stack(self.size, self.inner, bias=bias),
        )

    def choice(self, rows: int, choices: int) -> tuple[jax.Array, jax.Array]:
        """Different experts for each token, and shares."""
        chosen = np.stack([self.rng.permutation(self.count)[:choices] for _ in range(rows)])
        return jnp.asarray(chosen.astype(np.int32)), self.shares(rows, choices)

    def choice_with_loads(self, loads: Sequence[int], choices: int) -> tuple[jax.Array, jax.Array]:
        """Each expert as often as said, maybe twice by a token, and shares."""
        chosen = self.rng.permutation(np.repeat(np.arange(self.count, dtype=np.int32), loads)).reshape(-1, choices)
        return jnp.asarray(chosen), self.shares(len(chosen), choices)

    def shares(self, rows: int, choices: int) -> jax.Array:
        return jnp.asarray(self.rng.random((rows, choices), np.float32))
