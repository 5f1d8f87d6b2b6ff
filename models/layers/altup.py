"""Several residual streams, of which layers compute one and predict the others (AltUp, Baykal et al. 2023,
arXiv:2301.13310), and a low-rank path around attention (Gemma 3n)."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.models.layers.norm import RMS


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Residual streams of one size: a layer predicts all, computes the active one, and corrects all by its error."""

    streams: int
    active: int  # index of the stream that layers compute
    norm: RMS  # norm of the input of a layer's router
    scaled: bool  # whether the input of per-layer gates is multiplied by a vector first


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """``n + norm(right(left(n)))`` of a layer's normed input n, added to the output of attention (LAuReL, Menghani et
    al. 2024, arXiv:2411.07501)."""

    rank: int
    norm: RMS
