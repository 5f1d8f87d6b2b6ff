"""Which golden checkpoints llama.cpp's ``mtmd`` has been asked about, and the picture that each was asked with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
STEP = 7  # every seventh number is kept


@dataclass(frozen=True)
class Table:
    """A table of positions that is made larger or smaller than the golden checkpoint's, by repeating it.

    Attributes:
        before, after: its shape but for the size of a vector.
    """

    before: tuple[int, int]
    after: tuple[int, int]

    def changed(self, values: np.ndarray) -> np.ndarray:
        """The table, [*after, D]."""
        grid = values.reshape(*self.before, values.shape[-1])
        more = [(0, after) for after in self.after]
        return np.ascontiguousarray(np.pad(grid, (*more, (0, 0)), "wrap")[: self.after[0], : self.after[1]])


@dataclass(frozen=True)
class Case:
    """A golden checkpoint of models that see, and a picture whose size nothing resizes.

    Attributes:
        size: the picture's height and width.
        placeholder: what stands for a picture in a prompt of transformers.
        renamed: beginnings of tensors' names in the golden checkpoint, and what published files have in their place.
        vision: keys of ``vision_config`` that are not as in the golden checkpoint.
        whole: keys of config.json that are not.
        table: what becomes of the table of positions.
        broken: the token at whose places between feature rows llama.cpp has the token's embedding.
        text: whether llama.cpp's converter makes a text model of the checkpoint; a small Llama stands in where not.
        converted: whether its converter makes the encoder's file; the tests' writer does where not.
    """

    size: tuple[int, int]
    placeholder: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    broken: str | None = None
    text: bool = True
    converted: bool = True


_VISION_MODEL = {"vision_tower.": "vision_tower.vision_model."}
# The converter looks for the embedding of [IMG_BREAK] under a name that it does not leave out.
_EMBEDDINGS = {"language_model.model.embed_tokens.": "embed_tokens."}
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
CASES: Mapping[str, Case] = {
    "qwen2-vl": Case((48, 108), _QWEN),
    # Windows of 112 pixels are what llama.cpp has, whatever config.json says.
    "qwen2_5-vl": Case((36, 240), _QWEN, vision={"window_size": 112}),
    "qwen3-vl": Case((48, 108), _QWEN),
    "qwen3_5": Case((48, 108), _QWEN, text=False),
    "gemma3": Case((36, 36), "<start_of_image>", _VISION_MODEL, text=False),
    "idefics3": Case((48, 72), "<image>", text=False),
    "internvl": Case(
        (48, 72),
        "<IMG_CONTEXT>",
        {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
        {"architectures": ["InternVisionModel"]},
        {"max_dynamic_patch": 6},
        text=False,
    ),
    "pixtral": Case((36, 48), "[IMG]", _EMBEDDINGS, broken="[IMG_BREAK]"),
    "mistral3": Case((48, 60), "[IMG]", _EMBEDDINGS, broken="[IMG_BREAK]"),
    "llava": Case((18, 18), "<image>", converted=False),
    # Whose table llama.cpp takes for one of 70 x 70 positions.
    "minicpmv": Case(
        (36, 36),
        "(<image>./</image>)",
        vision={"image_size": 420},
        table=Table((9, 9), (70, 70)),
        text=False,
        converted=False,
    ),
    "glm4v": Case((48, 108), "<|begin_of_image|><|image|><|end_of_image|>", text=False),
    "glm4v-moe": Case((48, 108), "<|begin_of_image|><|image|><|end_of_image|>", text=False),
    # The converter now gives the norm of feed-forward parts a name that llama.cpp reads as another norm's.
    "llama4": Case((24, 24), "<|image|>", text=False, converted=False),
    "janus": Case((18, 18), "<image_placeholder>", text=False),
    # Tables as large as the pictures, which other tables are stretched to in other ways; 280 rows are the least that
    # both have for Gemma 4.
    "kimi-vl": Case(
        (36, 36),
        "<|media_pad|>",
        vision={"init_pos_emb_height": 6, "init_pos_emb_width": 6},
        table=Table((5, 7), (6, 6)),
        text=False,
    ),
    **{
        name: Case(
            (252, 360),
            "<|image|>",
            vision={"position_embedding_size": 64},
            table=Table((2, 40), (2, 64)),
            text=False,
        )
        for name in ("gemma4", "gemma4-layered")
    },
}


def picture(image: np.ndarray, case: Case) -> np.ndarray:
    """A picture of the case's size, made of a golden one and its mirror images.

    Args:
        image: u8 [H, W, 3].
    """
    height, width = case.size
    return np.ascontiguousarray(np.pad(image, ((0, height), (0, width), (0, 0)), "symmetric")[:height, :width])
