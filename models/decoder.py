"""The decoder that all families share. Layers are data, and attribute paths are Hugging Face's tensor names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.adapted import Adapted
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.linear import linear
from llmjax.models.config import ModelConfig
from llmjax.models.layers.context import Context
from llmjax.models.layers.rope import rotation
from llmjax.models.layers.seen import Seen
from llmjax.models.layers.state import LayerStack, LayerState
from llmjax.models.modules.altup import Streams
from llmjax.models.modules.embedding import Bias, Embedding, PositionEmbedding, TypeEmbedding
from llmjax.models.modules.layer import DecoderLayer
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.per_layer import PerLayerModule
from llmjax.models.modules.pooling import pooler_head
from llmjax.models.modules.residual import normed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hidden:
    """The result of a pass through the layers."""

    hidden: jax.Array  # [T, D] in the activations' dtype, before the final norm
    kv: tuple[LayerStack, ...]  # with the entries of the step's tokens


@jax.jit
def decoder_layer(
    layer: DecoderLayer, x: jax.Array, *contexts: Context
) -> tuple[jax.Array, tuple[LayerState, ...], jax.Array | None]:
    """One layer as a function, so that layers with equal specs are traced and compiled once."""
    return layer(x, *contexts)


class Decoder(nnx.Module):
    """What checkpoints call ``model``: embedding, layers and final norm, or those of them that a pipeline stage has."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        size, narrow = config.hidden_size, config.embedding_size
        self.embed_tokens = (
            Embedding(
                config.vocab_size,
                narrow or size,
                scale=config.embedding_scale,
                dtype=dtype,
                activation_dtype=activation_dtype,
            )
            if config.embeds or (config.tie_word_embeddings and config.has_head)
            else None
        )
        self.project_in = None if narrow is None or not config.embeds else Linear(narrow, size, bias=False, dtype=dtype)
        positions = config.positions if config.embeds else None
        self.embed_positions = None if positions is None else PositionEmbedding(positions, size, dtype=dtype)
        types = config.token_types if config.embeds else None
        self.embed_types = None if types is None else TypeEmbedding(types, size, dtype=dtype)
        embedding_norm = config.embedding_norm if config.embeds else None
        self.embed_norm = None if embedding_norm is None else build_norm(embedding_norm, size)
        per_layer = config.per_layer
        self.per_layer = (
            None
            if per_layer is None
            else PerLayerModule(
                per_layer, size, layers=config.num_layers, dtype=dtype, activation_dtype=activation_dtype
            )
        )
        self.altup = None if config.altup is None else Streams(config.altup, size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(spec, size, dtype=dtype) for spec in config.layers])
        self.head_activation = config.head_activation if config.has_head else None
        self.head_dense = None if self.head_activation is None else Linear(size, size, bias=True, dtype=dtype)
        norm = config.norm if config.has_head else None
        self.norm = None if norm is None else build_norm(norm, size)
        self.project_out = (
            None if narrow is None or not config.has_head else Linear(size, narrow, bias=False, dtype=dtype)
        )

    def embed(self, tokens: jax.Array, positions: jax.Array, types: jax.Array | None = None) -> jax.Array:
        """The residual stream before the first layer, [T, D].

        Args:
            tokens, positions: i32 [T].
            types: segment of each token, i32 [T]; None: all tokens are in the first segment.
        """
        assert self.embed_tokens is not None
        x = self.embed_tokens(tokens)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions).astype(x.dtype)
        if self.embed_types is not None:
            x = x + self.embed_types(jnp.zeros_like(tokens) if types is None else types).astype(x.dtype)
        return normed(x, self.embed_norm)

    def finish(self, hidden: jax.Array) -> jax.Array:
        """The input of the head, from rows [N, D] of the last layer's output."""
        x = hidden
        if self.head_dense is not None and self.head_activation is not None:
            x = ACTIVATIONS[self.head_activation](self.head_dense(x).astype(jnp.float32)).astype(x.dtype)
        x = normed(x, self.norm)
        return x if self.project_out is None else self.project_out(x)


class CausalLM(nnx.Module):
    """A decoder with its language-model head, or with the head of its pooler.

    Args:
        dtype: dtype of weight matrices; norms and biases are f32.
        activation_dtype: dtype of everything between layers.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        self.config = config
        self.model = Decoder(config, dtype=dtype, activation_dtype=activation_dtype)
        tied = config.tie_word_embeddings
        size, rows = config.embedding_size or config.hidden_size, config.vocab_size
        bias = config.head_bias
        self.head = None if config.pooler is None or not config.has_head else pooler_head(config.pooler, size)
        self.lm_head = (
            None
            if tied or config.pooler is not None or not config.has_head
            else Linear(size, rows, bias=bias, dtype=dtype, axes=("vocab", "hidden"))
        )
        self.head_bias = Bias(rows) if tied and bias and config.has_head and config.pooler is None else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv: tuple[LayerStack, ...],
        batches: tuple[RaggedBatch, ...],
        prompt_len: jax.Array | int = 0,
        types: jax.Array | None = None,
        before: jax.Array | None = None,
        seen: Seen | None = None,
    ) -> Hidden:
        """Runs the layers over a packed step.

        Args:
            tokens, positions: i32 [T].
            kv: KV entries and states of the layers, each in one of the stacks.
            batches: the step as the layers of each span see it, one for each entry of ``config.spans``.
            prompt_len: tokens of the prompt that each token's sequence began with, i32 [T] or one for all.
            types: i32 [T], the segment that each token is in; None: the first one.
            before: [T, D], the residual stream from the previous pipeline stage; None: this is the first stage, and
                tokens are embedded.
            seen: the images among the tokens; None: the model sees none.
        """
        config = self.config
        x = self.model.embed(tokens, positions, types) if before is None else before
        x = seen.embedded(x) if seen is not None and config.embeds_pictures and before is None else x
        looked_up = seen.looked_up() if seen is not None and config.looks_up else None
        vectors = None
        if (per_layer := self.model.per_layer) is not None:
            vectors = per_layer(tokens if seen is None else seen.known(tokens, per_layer.spec.unknown), x)
        streams = self.model.altup
        x = x if streams is None else streams.widened(x)
        axes, last_key = (None, None) if seen is None else (seen.axes, seen.last_key)
        rotations = {rope: rotation(positions, rope, prompt_len, axes) for rope in config.ropes}
        stacks = list(kv)
        places = {number: (i, at) for i, stack in enumerate(kv) for at, number in enumerate(stack.layers)}
        kept_by, chosen = config.kept_by, None
        for number, layer in enumerate(self.model.layers):
            rope = config.layers[number].mixer.rope
            chosen_before = chosen if config.layers[number].chosen_before else None
            by = None if rope is None else rotations[rope]
            vector = None if vectors is None else vectors[:, number]
            contexts = []
            for kept in kept_by[number]:
                i, at = places[kept]
                first = stacks[i].first_page(at)
                seen_last = None if config.layers[number].in_order else last_key
                batch = replace(batches[config.group_of(kept)], first_page=first, last_key=seen_last)
                contexts.append(Context(by, stacks[i].of(at), batch, vector, looked_up, chosen_before))
            x, states, chosen = decoder_layer(layer, x, *contexts)
            x = x if seen is None else seen.added(x, config.first_layer + number)
            for kept, state in zip(kept_by[number], states, strict=True):
                i, _ = places[kept]
                stacks[i] = stacks[i].after(state)
        return Hidden(hidden=x if streams is None else streams.narrowed(x), kv=tuple(stacks))

    def headed(self, x: jax.Array, places: jax.Array | None = None) -> jax.Array:
        """Applies the pooler's matrices to pooled vectors, f32 [N, D] to [N, size of a vector].

        Args:
            places: as in `logits`.
        """
        for dense in self.head or ():
            x = dense(x, places)
        return x

    def logits(self, hidden: jax.Array, used: jax.Array | None = None, places: jax.Array | None = None) -> jax.Array:
        """Applies the final norm and the head to the rows that need them.

        Args:
            hidden: [N, D], rows of ``Hidden.hidden``.
            used: i32 [], how many of the first rows are needed; None: all.
            places: i32 [N], whose adapters the rows have; None: there are no adapters.

        Returns:
            f32 [N, V]; where the vocabulary is divided over devices, only this device's part.
        """
        # f32 in, f32 out: a bf16 model's logits are not rounded to bf16.
        x = self.model.finish(hidden).astype(jnp.float32)
        if self.lm_head is None:
            assert self.model.embed_tokens is not None
            offset = None if self.head_bias is None else self.head_bias.bias.get_value()
            weight = self.model.embed_tokens.weight.get_value()
            if isinstance(weight, Adapted):
                weight = weight.weight if places is None else weight.as_head.at(places)
            logits = linear(x, weight, offset, used)
        else:
            logits = self.lm_head.of_rows(x, places, used)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
