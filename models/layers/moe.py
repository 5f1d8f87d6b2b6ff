"""The feed-forward sublayer as a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from llmjax.kernels.activations import NORMAL_CDF
from llmjax.models.layers.norm import RMS

AS_GATE = MappingProxyType({"relu2": "relu", "gelu": NORMAL_CDF})
"""Activations f with f(x) = g(x) x, each with its g: gated kernels compute experts without a gate with it."""


NO_SHARE = 1e-20  # avoids a division by zero where all shares are zero


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """An expert that every token goes through."""

    inner: int  # intermediate size
    name: str = "shared_expert"
    gated: bool = True  # its output is multiplied by a sigmoid gate


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of equal size: a token chooses experts from the ``kept`` groups with the best scores."""

    count: int
    kept: int
    best: int = 1  # a group's score is the sum over this many of its best experts


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Each token goes through the few that a router scores highest."""

    count: int
    per_token: int
    inner: int  # intermediate size of an expert
    activation: str  # a name that llmjax.kernels.activations.gated takes
    normalize: bool  # whether the shares of a token's experts add up to one
    score: Literal["softmax", "sigmoid", "sparse mixer"] = (
        "softmax"  # a softmax over all experts, a sigmoid of each, or `sparse_mixer`
    )
    margin: float = 0.0  # margin of the sparse mixer
    corrected: bool = False  # whether a learned bias corrects scores for the choice of experts, not their shares
    scaling: float = 1.0  # factor of the shares, after normalization
    scaled_inputs: bool = False  # whether shares multiply the experts' inputs, not their outputs
    groups: ExpertGroups | None = None
    shared: SharedExpert | None = None
    no_share: float = NO_SHARE  # added to the sum that shares are divided by
    out_bias: bool = False  # whether the sum of the experts' outputs has a bias
    bias: bool = False  # whether the router and each expert's projections have biases
    gated: bool = True  # False: all experts are ``down(activation(up(n)))``, also the shared one
    latent: int | None = None  # size of the experts' inputs and outputs; None: the hidden size
    own_norms: RMS | None = None  # separate norms before and after the experts and the shared expert, and before the
    # router (Gemma 4); each expert's share then has a factor too
    held: int | None = None  # in a device's part: the most experts that a device has; None: it has all

    name: ClassVar[str] = "mlp"

    @property
    def stacked(self) -> int:
        """The number of experts in the stacks of a device."""
        return self.count if self.held is None else self.held
