"""An encoder of pictures in a file of its own, beside the text model's GGUF: llama.cpp's ``mmproj``.

Its keys become the config.json and the preprocessor_config.json that the original had, which the model's family then
reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.changes import axes_in_turn, halves_apart
from llmjax.checkpoint.gguf.choice import names_projector
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.projectors import (
    LLAVA_NEXT,
    MERGED_PIXTRAL,
    NAMES,
    PINPOINTS,
    PROJECTOR_TYPES,
    Keys,
    Projector,
    merge,
    shortest,
)
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.names import NUMBER

logger = logging.getLogger(__name__)

FILE_TYPES = ("f16", "bf16", "f32")
FILE_TYPE = re.compile(r"(?<![a-z0-9])(b?f16|f32|i?q\d\w*)(?![a-z0-9])")
"""The type of a file's weights, in its name in lower case."""
ARCHITECTURE = "clip"
NONE = Path("none")  # in place of an encoder's file: the model is to have no encoder
VOCABULARY = "tokenizer.ggml.tokens"
PROJECTORS = ("clip.vision.projector_type", "clip.projector_type")
TokenId = Callable[[str], int | None]
"""The id of a token of the text model's vocabulary; None: it has none of this name."""

SOUND = ("a.", "mm.a.")
"""Beginnings of names of tensors of an encoder of sound, which a file may have beside that of pictures."""


def beside(path: Path) -> Path | None:
    """The encoder's file beside a text model's; None: there is none, or, after a warning, it is not clear which.

    Of files that differ by their type alone, one that keeps the weights as they were trained goes first.

    Args:
        path: a .gguf file.
    """
    found = sorted(each for each in path.parent.glob("*.gguf") if names_projector(each.name) and each != path)
    if len({FILE_TYPE.sub("", each.name.lower()) for each in found}) > 1:
        names = ", ".join(each.name for each in found)
        logger.warning("%s: the text model alone is read; --mmproj says which encoder is its own: %s", path, names)
        return None

    def rank(each: Path) -> int:
        kind = FILE_TYPE.search(each.name.lower())
        return FILE_TYPES.index(kind[1]) if kind is not None and kind[1] in FILE_TYPES else len(FILE_TYPES)

    return min(found, key=rank, default=None)


def opened(path: Path) -> tuple[GGUFFile, Projector]:
    """An encoder's file and its kind.

    Raises:
        CheckpointError: it is something else, or its kind is not supported.
    """
    file = GGUFFile.open(path)
    kind = next((file.metadata[key] for key in PROJECTORS if key in file.metadata), None)
    if file.metadata.get("general.architecture") != ARCHITECTURE or not isinstance(kind, str):
        raise CheckpointError(f"{path}: it is not an encoder of images (mmproj)")
    if kind == "pixtral" and "mm.patch_merger.weight" in file.tensors:
        kind = MERGED_PIXTRAL
    if kind == "mlp" and f"clip.vision.{PINPOINTS}" in file.metadata:
        kind = LLAVA_NEXT
    if kind not in PROJECTOR_TYPES:
        known = ", ".join(PROJECTOR_TYPES)
        raise CheckpointError(f"{path}: projector type {kind[:40]!r} is not supported; supported are {known}")
    return file, PROJECTOR_TYPES[kind]


def whole_config(
    file: GGUFFile, projector: Projector, *, text: Mapping[str, Any], token_id: TokenId
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json and the preprocessor_config.json that the original had, as far as they speak of pictures.

    Args:
        text: the text model's config.json.

    Raises:
        CheckpointError: a key is missing or wrong, or the vocabulary has no token for feature rows.
    """
    keys = Keys(file, text["hidden_size"])
    placeholder, id_key = projector.placeholder
    if (row_token := token_id(placeholder)) is None:
        raise CheckpointError(f"{file.path}: the text model has no token {placeholder!r}, at which images stand")
    vision = {
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "patch_size": keys.integer("patch_size"),
        "spatial_merge_size": merge(keys, 2),
        "layer_norm_eps": keys.eps,
        **({} if keys.get("image_size", 0) == 0 else {"image_size": keys.integer("image_size")}),
        **projector.vision(keys),
    }
    whole = {
        "architectures": [projector.architecture],
        "text_config": {**text, **projector.text(text)},
        "vision_config": vision,
        id_key: row_token,
        **projector.whole(keys),
    }
    processor = {
        "image_mean": [shortest(value) for value in keys.get("image_mean", [])],
        "image_std": [shortest(value) for value in keys.get("image_std", [])],
        **projector.processor(keys),
    }
    return whole, processor


@dataclass(frozen=True, eq=False)
class Encoder:
    """An encoder's file with what it means for a text model.

    Attributes:
        whole: the config.json that the original had, as far as it speaks of pictures and the text model.
        processor: its preprocessor_config.json.
        tensors, names: see `tensors`.
    """

    whole: dict[str, Any]
    processor: dict[str, Any]
    tensors: dict[str, StoredTensor]
    names: dict[str, str]


def encoder_of(gguf: GGUFFile, text: Mapping[str, Any], path: Path | None = None) -> Encoder | None:
    """The encoder of a text model; None, maybe after a warning: it has none beside it that is supported.

    Args:
        text: the text model's config.json.
        path: the encoder's file; `NONE`: it is to have none; None: the one beside the text model, if there is one.

    Raises:
        CheckpointError: the file at ``path`` is something else, or not supported.
    """
    found = None if path == NONE else path or beside(gguf.path)
    if found is None:
        return None
    vocabulary = gguf.metadata.get(VOCABULARY)
    ids = {token: number for number, token in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
    try:
        file, projector = opened(found)
        whole, processor = whole_config(file, projector, text=text, token_id=ids.get)
        stored, names = tensors(file, projector)
    except CheckpointError as error:
        if path is not None:
            raise
        logger.warning("%s: the text model alone is read; %s", gguf.path, error)
        return None
    return Encoder(whole, processor, stored, names)


@dataclass(frozen=True, eq=False)
class Made(Derived):
    """A tensor that is made of others, all of which are plain numbers.

    Attributes:
        made: the shape of the result.
        make: makes it, of f32 and in f32.
    """

    made: tuple[int, ...]
    make: Callable[..., np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.made

    def read(self, dtype: np.dtype) -> np.ndarray:
        found = [source.read(np.dtype(np.float32)) for source in self.sources]
        return np.ascontiguousarray(self.make(*found).astype(dtype))


def tensors(file: GGUFFile, projector: Projector) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors with what the converter changed undone, and the table of their names, see ``VisionFamily.tensors``.

    Raises:
        CheckpointError: heads cannot have halves.
    """
    found: dict[str, StoredTensor] = {}
    heads = Keys(file, 1).integer("attention.head_count")
    names = {**NAMES, **projector.names}
    taps: dict[str, None] = dict.fromkeys(each[1] for name in file.tensors if (each := TAP.match(name)))
    exchanged = _exchanged(file)
    for name, tensor in file.tensors.items():
        if name == SECOND_FRAME or name in projector.unused:
            continue
        made: StoredTensor = tensor
        if name == FIRST_FRAME and SECOND_FRAME in file.tensors:
            out, channels, *sides = tensor.shape
            both = (tensor, file.tensors[SECOND_FRAME])
            made = Made(name, both, (out, channels, 2, *sides), lambda *frames: np.stack(frames, axis=2))
        own = names.get(NUMBER.sub("*", name)) or names.get(NUMBER.sub("*", name.rpartition(".")[0]), "")
        if f"{own}.{name.rpartition('.')[2]}" in projector.plus_one:
            made = Made(name, (tensor,), tensor.shape, lambda values: values - np.float32(1))
        if (rows := _rows(name, tensor, projector, heads, file)) is not None:
            made = Made(name, (tensor,), tensor.shape, lambda values, rows=rows: values[rows])
        if exchanged and (fed := FED.match(name)) is not None:
            other = {"up": "down", "down": "up"}[fed[2]]
            names[name] = f"layers.{fed[1]}.mlp.{other}_proj.{fed[3]}"
        if (tap := TAP.match(name)) is not None:
            step = {"norm": "step1", "fc1": "step2", "fc2": "step3"}.get(tap[2])
            if step is not None:
                names[name] = f"taps.{list(taps).index(tap[1])}.{step}.{tap[3]}"
        found[name] = made
    return found, names


def _rows(name: str, tensor: StoredTensor, projector: Projector, heads: int, file: GGUFFile) -> np.ndarray | None:
    """The stored rows of a matrix or bias of queries and keys, maybe with values after them; None: all in order."""
    try:
        if projector.halves and QUERIES.search(name) and name.endswith(".weight"):
            return halves_apart(tensor.shape[0], heads)
        if projector.axes and QUERIES.search(name):
            return axes_in_turn(tensor.shape[0], heads)
        if projector.axes and ".attn_qkv." in name:
            size = tensor.shape[0] // 3
            own = axes_in_turn(size, heads)
            return np.concatenate([own, size + own, np.arange(2 * size, tensor.shape[0])])
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {name!r} {error}") from None
    return None


def _exchanged(file: GGUFFile) -> bool:
    """Whether the matrices of a feed-forward part have each other's names, as older converters wrote them."""
    size, down = Keys(file, 1).integer("embedding_length"), file.tensors.get("v.blk.0.ffn_down.weight")
    return down is not None and down.shape[0] != size == down.shape[-1]


QUERIES = re.compile(r"\.attn_[qk]\.\w+$")
FED = re.compile(r"v\.blk\.(\d+)\.ffn_(up|down)\.(\w+)$")
FIRST_FRAME, SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
TAP = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(\w+)$")
