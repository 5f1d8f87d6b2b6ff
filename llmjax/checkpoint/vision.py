"""The tensors of an encoder of pictures in a checkpoint, by the encoder's own names and in its shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from llmjax.checkpoint.rows import RowsOf
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.names import NUMBER
from llmjax.models.vision.spec import TokenVectors, VisionSpec

T = TypeVar("T", bound=StoredTensor)

CHANNELS_LAST = ".HWC"
"""The ending of names in a family's table whose matrices take a patch's values with its channels last."""
CLASS_LAST = ".LAST"
"""The ending of names whose tables have the vector of the class token after those of cells."""
TRANSPOSED = ".T"
"""The ending of names in a family's table whose matrices are [in, out] in files."""


ADAPTED = re.compile(r"\.lora_[AB]\.(?P<name>\w+)\.weight$")
"""The ending of names of an adapter's tensors where PEFT has it in its model."""
BASE = ".base_layer."
"""What PEFT puts into the names of a model's own tensors then."""
TABLE = re.compile(r"\.TABLE(\d+)$")
"""The ending of names of matrices whose columns are rows of a table in files, but for as many of its last rows, each of
which is a learned one of the encoder's."""


TOKENS = "tokens"
"""The name of a table of vectors of tokens of pictures, see ``VisionSpec.tokens``."""
NEW_TOKENS = "model.transformer.wte.new_embedding"
"""Its name in files."""
EMBEDDING = re.compile(r"(^|\.)(embed_tokens\.weight|wte\.embedding)$")


@dataclass(frozen=True, eq=False)
class Reshaped(Derived):
    """A tensor whose numbers are put otherwise, or added.

    Attributes:
        made: the shape of the result.
        change: makes it, of f32 and in f32.
    """

    made: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.made

    def read(self, dtype: np.dtype) -> np.ndarray:
        (source,) = self.sources
        return np.ascontiguousarray(self.change(source.read(np.dtype(np.float32))).astype(dtype))


@dataclass(frozen=True, eq=False)
class Together(Derived):
    """Some of the rows of several tables that follow one another.

    Attributes:
        start, end: which.
    """

    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.start, *self.sources[0].shape[1:])

    def read(self, dtype: np.dtype) -> np.ndarray:
        return np.concatenate([source.read(dtype) for source in self.sources])[self.start : self.end]


def with_tokens_apart(tensors: Mapping[str, T], spec: VisionSpec) -> dict[str, T]:
    """A checkpoint's tensors with those vectors of the embedding apart that are the encoder's.

    Some files have all in one table, and those that transformers writes in two halves.

    Args:
        tensors: by their names in files.
    """
    found = dict(tensors)
    name = next((name for name in tensors if spec.tokens is not None and EMBEDDING.search(name)), None)
    if spec.tokens is None or name is None or tensors[name].shape[0] == spec.tokens.first:
        return found
    tables = (tensors[name], *(tensors[NEW_TOKENS],) * (NEW_TOKENS in tensors))
    total = sum(table.shape[0] for table in tables)
    # No stack of matrices, which nobody takes a table for.
    found[name] = cast("T", Together(name, tables, 0, spec.tokens.first))
    found[NEW_TOKENS] = cast("T", Together(NEW_TOKENS, tables, spec.tokens.first, total))
    return found


def vision_tensors(
    tensors: Mapping[str, T], spec: VisionSpec, names: Mapping[str, str], path: Path
) -> tuple[dict[str, StoredTensor], dict[str, T]]:
    """Divides a checkpoint's tensors.

    Args:
        tensors: by their names in files.
        spec: the encoder, which may have fewer layers than the files.
        names: see ``VisionFamily.tensors``.

    Returns:
        The encoder's tensors by its names, and all others by theirs.

    Raises:
        CheckpointError: two tensors have one name, or a shape that cannot be the encoder's.
    """
    found: dict[str, StoredTensor] = {}
    others: dict[str, T] = {}
    for stored, tensor in tensors.items():
        own = _own_name(stored.removeprefix("model."), names)
        if own is None:
            others[stored] = tensor
            continue
        if _unused(own, spec):
            continue
        for name, part in _of_tokens(tensor, spec.tokens, path) if own == TOKENS else _parts(own, tensor, path):
            if name in found:
                raise CheckpointError(f"{path}: tensor {name!r} is there twice, once as {stored!r}")
            found[name] = part
    return found, others


def without_adapters(tensors: Mapping[str, T], name: str) -> tuple[dict[str, T], dict[str, T]]:
    """Divides the tensors of a model in which PEFT has adapters.

    Args:
        name: the name of the adapter that is read; others are left out.

    Returns:
        The model's own tensors, and the adapter's, by the names that they have in files of their own.
    """
    own: dict[str, T] = {}
    adapter: dict[str, T] = {}
    for stored, tensor in tensors.items():
        if (found := ADAPTED.search(stored)) is None:
            own[stored.replace(BASE, ".")] = tensor
        elif found["name"] == name:
            adapter[f"{stored[: found.start('name') - 1]}.weight"] = tensor
    return own, adapter


def _unused(name: str, spec: VisionSpec) -> bool:
    """Whether an encoder that was trained for more is read without a tensor."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return int(rest.partition(".")[0]) >= len(spec.layers)
    return first == "norm_after" and spec.norm_after is None


def _own_name(stored: str, names: Mapping[str, str]) -> str | None:
    """The encoder's name of a tensor; None: it is not one of its own."""
    numbers = NUMBER.findall(stored)
    module, _, suffix = NUMBER.sub("*", stored).rpartition(".")
    exact, moved = names.get(stored), names.get(stored.rpartition(".")[0])
    if exact is not None or moved is not None:
        return exact if exact is not None else f"{moved}.{suffix}"
    known = names.get(f"{module}.{suffix}")
    if known is None and (known := names.get(module)) is not None:
        known = f"{known}.{suffix}"
    if known is None:
        return None
    for number in numbers[: known.count("*")]:
        known = known.replace("*", number, 1)
    return known


def _parts(name: str, tensor: StoredTensor, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The encoder's tensors that a stored one is: one, unless queries, keys and values are together."""
    shape = tensor.shape
    module, _, suffix = name.rpartition(".")
    if module.endswith(".qkv_proj"):
        if shape[0] % 3:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} has {shape[0]} rows, not queries, keys and values")
        for part, rows in zip("qkv", np.split(np.arange(shape[0]), 3), strict=True):
            own = f"{module.removesuffix('qkv_proj')}{part}_proj.{suffix}"
            yield own, RowsOf(own, (tensor,), rows)
        return
    if (table := TABLE.search(name)) is not None:
        yield from _of_table(name[: table.start()], tensor, int(table[1]), path)
        return
    change: Callable[[np.ndarray], Any] | None = None
    made = shape
    if name.endswith(TRANSPOSED):
        name, made, change = name.removesuffix(TRANSPOSED), shape[::-1], np.transpose
    elif name.endswith(CHANNELS_LAST):
        if len(shape) != 2 or shape[1] % 3:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} has the shape {shape}, not [size, 3 * patch²]")
        name = name.removesuffix(CHANNELS_LAST)
        change = lambda x: x.reshape(len(x), -1, 3).swapaxes(1, 2).reshape(len(x), -1)  # noqa: E731
    elif name.endswith(CLASS_LAST):
        name, change = name.removesuffix(CLASS_LAST), lambda x: np.roll(x, 1, axis=0)
    elif name == "positions" and len(shape) == 3:
        made, change = (math.prod(shape[:-1]), shape[-1]), lambda x: x.reshape(-1, x.shape[-1])
    elif len(shape) in (4, 5) and shape[0] > 1:
        made, change = (shape[0], math.prod(shape[1:])), lambda x: x.reshape(len(x), -1)
    elif len(shape) >= 3 or shape[:1] == (1,):
        made = tuple(size for size in shape if size != 1)
        change = np.squeeze
    yield name, tensor if change is None else Reshaped(name, (tensor,), made, change)


def _of_tokens(tensor: StoredTensor, tokens: TokenVectors | None, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The learned rows and the added one that some rows of a table are, see `TOKENS`."""
    assert tokens is not None
    names = {f"learned.{number}": token for number, token in enumerate(tokens.learned)} | {"added": tokens.added}
    for name, token in names.items():
        row = token - tokens.first
        if not 0 <= row < tensor.shape[0]:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} has no vector of the token {token}")
        yield name, Reshaped(name, (tensor,), tensor.shape[1:], lambda x, row=row: x[row])  # type: ignore[misc]


def _of_table(name: str, tensor: StoredTensor, learned: int, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The matrix and the learned rows that a table's rows are, see `TABLE`."""
    shape = tensor.shape
    if len(shape) != 2 or shape[0] <= learned:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has the shape {shape}, not more than {learned} rows")
    rows = shape[0] - learned
    yield name, Reshaped(name, (tensor,), (shape[1], rows), lambda x: x[:rows].T)
    for number in range(learned):
        own = f"learned.{number}"
        yield own, Reshaped(own, (tensor,), shape[1:], lambda x, row=rows + number: x[row])  # type: ignore[misc]
