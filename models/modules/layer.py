"""The module of `LayerSpec`, and the table of the modules of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.sharding import all_sum
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.channel_delta import ChannelDelta
from llmjax.models.layers.context import Context
from llmjax.models.layers.convolution import ShortConvolution
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.latent import Indexer, LatentAttention
from llmjax.models.layers.layer import FeedForward, LayerSpec, Mixer
from llmjax.models.layers.lightning import LightningAttention
from llmjax.models.layers.mamba import Mamba
from llmjax.models.layers.mamba2 import Mamba2
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.residual import NormedStream, Parallel, PostNorm, TwoMixers
from llmjax.models.layers.state import LayerState
from llmjax.models.modules.altup import AltUpModule, LowRankModule
from llmjax.models.modules.attention import attention_module
from llmjax.models.modules.channel_delta import ChannelDeltaModule
from llmjax.models.modules.convolution import ShortConvolutionModule
from llmjax.models.modules.gated_delta import GatedDeltaModule
from llmjax.models.modules.indexer import IndexerModule
from llmjax.models.modules.latent import LatentAttentionModule
from llmjax.models.modules.lightning import LightningAttentionModule
from llmjax.models.modules.mamba import MambaModule
from llmjax.models.modules.mamba2 import Mamba2Module
from llmjax.models.modules.mlp import MLPModule, gated_mlp_module
from llmjax.models.modules.moe import ExpertsModule
from llmjax.models.modules.norm import NormModule, build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.per_layer import PerLayerGate
from llmjax.models.modules.residual import (
    FeedForwardModule,
    MixerModule,
    add_both,
    add_fed_forward,
    add_mixed,
    added,
    normed,
)


class DecoderLayer(nnx.Module):
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``; see `Residual` for other places of norms.

    Attributes have their names in checkpoints: the mixer is called ``spec.mixer.name``, norms as in ``spec.residual``.
    """

    def __init__(self, spec: LayerSpec, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        for name in spec.residual.norms:
            setattr(self, name, build_norm(spec.norm, size))
        for mixer in (spec.mixer, spec.other):
            if mixer is not None:
                setattr(self, mixer.name, build_part(mixer, size, dtype=dtype))
        if spec.feed_forward is not None:
            setattr(self, spec.feed_forward.name, build_part(spec.feed_forward, size, dtype=dtype))
        self.per_layer = None if spec.per_layer is None else PerLayerGate(spec.per_layer, size, dtype=dtype)
        self.altup = None if spec.altup is None else AltUpModule(spec.altup, size)
        self.laurel = None if spec.low_rank is None else LowRankModule(spec.low_rank, size, dtype=dtype)
        self.layer_scalar = parameter((1,), jnp.float32, axes=(None,)) if spec.scaled else None

    def __call__(
        self, x: jax.Array, context: Context, beside: Context | None = None
    ) -> tuple[jax.Array, tuple[LayerState, ...], jax.Array | None]:
        """Maps [T, D] or [T, streams, D] to the same shape.

        Returns:
            The residual stream, the state of the mixer, the state of the second mixer or indexer (the second context is
            for it), and the keys that an indexer has chosen, for the next layers.
        """
        if self.spec.indexer is not None or self.spec.chosen_before:
            x, states, chosen = self.mix_chosen(x, context, beside)
            return self.feed_forward(x, context), states, chosen
        if beside is not None:
            x, *both = self.mix_both(x, context, beside)
            return self.feed_forward(x, context), tuple(both), None
        x, state = (self.mix_and_feed if self.altup is None else self.update_streams)(x, context)
        return x, (state,), None

    def mix_and_feed(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerState]:
        """A layer with one mixer."""
        names = self.spec.residual
        if isinstance(names, Parallel):
            before_mixer, before = self.norm(names.before_mixer), self.norm(names.before_feed_forward)
            return add_both(x, self.mixer, self.part, before_mixer, before, context, scale=names.scale)
        x, state = self.mix(x, context)
        x = self.feed_forward(x, context)
        if self.per_layer is not None:
            assert context.vector is not None
            x = self.per_layer(x, context.vector)
        return (x if self.layer_scalar is None else x * self.layer_scalar.get_value().astype(x.dtype)), state

    def update_streams(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerState]:
        """A layer with several residual streams [T, streams, D], of which it computes one."""
        altup, vector = self.altup, context.vector
        assert altup is not None and self.per_layer is not None and vector is not None
        predicted = altup.predicted(x)
        active = predicted[:, altup.spec.active]
        computed, state = self.mix(active, context)
        if self.laurel is not None:
            around = self.laurel(normed(active, self.norm(self.spec.residual.before_mixer)))
            computed = (computed + around) * 2**-0.5
        corrected = altup.corrected(predicted, self.feed_forward(computed, context))
        more = self.per_layer.added(altup.scaled(corrected[:, altup.spec.active]), vector)
        return corrected.at[:, 1:].add(more[:, None]), state

    def mix(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerState]:
        """The sublayer that mixes tokens."""
        names = self.spec.residual
        before, after = self.norm(names.before_mixer), self.norm(names.after_mixer)
        if isinstance(names, PostNorm):
            x, state = add_mixed(x, self.mixer, None, None, context, scale=names.scale)
            return normed(x, after), state
        if isinstance(names, NormedStream):
            kept, added = names.mixer
            x, state = add_mixed(normed(x, before), self.mixer, None, None, context, scale=added / kept)
            return kept * x, state
        return add_mixed(x, self.mixer, before, after, context, scale=names.scale)

    def mix_both(self, x: jax.Array, context: Context, beside: Context) -> tuple[jax.Array, LayerState, LayerState]:
        """The sublayer that mixes tokens, with two mixers."""
        names, spec = self.spec.residual, self.spec
        assert isinstance(names, TwoMixers) and spec.beside is not None
        other: MixerModule = getattr(self, spec.beside.name)
        n = normed(x, self.norm(names.before_mixer))
        found, state = self.mixer.sublayer(
            n if names.given == 1 else names.given * n, self.mixer, None, None, context, residual=False
        )
        more, state_beside = other.sublayer(n, other, None, None, beside, residual=False)
        x = added(x, all_sum(found, self.mixer.divided), self.mixer.last_bias, None, scale=names.mixer)
        x = added(x, all_sum(more, other.divided), other.last_bias, None, scale=names.beside)
        return x, state, state_beside

    def mix_chosen(
        self, x: jax.Array, context: Context, beside: Context | None
    ) -> tuple[jax.Array, tuple[LayerState, ...], jax.Array]:
        """The sublayer that mixes tokens, reading the keys that its indexer or an earlier one has chosen."""
        n, mixer = normed(x, self.norm(self.spec.residual.before_mixer)), self.mixer
        assert isinstance(mixer, LatentAttentionModule)
        chosen, kept = context.chosen, ()
        if beside is not None:
            chosen, *kept = getattr(self, Indexer.name)(n, mixer.latent_queries(n), beside)
        assert chosen is not None
        found, state = mixer.partial_to(n, context, chosen)
        return added(x, all_sum(found, mixer.divided), mixer.last_bias, None), (state, *kept), chosen

    def feed_forward(self, x: jax.Array, context: Context) -> jax.Array:
        """The feed-forward sublayer, if there is one."""
        names = self.spec.residual
        if self.spec.feed_forward is None:
            return x
        before, after = self.norm(names.before_feed_forward), self.norm(names.after_feed_forward)
        if isinstance(names, PostNorm):
            return normed(add_fed_forward(x, self.part, None, None, context, scale=names.scale), after)
        if isinstance(names, NormedStream):
            kept, added = names.feed_forward
            return kept * add_fed_forward(normed(x, before), self.part, None, None, context, scale=added / kept)
        scale = names.feed_forward if isinstance(names, TwoMixers) else names.scale
        return add_fed_forward(x, self.part, before, after, context, scale=scale)

    @property
    def mixer(self) -> MixerModule:
        """The module that mixes tokens."""
        mixer: MixerModule = getattr(self, self.spec.mixer.name)
        return mixer

    @property
    def part(self) -> FeedForwardModule:
        """The feed-forward module."""
        assert self.spec.feed_forward is not None
        part: FeedForwardModule = getattr(self, self.spec.feed_forward.name)
        return part

    def norm(self, name: str | None) -> NormModule | None:
        """A norm by its name."""
        return None if name is None else getattr(self, name)


MODULES: Mapping[type, Callable[..., nnx.Module]] = MappingProxyType(
    {
        Attention: attention_module,
        LatentAttention: LatentAttentionModule,
        Indexer: IndexerModule,
        ChannelDelta: ChannelDeltaModule,
        GatedDelta: GatedDeltaModule,
        LightningAttention: LightningAttentionModule,
        Mamba: MambaModule,
        Mamba2: Mamba2Module,
        ShortConvolution: ShortConvolutionModule,
        GatedMLP: gated_mlp_module,
        MLP: MLPModule,
        Experts: ExpertsModule,
    }
)


def build_part(spec: Mixer | Indexer | FeedForward, size: int, *, dtype: jnp.dtype) -> nnx.Module:
    """The module of a part of a layer.

    Args:
        size: hidden size.
        dtype: dtype of the matrices.
    """
    return MODULES[type(spec)](spec, size, dtype=dtype)
