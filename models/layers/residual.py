"""The place of a layer's norms, and what its sublayers add to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Residual:
    """The names in checkpoints of the norms before and after each sublayer; None: there is no norm there."""

    before_mixer: str | None
    after_mixer: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None
    scale: float = 1.0  # factor of each sublayer's output

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of all norms."""
        names = (self.before_mixer, self.after_mixer, self.before_feed_forward, self.after_feed_forward)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class PreNorm(Residual):
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``."""

    before_mixer: str = "input_layernorm"
    after_mixer: None = None
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: None = None


@dataclass(frozen=True)
class MixerAlone(Residual):
    """``x + mixer(norm(x))``, in layers without a feed-forward sublayer."""

    before_mixer: str = "input_layernorm"
    after_mixer: None = None
    before_feed_forward: None = None
    after_feed_forward: None = None


@dataclass(frozen=True)
class Sandwich(Residual):
    """``x + norm(mixer(norm(x)))``, then ``x + norm(feed_forward(norm(x)))``."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = "post_attention_layernorm"
    before_feed_forward: str = "pre_feedforward_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"


@dataclass(frozen=True)
class Parallel(Residual):
    """``x + mixer(norm(x)) + feed_forward(norm(x))``; without ``before_feed_forward`` both have the mixer's norm."""

    before_mixer: str = "input_layernorm"
    after_mixer: None = None
    before_feed_forward: str | None = None
    after_feed_forward: None = None


@dataclass(frozen=True)
class TwoMixers(Residual):
    """With ``n = norm(x)``: ``x + a mixer(b n) + c beside(n)``, then ``x + d feed_forward(norm(x))``."""

    before_mixer: str = "input_layernorm"
    after_mixer: None = None
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: None = None
    given: float = 1.0  # b
    mixer: float = 1.0  # a
    beside: float = 1.0  # c
    feed_forward: float = 1.0  # d


@dataclass(frozen=True)
class SandwichedMixer(Residual):
    """``x + norm(mixer(norm(x)))``, then ``x + norm(feed_forward(x))``; the experts in the latter have norms inside."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = "post_attention_layernorm"
    before_feed_forward: None = None
    after_feed_forward: str = "post_feedforward_layernorm"


@dataclass(frozen=True)
class NormedParts(Residual):
    """``x + norm(mixer(x))``, then ``x + norm(feed_forward(x))``."""

    before_mixer: None = None
    after_mixer: str = "post_attention_layernorm"
    before_feed_forward: None = None
    after_feed_forward: str = "post_feedforward_layernorm"


@dataclass(frozen=True)
class PostNorm(Residual):
    """``norm(x + mixer(x))``, then ``norm(x + feed_forward(x))``."""

    before_mixer: None = None
    after_mixer: str = "input_layernorm"
    before_feed_forward: None = None
    after_feed_forward: str = "post_attention_layernorm"


@dataclass(frozen=True)
class PostNormAlone(PostNorm):
    """``norm(x + mixer(x))``, in layers without a feed-forward sublayer."""

    after_feed_forward: None = None  # type: ignore[assignment]


@dataclass(frozen=True)
class NormedStream(Residual):
    """``x = norm(x)``, then ``kept * x + added * mixer(x)``, and the same for the feed-forward sublayer."""

    before_mixer: str = "input_layernorm"
    after_mixer: None = None
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: None = None
    mixer: tuple[float, float] = (1.0, 1.0)  # kept, added
    feed_forward: tuple[float, float] = (1.0, 1.0)
