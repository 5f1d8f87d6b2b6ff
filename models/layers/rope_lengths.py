"""Frequencies that depend on how long a sequence is, as Hugging Face's rope scalings do that are called dynamic.

The reference looks at the whole prompt when it computes that, then, token by token, at all that there is so far; keys
in the cache stay as they are. So a token's frequencies follow from its position and the length of its prompt alone,
however the work is cut into steps, and also when it is done again.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LongFrequencies:
    """LongRoPE: other frequencies for sequences that are longer than the first training's."""

    original: int  # tokens
    inv_freq: tuple[float, ...]  # [rotary_dim / 2], for sequences of more

    def at(self, inv_freq: jax.Array, lengths: jax.Array) -> jax.Array:
        """Frequencies of tokens, f32 [T, rotary_dim / 2].

        Args:
            inv_freq: f32 [rotary_dim / 2], those of short sequences.
            lengths: i32 [T], tokens of the sequence as far as the reference knows it when it computes the token.
        """
        return jnp.where((lengths > self.original)[:, None], jnp.asarray(self.inv_freq, jnp.float32), inv_freq)

    def kind(self, prompt_len: int) -> int:
        """Prompts of one kind have the same keys for the same tokens."""
        return int(prompt_len > self.original)


@dataclass(frozen=True)
class StretchedBase:
    """Dynamic NTK scaling: a base that grows with the sequence once that is longer than the model was made for."""

    original: int  # tokens
    factor: float

    def at(self, inv_freq: jax.Array, lengths: jax.Array) -> jax.Array:
        """See ``LongFrequencies.at``."""
        half = len(inv_freq)
        beyond = jnp.maximum(lengths, self.original).astype(jnp.float32) / self.original
        stretch = self.factor * beyond - (self.factor - 1)
        # The base times stretch ** (d / (d - 2)), to the power of -2i / d.
        return inv_freq * stretch[:, None] ** (-jnp.arange(half, dtype=jnp.float32) / (half - 1))

    def kind(self, prompt_len: int) -> int:
        """See ``LongFrequencies.kind``."""
        return prompt_len if prompt_len > self.original else 0
