"""Several residual streams of which layers compute one and predict the others (AltUp, Baykal et al. 2023,
arXiv:2301.13310), and the low-rank way around attention that comes with them (Gemma 3n)."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.models.layers.norm import RMS


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Streams of one size: a layer predicts all of them, computes the active one, and corrects all by its error."""

    streams: int
    active: int  # the one that layers compute
    norm: RMS  # of what a layer's router is given
    scaled: bool  # what embeddings for each layer are gated by is multiplied by a vector first


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """``n + norm(right(left(n)))`` of a layer's normed input, added to what attention leaves (LAuReL, Menghani et al.
    2024, arXiv:2411.07501)."""

    rank: int
    norm: RMS
