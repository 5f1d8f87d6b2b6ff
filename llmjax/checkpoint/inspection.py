"""Describes a model's files without reading weights, also for models that cannot be run, as far as the files tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmjax.checkpoint import mistral_layout
from llmjax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.formats.registry import quantization_settings
from llmjax.checkpoint.gguf.file import SPLIT_NAME, GGUFFile
from llmjax.checkpoint.gguf.names import FILE_TYPES, KEYS
from llmjax.checkpoint.mistral_layout import config_in, is_native
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError
from llmjax.models.config import ModelConfig

NO_PARAMETERS = frozenset({"I64", "I32", "I16", "U64", "U32", "U16", "U8", "BOOL"})
"""Stored types of indices, flags and packed codes, whose elements are not parameters."""


class AnyTensor(Protocol):
    """The interface of all formats' tensors before they are read."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def type_name(self) -> str: ...


@dataclass(frozen=True)
class StoredType:
    """All tensors of one stored type."""

    name: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """An opened model.

    Attributes:
        path: folder or .gguf file.
        container: kind of file, and how many.
        architecture: as the files call it.
        problem: why it cannot be run; None: it can.
        config: content of config.json, or what a GGUF file says under names of config.json.
        tensors: by name; under Hugging Face's, and quantized layers as one tensor, where the format is understood.
        checkpoint: None if it cannot be opened.
        model: None if it cannot be run.
        gguf: the container; None for a folder.
    """

    path: Path
    container: str
    architecture: str
    problem: str | None
    config: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]
    checkpoint: Checkpoint | None
    model: ModelConfig | None
    gguf: GGUFFile | None

    @property
    def parameters(self) -> int:
        return sum(kind.parameters for kind in self.types)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def types(self) -> list[StoredType]:
        """By size, the largest first."""
        count, parameters, nbytes = Counter[str](), Counter[str](), Counter[str]()
        for tensor in self.tensors.values():
            count[tensor.type_name] += 1
            nbytes[tensor.type_name] += tensor.nbytes
            parameters[tensor.type_name] += 0 if tensor.type_name in NO_PARAMETERS else prod(tensor.shape)
        return [StoredType(name, count[name], parameters[name], size) for name, size in nbytes.most_common()]

    def setting(self, key: str) -> Any:
        """A key of the config, or of its text model's part in models that also see or hear; None: not there."""
        text = self.config.get("text_config")
        inner = text.get(key) if isinstance(text, dict) else None
        return self.config.get(key) if inner is None else inner

    def quantization(self) -> dict[str, Any] | None:
        """Method and settings of the quantization that the files declare; None: none.

        Raises:
            CheckpointError: a file with settings is malformed.
        """
        if self.gguf is None:
            found = quantization_settings(self.config, self.path)
            return None if found is None else {"declared_in": found.where, **found.values}
        number = self.gguf.metadata.get("general.file_type")
        if type(number) is not int:
            return None
        name = FILE_TYPES.get(number, f"file type {number}")
        extra = {
            key: value
            for key, value in self.gguf.metadata.items()
            if key.startswith("quantize.") or key == "general.quantization_version"
        }
        return {"quant_method": f"GGUF {name}", **extra}


def inspect_model(
    path: Path, *, overrides: Mapping[str, Any] | None = None, max_model_len: int | None = None
) -> Inspection:
    """Opens a model; what is wrong with it beyond its containers becomes ``problem``.

    Args:
        path: folder in Hugging Face's layout, or a .gguf file.
        overrides: keys of config.json to replace or add.
        max_model_len: as in ``llmjax.models.model_config``.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    try:
        checkpoint = open_checkpoint(path, overrides=overrides)
    except CheckpointError as error:
        return _unopened(path, overrides or {}, str(error))
    model, problem = None, None
    try:
        model = checkpoint.model_config(max_model_len=max_model_len)
    except CheckpointError as error:
        problem = str(error)
    return Inspection(
        path=path,
        container=_container(path, checkpoint.gguf),
        architecture=model.architecture if model is not None else _architecture(checkpoint.config),
        problem=problem,
        config=checkpoint.config,
        tensors=checkpoint.tensors,
        checkpoint=checkpoint,
        model=model,
        gguf=checkpoint.gguf,
    )


def _tensors_in(folder: Path) -> Mapping[str, AnyTensor]:
    return stored_tensors(folder, weights=mistral_layout.WEIGHTS) if is_native(folder) else stored_tensors(folder)


def _unopened(path: Path, overrides: Mapping[str, Any], problem: str) -> Inspection:
    """Describes a container with content that is not understood; raises if it cannot be read either."""
    gguf = None if path.is_dir() else GGUFFile.open(path)
    config = _gguf_config(gguf) if gguf is not None else config_in(path)
    config = {**config, **overrides}
    tensors: Mapping[str, AnyTensor] = gguf.tensors if gguf is not None else _tensors_in(path)
    return Inspection(
        path=path,
        container=_container(path, gguf),
        architecture=_architecture(config),
        problem=problem,
        config=config,
        tensors=tensors,
        checkpoint=None,
        model=None,
        gguf=gguf,
    )


def _gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    architecture = gguf.metadata.get("general.architecture")
    found = {"model_type": architecture}
    for key, name in KEYS.items():
        value = gguf.metadata.get(f"{architecture}.{key}")
        if value is not None:
            found[name] = value.tolist() if isinstance(value, np.ndarray) else value
    layers, further = found.get("num_hidden_layers"), gguf.metadata.get(f"{architecture}.nextn_predict_layers")
    if isinstance(layers, int) and isinstance(further, int):  # the last ones guess further tokens
        found["num_hidden_layers"] = layers - further
    return found


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or config.get("model_type") or "unknown"
    return str(named[0] if isinstance(named, list) else named)


def _container(path: Path, gguf: GGUFFile | None) -> str:
    if gguf is None:
        files = len(list(path.glob("*.safetensors")))
        return f"safetensors, {files} file{'s' if files > 1 else ''}"
    split = SPLIT_NAME.fullmatch(gguf.path.name)
    return f"GGUF version {gguf.version}" + (f", {int(split['count'])} parts" if split else "")
