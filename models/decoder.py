"""The configurable decoder: one definition for every family of the Llama shape. Attribute paths are Hugging Face's
tensor names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import KVPages, RaggedBatch
from llmjax.kernels.linear import linear
from llmjax.kernels.rope import Rotation
from llmjax.models.config import LayerConfig, ModelConfig
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.embedding import Embedding
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.moe import MoE
from llmjax.models.layers.norm import RMSNorm
from llmjax.models.layers.rope import rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hidden:
    """What a pass through the layers leaves."""

    hidden: jax.Array  # [T, D] in the activations' dtype, before the final norm
    kv: tuple[KVPages, ...]  # one per layer, the step's keys and values stored


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward half, each with a norm before it, and after it too where the config says so."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: jnp.dtype) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps, plus_one=config.norm_plus_one)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, dtype=dtype)
        self.post_attention_layernorm = norm()
        self.mlp = MoE(config, dtype=dtype) if layer.sparse else _mlp(config, dtype=dtype)
        self.pre_feedforward_layernorm = norm() if config.sandwich_norms else None
        self.post_feedforward_layernorm = norm() if config.sandwich_norms else None

    def __call__(self, x: jax.Array, by: Rotation, pages: KVPages, batch: RaggedBatch) -> tuple[jax.Array, KVPages]:
        x, pages = self.attend(x, by, pages, batch)
        return self.feed_forward(x, batch), pages

    def attend(self, x: jax.Array, by: Rotation, pages: KVPages, batch: RaggedBatch) -> tuple[jax.Array, KVPages]:
        """The first half."""
        after = self.post_attention_layernorm if self.pre_feedforward_layernorm is not None else None
        return self.self_attn(x, by, pages, batch, before=self.input_layernorm, after=after)

    def feed_forward(self, x: jax.Array, batch: RaggedBatch) -> jax.Array:
        """The second half."""
        return self.mlp(x, batch, before=self.mlp_norm, after=self.post_feedforward_layernorm)

    @property
    def mlp_norm(self) -> RMSNorm:
        """The norm before the second half."""
        return self.pre_feedforward_layernorm or self.post_attention_layernorm


def _mlp(config: ModelConfig, *, dtype: jnp.dtype) -> MLP:
    size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return MLP(size, inner, bias=bias, activation=config.activation, dtype=dtype)


@partial(jax.jit, static_argnums=0)
def decoder_layer(
    kind: Any, weights: Any, x: jax.Array, by: Rotation, pages: KVPages, batch: RaggedBatch
) -> tuple[jax.Array, KVPages]:
    """One layer as a function, so that all layers of a kind share one trace and one compiled function.

    Args:
        kind, weights: the layer's graph definition and state, as ``nnx.split`` gives them.
    """
    return nnx.merge(kind, weights)(x, by, pages, batch)


class Decoder(nnx.Module):
    """What checkpoints call ``model``: embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_scale,
            dtype=dtype,
            activation_dtype=activation_dtype,
        )
        self.layers = nnx.List([DecoderLayer(config, layer, dtype=dtype) for layer in config.layers])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, plus_one=config.norm_plus_one)


class CausalLM(nnx.Module):
    """A decoder with its language-model head.

    Args:
        dtype: of weight matrices; norms and biases are f32.
        activation_dtype: of everything between layers.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        self.config = config
        self.model = Decoder(config, dtype=dtype, activation_dtype=activation_dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv: tuple[KVPages, ...],
        batches: tuple[RaggedBatch, ...],
    ) -> Hidden:
        """Runs the layers over a packed step.

        Args:
            tokens, positions: i32 [T].
            kv: the pages of each layer.
            batches: the step as the layers of each entry of ``config.windows`` see it.
        """
        config = self.config
        x = self.model.embed_tokens(tokens)
        rotations = [rotation(positions, rope) for rope in config.ropes]
        stored = []
        for i, (layer, pages) in enumerate(zip(self.model.layers, kv, strict=True)):
            kind, weights = nnx.split(layer)
            by, batch = rotations[config.layers[i].rope], batches[config.group_of(i)]
            x, pages = decoder_layer(kind, weights, x, by, pages, batch)
            stored.append(pages)
        return Hidden(hidden=x, kv=tuple(stored))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head of the rows that need it.

        Args:
            hidden: [N, D], rows of ``Hidden.hidden``.

        Returns:
            f32 [N, V].
        """
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        # f32 in, f32 out: a bf16 model's logits are not rounded to bf16.
        logits = linear(self.model.norm(hidden).astype(jnp.float32), head.get_value())
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
