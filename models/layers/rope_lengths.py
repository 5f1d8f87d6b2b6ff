"""Rope frequencies that depend on the length of a sequence, as in Hugging Face's dynamic scalings.

Hugging Face uses the length of the whole prompt when it computes the prompt, and the length so far for each token after
it; keys in the cache stay as they are. So a token's frequencies depend only on its position and the length of its
prompt, whatever steps the work is divided into, and also when it is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LongFrequencies:
    """LongRoPE: other frequencies for sequences longer than the original context."""

    original: int  # tokens
    inv_freq: tuple[float, ...]  # [rotary_dim / 2], for sequences of more

    def at(self, inv_freq: jax.Array, lengths: jax.Array) -> jax.Array:
        """Frequencies of tokens, f32 [T, rotary_dim / 2].

        Args:
            inv_freq: f32 [rotary_dim / 2], frequencies of short sequences.
            lengths: i32 [T], length of the sequence when Hugging Face computes the token.
        """
        return jnp.where((lengths > self.original)[:, None], jnp.asarray(self.inv_freq, jnp.float32), inv_freq)

    def kind(self, prompt_len: int) -> int:
        """The kind of a prompt: equal tokens have equal keys in prompts of one kind."""
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
