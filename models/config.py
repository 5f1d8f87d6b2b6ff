"""The configuration of a decoder, independent of the file that it came from."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.models.layers.altup import AltUp
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import NormSpec
from llmjax.models.layers.per_layer import PerLayer
from llmjax.models.layers.pooling import Pooler
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.state import LastState, LastTokens, Span, StateKind


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that defines a decoder: embedding, layers, norm, head."""

    architecture: str = ""  # Hugging Face class name, the registry's key
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None  # the norm after the last layer
    max_position: int  # longest sequence the model was made for
    tie_word_embeddings: bool = False
    head_bias: bool = False
    head_activation: str | None = (
        None  # of a matrix of the hidden size before the last norm (BERT); None: there is none
    )
    embedding_scale: float = 1.0
    embedding_size: int | None = None  # size of a token's vector, where a matrix projects it to the hidden size
    embedding_norm: NormSpec | None = None  # norm of the embeddings, before the first layer
    positions: LearnedPositions | None = None
    looks_up: bool = False  # layers look up a picture's rows, which are not embeddings of tokens (BLIP)
    token_types: int | None = None  # number of segments that have an embedding (BERT); None: segments have none
    logit_scale: float = 1.0
    final_softcap: float | None = None  # softcap of the scaled logits
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    per_layer: PerLayer | None = None  # embeddings for each layer
    pooler: Pooler | None = None  # set for a model that turns texts into vectors; None: it generates
    dtype: str | None = None  # NumPy's name of the published weights' dtype; None: the file does not say
    embeds: bool = True  # whether it embeds tokens; False: the first layer's input comes from another process
    first_layer: int = 0  # the number of the first layer in the whole model
    has_head: bool = True  # False: the last layer's output goes to another process

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def altup(self) -> AltUp | None:
        """The residual streams; None: there is one."""
        return self.layers[0].altup if self.layers else None

    @property
    def causal(self) -> bool:
        """Whether no token sees the tokens after it."""
        return all(getattr(layer.mixer, "causal", True) for layer in self.layers)

    @property
    def embeds_pictures(self) -> bool:
        """Whether a picture's rows go through the layers in place of tokens' embeddings."""
        return not self.looks_up and not (self.pooler is not None and self.pooler.of_pictures)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings, in the order of the layers."""
        ropes = (layer.mixer.rope for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def states(self) -> tuple[StateKind | None, ...]:
        """What each layer keeps from step to step (None: it reads what another layer keeps), then the second states of
        layers that have two, in the order of the layers."""
        states = tuple(layer.mixer.state if layer.state_of is None else None for layer in self.layers)
        return states + tuple(layer.other.state for layer in self.layers if layer.other is not None)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The distinct spans of the layers, the one that keeps all tokens first; each has page tables of its own."""
        return tuple(sorted({state.span for state in self.states if state is not None}, key=lambda span: span.order))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct attention windows, in the order of ``spans``; None: a query sees all keys before it."""
        kept = (span for span in self.spans if not isinstance(span, LastState))
        return tuple(span.window if isinstance(span, LastTokens) else None for span in kept)

    def prompt_kind(self, prompt_len: int) -> tuple[int, ...]:
        """The kind of a prompt: equal tokens have equal keys in prompts of one kind; see ``layers/rope_lengths.py``."""
        return tuple(rope.by_length.kind(prompt_len) for rope in self.ropes if rope.by_length is not None)

    @property
    def kept_by(self) -> tuple[tuple[int, ...], ...]:
        """What each layer reads and writes: indices into ``states`` for its mixer and for a second mixer or indexer."""
        beside = [number for number, layer in enumerate(self.layers) if layer.other is not None]
        others = {number: self.num_layers + i for i, number in enumerate(beside)}
        return tuple(
            (number if layer.state_of is None else layer.state_of, *((others[number],) if number in others else ()))
            for number, layer in enumerate(self.layers)
        )

    def group_of(self, kept: int) -> int:
        """Index into ``spans`` of one of ``states``."""
        state = self.states[kept]
        assert state is not None
        return self.spans.index(state.span)
