"""Adapters as data: what each adds to products with the matrices of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """What an adapter adds to one matrix: products become ``gain * (W x) + b (a x) + bias``.

    A stack of experts has a dimension of experts, E, before those of ``a`` and ``b``, and neither gain nor bias.

    Attributes:
        a: f32 [rank, in].
        b: f32 [out, rank], with the adapter's scale in it.
        gain: f32 [out], factors of the products themselves (DoRA); None: ones.
        bias: f32 [out], what is added whatever x is; None: nothing.
    """

    a: Floats
    b: Floats
    gain: Floats | None = None
    bias: Floats | None = None

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return int(self.a.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (self.a, self.b, self.gain, self.bias) if array is not None)

    def scaled(self, factor: float) -> LowRank:
        """The adapter with a factor of all that it changes."""
        if factor == 1:
            return self
        scale = np.float32(factor)
        return LowRank(
            a=self.a,
            b=self.b * scale,
            gain=None if self.gain is None else 1 + (self.gain - 1) * scale,
            bias=None if self.bias is None else self.bias * scale,
        )

    def delta(self) -> Floats:
        """``b a``, f32 [out, in] or [E, out, in]."""
        return np.matmul(self.b, self.a)


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter, or the sum of several, in terms of a model.

    Attributes:
        digest: identifies its content.
        parts: by the model's names of parameters. A tied head has the name that it would have alone,
            ``lm_head.weight``.
        of_encoder: those of the encoder of images, by its own names.
    """

    digest: str
    parts: Mapping[str, LowRank]
    of_encoder: Mapping[str, LowRank] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of its parts."""
        return max((part.rank for part in self._all), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(part.nbytes for part in self._all)

    @classmethod
    def sum_of(cls, adapters: Sequence[tuple[Adapter, float]], *, digest: str) -> Adapter:
        """The sum of adapters, each with a factor."""

        def added(parts: Sequence[tuple[Mapping[str, LowRank], float]]) -> dict[str, LowRank]:
            names = dict.fromkeys(name for own, _ in parts for name in own)
            return {name: summed([own[name].scaled(by) for own, by in parts if name in own]) for name in names}

        return cls(
            digest=digest,
            parts=added([(adapter.parts, by) for adapter, by in adapters]),
            of_encoder=added([(adapter.of_encoder, by) for adapter, by in adapters]),
        )

    @property
    def _all(self) -> list[LowRank]:
        return [*self.parts.values(), *self.of_encoder.values()]


def summed(parts: Sequence[LowRank]) -> LowRank:
    """What several adapters add to one matrix together: ranks are put side by side, which is exact."""
    if len(parts) == 1:
        return parts[0]
    gains = [part.gain for part in parts if part.gain is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    return LowRank(
        a=np.concatenate([part.a for part in parts], axis=-2),
        b=np.concatenate([part.b for part in parts], axis=-1),
        gain=1 + np.sum([gain - 1 for gain in gains], axis=0) if gains else None,
        bias=np.sum(biases, axis=0) if biases else None,
    )
