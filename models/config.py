"""What a decoder is made of, independent of the file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: the result of resolving every scaling rule.

    ``inv_freq`` is final (scaling applied), so the model only computes ``position * inv_freq``.
    """

    inv_freq: tuple[float, ...]  # [rotary_dim / 2]
    attention_factor: float = 1.0  # multiplies cos and sin
    interleaved: bool = False  # pairs (2i, 2i+1) instead of (i, i + d/2)

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # keys attended, the query's own included; None: all
    rope: int = 0  # index into ModelConfig.ropes
    sparse: bool = False  # the feed-forward half is ModelConfig.experts


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: each token goes through the few that a router scores highest, by a softmax over all."""

    count: int
    per_token: int
    intermediate_size: int  # of an expert
    normalize: bool  # whether the shares of a token's experts add up to one
    shared_size: int = 0  # intermediate size of the expert that every token goes through, with a gate; 0: none


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape and its variations."""

    architecture: str  # Hugging Face class name, the registry's key
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position: int  # longest sequence the model was made for
    norm_eps: float = 1e-6
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k, before rope
    sandwich_norms: bool = False  # a norm after attention and after the MLP as well (Gemma 2/3)
    norm_plus_one: bool = False  # weights are stored as w, applied as 1 + w, product in f32 (Gemma)
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_softcap: float | None = None
    final_softcap: float | None = None
    experts: ExpertsConfig | None = None  # of layers that are sparse
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # of the published weights, as NumPy names it; None: the file does not say

    def __post_init__(self) -> None:
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct attention windows: one KV page group each, full attention first."""
        found = {layer.window for layer in self.layers}
        return tuple(sorted(found, key=lambda w: (w is not None, w or 0)))

    def group_of(self, layer: int) -> int:
        """Index into ``windows`` of a layer."""
        return self.windows.index(self.layers[layer].window)
