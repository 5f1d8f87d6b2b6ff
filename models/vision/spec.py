"""The encoder of pictures as data: patches, positions, layers, and what makes feature rows of their output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.norm import NormSpec


@dataclass(frozen=True, kw_only=True)
class Rope2D:
    """Rotary positions on two axes: which angle turns which pair of a head's entries.

    Attributes:
        theta: the base.
        order: "halves": the first half of the pairs turns by the row and the second by the column, each with all
            frequencies; "alternating": pairs turn by row and column in turn, each with all frequencies (Kimi-VL);
            "by turns": the same, each with every second frequency of one axis, and those of rows first (Pixtral).
        pairs: "half": entry i is paired with that half a head later; "quarter": the same within each half of a head;
            "adjacent": entries 2i and 2i + 1 are paired.
        column_first: rows and columns change places.
        offset: added to rows and columns.
    """

    theta: float = 10000.0
    order: Literal["halves", "alternating", "by turns"] = "halves"
    pairs: Literal["half", "quarter", "adjacent"] = "half"
    column_first: bool = False
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class TablePositions:
    """Learned vectors for the cells of a grid, added to the patches.

    Attributes:
        rows, columns: the grid; the table has a vector for each cell, and for the class token before them.
        between: how a picture's grid is laid over it: "cells": patch (r, c) has cell (r, c); "corners": the corner
            patches have the corner cells, and between cells vectors are mixed linearly (Qwen3-VL); "cubic": the table
            is stretched over the picture, and a patch has a mix of the sixteen cells around its center (GLM-4V);
            "buckets": the same, and a patch has the cell that its start lies in (Idefics3); "axes": a patch has the sum
            of a vector for its column and one for its row; the table has those of columns first (Gemma 4).
    """

    rows: int
    columns: int
    between: Literal["cells", "corners", "cubic", "buckets", "axes"] = "cells"

    @property
    def mixed(self) -> int:
        """How many cells make up a patch's position."""
        return {"corners": 4, "cubic": 16, "axes": 2}.get(self.between, 1)

    @property
    def cells(self) -> int:
        """How many vectors the table has."""
        return self.rows + self.columns if self.between == "axes" else self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class VisionAttention:
    """Attention of a patch to those of its frame or tile, or of its window."""

    heads: int
    head_dim: int
    bias: bool = True  # of queries, keys and values
    out_bias: bool = True
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    qk_norm: NormSpec | None = None  # of each head's queries and keys
    whole_norm: NormSpec | None = None  # of all heads' queries and keys as one vector
    v_norm: NormSpec | None = None  # of each head's values


@dataclass(frozen=True, kw_only=True)
class VisionLayer:
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    Attributes:
        windowed: patches see their window alone.
        scaled: both sublayers' outputs are multiplied with a learned vector.
        clipped: what goes into each matrix, and what comes out, is kept between learned bounds (Gemma 4).
        after: norms of both sublayers' outputs, as in ``Sandwich``; None: there are none.
    """

    attention: VisionAttention
    feed_forward: MLP | GatedMLP
    norm: NormSpec
    after: NormSpec | None = None
    windowed: bool = False
    scaled: bool = False
    clipped: bool = False


@dataclass(frozen=True)
class Normed:
    """A step of the projector: a norm.

    Attributes:
        activation: a key of ACTIVATIONS, applied afterwards; None: none.
    """

    norm: NormSpec
    activation: str | None = None


@dataclass(frozen=True)
class Merged:
    """A step of the projector: a square of patches becomes one row.

    Attributes:
        side: patches along each side.
        order: how the row is made: "patches": one patch after another, each with all its values; "channels": one
            value after another, each of all patches; "mean": their mean.
    """

    side: int
    order: Literal["patches", "channels", "mean"] = "patches"


@dataclass(frozen=True)
class Standardized:
    """A step of the projector: values times a factor, and ``(x - bias) * scale`` with learned vectors, in f32."""

    factor: float
    learned: bool = True


@dataclass(frozen=True)
class Projected:
    """A step of the projector: a matrix.

    Attributes:
        size: number of values of a row of its output.
        activation: a key of ACTIVATIONS, applied afterwards; None: none.
    """

    size: int
    bias: bool = True
    activation: str | None = None


@dataclass(frozen=True)
class Shared:
    """A step of the projector: values become shares whose sum is one (softmax), in f32 (Ovis2)."""


@dataclass(frozen=True)
class Joined:
    """A step of the projector: this many rows, as they are put in order, become one (Moondream)."""

    count: int


@dataclass(frozen=True)
class Fed:
    """A step of the projector: a feed-forward sublayer, without a residual.

    Attributes:
        size: number of values of a row of its output; None: those of its input.
    """

    feed_forward: MLP | GatedMLP
    size: int | None = None


@dataclass(frozen=True)
class Halved:
    """A step of the projector: the first half of a row's values times the activated second half (SwiGLU).

    Attributes:
        activation: a key of ACTIVATIONS.
    """

    activation: str


Step = Normed | Merged | Joined | Shared | Standardized | Projected | Fed | Halved


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Each frame or tile becomes as many rows as there are learned queries, which attend to its patches (MiniCPM-V).

    Attributes:
        queries: how many.
        heads: heads of the attention of queries to patches.
        least: patches of the smallest frame or tile.
        norm: the norm that queries, patches, and rows before the last matrix go through.
    """

    queries: int
    heads: int
    least: int
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class Perceiving:
    """Each frame or tile becomes as many rows as there are learned queries, which layers change by attention to its
    patches and to each other (Idefics2); patches go through a gated MLP before.

    Attributes:
        queries: how many.
        heads, kv_heads, head_dim: sizes of the attention in each layer.
        depth: number of layers.
        widened: values between the matrices of the MLP that patches go through.
        inner: the same of each layer's.
        widened_activation, activation: keys of ACTIVATIONS, of the first and of the others.
        least: patches of the smallest frame or tile.
        norm: the norm that queries and patches go through in each layer, and rows after the last.
    """

    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    widened: int
    inner: int
    widened_activation: str
    activation: str
    least: int
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class Probing:
    """Each tile becomes one row: ``x + feed_forward(norm(x))``, where x is what a learned query attends to (SigLIP).

    Attributes:
        heads: heads of the attention of the query to patches.
        least: patches of each tile.
    """

    heads: int
    feed_forward: MLP
    norm: NormSpec
    least: int

    @property
    def queries(self) -> int:
        """Rows of a tile."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Windowing:
    """Each row is made of a window of patches, whose mean attends to them (Molmo 2).

    Attributes:
        side: patches along each side of a window of a still, of which some may be missing.
        heads, kv_heads, head_dim: sizes of the attention.
        size: number of values of what it makes.
        bias: whether its matrices have biases.
    """

    side: int
    heads: int
    kv_heads: int
    head_dim: int
    size: int
    bias: bool


@dataclass(frozen=True, kw_only=True)
class TokenVectors:
    """Vectors that the text model's embedding would have for tokens of pictures, which are the encoder's instead.

    Attributes:
        first: the id of the first token that the text model has no vector for.
        learned: the tokens whose vectors are the learned rows.
        added: the token whose vector is added to each row of a picture.
    """

    first: int
    learned: tuple[int, ...]
    added: int


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """All that defines an encoder of pictures.

    Attributes:
        patch_values: values of a patch, those of each channel together.
        frames: frames of a video that a patch has values of; a still has the same ones in each.
        size: number of values of a patch's vector between layers.
        out: size of a feature row, which is the text model's hidden size.
        side: patches along each side of a picture that become one row; patches come square by square.
        projector: what makes feature rows of the last layer's output.
        patch_bias: whether the embedding of patches has a bias.
        table: learned positions; None: none.
        class_token: whether each tile begins with a learned vector.
        class_row: whether a row is made of it: none, a tile's first (BLIP), or its only one (CLIP).
        rope: None: no rotary positions.
        norm_patches: a norm of the embedded patches, before positions are added.
        norm_before, norm_after: norms before the first and after the last layer.
        window: patches along each side of a window; None: no layer has windows.
        tapped: layers whose outputs are projected too, by ``tap`` with weights of their own (deepstack).
        beside: layers whose outputs, one beside another in this order, are what is projected; empty: the last one's.
        learned: learned rows that stand between a picture's own, such as at the ends of lines.
        sources: merged patches of which a feature row is a sum; 0: rows are merged patches as they are.
        arranged: the step of the projector before which rows are put so; None: after the last.
        inserted: the step before which learned rows take their places among them; None: where rows are put so.
        bidirectional: in the text model, a picture's rows see each other whatever their order (Gemma 3).
        whole_text: what stands around a picture's rows in its text is among what they see, and sees them (Moondream).
        whole_images: the same, and all pictures of a prompt are among it, but not the text between them (Molmo 2).
        whole_prompt: in prompts with pictures all tokens see each other, not the rows of a picture alone (PaliGemma).
        resampler: makes feature rows in place of a projector; None: there is none.
        windowing: makes rows of patches before the projector; None: patches are its rows.
        tokens: the tokens whose vectors learned rows are; None: learned rows are tensors of their own.
        longest: most patches of a frame or tile, where they differ and have a limit.
        tile: patches of a tile where all are equal, as where there is a class token; None: pictures have any number.
        filled_from: rows and columns of a tile's patches from this one on are not of a picture; they make its side a
            multiple of ``side``, no other patch sees them, and they are zero where squares are merged. None: none are.
    """

    patch_values: int
    frames: int = 1
    size: int
    out: int
    layers: tuple[VisionLayer, ...]
    side: int = 1
    projector: tuple[Step, ...] = ()
    patch_bias: bool = True
    table: TablePositions | None = None
    class_token: bool = False
    class_row: Literal["none", "first", "only"] = "none"
    rope: Rope2D | None = None
    norm_patches: NormSpec | None = None
    norm_before: NormSpec | None = None
    norm_after: NormSpec | None = None
    window: int | None = None
    tapped: tuple[int, ...] = ()
    tap: tuple[Step, ...] = ()
    beside: tuple[int, ...] = ()
    learned: int = 0
    sources: int = 0
    arranged: int | None = None
    inserted: int | None = None
    bidirectional: bool = False
    whole_text: bool = False
    whole_images: bool = False
    whole_prompt: bool = False
    resampler: Resampling | Perceiving | Probing | None = None
    windowing: Windowing | None = None
    tokens: TokenVectors | None = None
    longest: int | None = None
    tile: int | None = None
    filled_from: int | None = None

    @property
    def joined(self) -> int:
        """Rows, as they are put in order, that make one feature row."""
        return next((step.count for step in self.projector if isinstance(step, Joined)), 1)

    @property
    def unit(self) -> int:
        """Patches that are never divided between two batches' ends: a batch has a multiple of them."""
        return self.tile or (self.side**2 if self.resampler is None else self.resampler.least)
