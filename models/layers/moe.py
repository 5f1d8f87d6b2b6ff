"""The feed-forward half of a layer as a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from llmjax.kernels.activations import NORMAL_CDF
from llmjax.models.layers.norm import RMS

AS_GATE = MappingProxyType({"relu2": "relu", "gelu": NORMAL_CDF})
"""Activations f for which f(x) is g(x) x, by which kernels that gate compute experts that do not: each with g."""


NO_SHARE = 1e-20  # keeps shares that are all zero from being divided by zero


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """An expert that every token goes through."""

    inner: int  # intermediate size
    name: str = "shared_expert"
    gated: bool = True  # its output is multiplied by a sigmoid


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of equal size: a token chooses among those of the ``kept`` groups with the best experts."""

    count: int
    kept: int
    best: int = 1  # how many experts of a group count, with the sum of their scores


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Each token goes through the few that a router scores highest."""

    count: int
    per_token: int
    inner: int  # intermediate size of an expert
    activation: str  # as in llmjax.kernels.activations.gated
    normalize: bool  # whether the shares of a token's experts add up to one
    score: Literal["softmax", "sigmoid", "sparse mixer"] = (
        "softmax"  # over all experts, of each by itself, `sparse_mixer`
    )
    margin: float = 0.0  # of the sparse mixer
    corrected: bool = False  # whether each expert's score is corrected when it is compared, but not in its share
    scaling: float = 1.0  # of the shares, normalized or not
    scaled_inputs: bool = False  # a share is of what the expert is given, not of what it returns
    groups: ExpertGroups | None = None
    shared: SharedExpert | None = None
    no_share: float = NO_SHARE  # added to the sum that shares are divided by
    out_bias: bool = False  # of what the experts make together
    bias: bool = False  # of the router, and of each expert's projections
    gated: bool = True  # False: experts, the shared one too, are ``down(activation(up(n)))``
    latent: int | None = None  # entries of what experts are given and return; None: those of the residual stream
    own_norms: RMS | None = None  # before and behind the experts and the shared expert, and before the router, each its
    # own; experts have a factor of their shares then too
    held: int | None = None  # where several devices divide them: experts that each has at most; None: it has all

    name: ClassVar[str] = "mlp"

    @property
    def stacked(self) -> int:
        """Experts in the stacks of a device."""
        return self.count if self.held is None else self.held
