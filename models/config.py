"""What a decoder is made of, independent of the file it came from."""

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
    """A decoder: embedding, layers, norm, head."""

    architecture: str = ""  # Hugging Face class name, the registry's key
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None  # the last one
    max_position: int  # longest sequence the model was made for
    tie_word_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    embedding_size: int | None = None  # of tokens' vectors, where matrices stand between them and layers
    embedding_norm: NormSpec | None = None  # of what the first layer is given
    positions: LearnedPositions | None = None
    token_types: int | None = None  # segments of a text that have an embedding; None: they have none
    logit_scale: float = 1.0
    final_softcap: float | None = None  # of logits, scaled
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    per_layer: PerLayer | None = None  # embeddings for each layer
    pooler: Pooler | None = None  # of a model that makes vectors of texts; None: it generates
    dtype: str | None = None  # of the published weights, as NumPy names it; None: the file does not say
    embeds: bool = True  # tokens; False: the first layer is given what layers in another process have made
    has_head: bool = True  # False: what the last layer makes goes to layers in another process

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def altup(self) -> AltUp | None:
        """The residual streams; None: there is one."""
        return self.layers[0].altup if self.layers else None

    @property
    def causal(self) -> bool:
        """Whether no token sees what comes behind it."""
        return all(getattr(layer.mixer, "causal", True) for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings, in the order of the layers."""
        found = (layer.mixer.rope for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def states(self) -> tuple[StateKind | None, ...]:
        """What each layer keeps from step to step (None: it reads what another one keeps); then what is kept beside
        that, in the order of their layers."""
        own = tuple(layer.mixer.state if layer.state_of is None else None for layer in self.layers)
        return own + tuple(layer.other.state for layer in self.layers if layer.other is not None)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The distinct spans of layers: a group of page tables each, the one that keeps all tokens first."""
        return tuple(sorted({state.span for state in self.states if state is not None}, key=lambda span: span.order))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct attention windows, in the order of ``spans``; None: a query sees all keys before it."""
        kept = (span for span in self.spans if not isinstance(span, LastState))
        return tuple(span.window if isinstance(span, LastTokens) else None for span in kept)

    def prompt_kind(self, prompt_len: int) -> tuple[int, ...]:
        """Prompts of one kind have the same keys for the same tokens; see ``layers/rope_lengths.py``."""
        return tuple(rope.by_length.kind(prompt_len) for rope in self.ropes if rope.by_length is not None)

    @property
    def kept_by(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer, what it reads and writes: indices into ``states`` for its mixer, and for one beside that."""
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
