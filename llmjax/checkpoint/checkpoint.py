"""A model on disk, whatever its format: a config, and named tensors that are read one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax import models
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.formats.registry import plain_tensors, stored_method
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.model import hf_config, hf_generation_config, hf_tensors
from llmjax.checkpoint.safetensors import SafetensorsTensor, open_safetensors
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened model.

    Attributes:
        path: folder or .gguf file.
        config: content of config.json; made up from the metadata for GGUF.
        generation_config: content of generation_config.json, or empty.
        tensors: by Hugging Face name; those of quantised checkpoints too, see docs/formats.md. Experts are stacked.
        gguf: the container, for its tokenizer; None for a folder.
        quantization: ``gguf``, or the ``quant_method`` of a quantised folder; else empty.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    gguf: GGUFFile | None = None
    quantization: str = ""

    def model_config(self, *, max_model_len: int | None = None) -> ModelConfig:
        """What the config and the tensors together say the model is.

        Args:
            max_model_len: as in ``llmjax.models.model_config``.

        Raises:
            CheckpointError: the model is not supported, or has no output weights although its embedding is not tied.
        """
        try:
            model = models.model_config(self.config, max_model_len=max_model_len)
        except UnsupportedModel as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        if not model.tie_word_embeddings and HEAD not in self.tensors:
            raise CheckpointError(
                f"{self.path}: tensor {HEAD} is missing, and tie_word_embeddings is false; "
                'if the embedding is the head too, set hf_overrides to {"tie_word_embeddings": true}'
            )
        return model


def open_checkpoint(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a model without reading its weights.

    Args:
        path: folder in Hugging Face's layout (config.json and model.safetensors or its index), or a .gguf file
            (of a split one, any part).
        overrides: keys of config.json to replace or add, with their values.

    Raises:
        CheckpointError: something is missing, malformed or of an unknown architecture.
    """
    path = Path(path)
    return _open_folder(path, overrides or {}) if path.is_dir() else _open_gguf(path, overrides or {})


def _open_gguf(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    gguf = GGUFFile.open(path)
    config = hf_config(gguf)
    tensors = MappingProxyType(with_stacked_experts(hf_tensors(gguf, config), path))
    return Checkpoint(path, {**config, **overrides}, hf_generation_config(gguf), tensors, gguf, "gguf")


def _open_folder(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    config = {**read_json(path / CONFIG), **overrides}
    generation = path / GENERATION_CONFIG
    generation_config = read_json(generation) if generation.exists() else {}
    plain = plain_tensors(stored_tensors(path), config, path)
    tensors = MappingProxyType(with_stacked_experts(plain, path))
    return Checkpoint(path, config, generation_config, tensors, quantization=stored_method(config, path))


def stored_tensors(path: Path) -> dict[str, SafetensorsTensor]:
    """What a folder's safetensors files hold, as it is stored.

    Raises:
        CheckpointError: there is no such file, or one is missing or malformed.
    """
    if (path / WEIGHTS).exists():
        return open_safetensors(path / WEIGHTS)
    if (path / INDEX).exists():
        return _open_shards(path)
    raise CheckpointError(f"{path}: has neither {WEIGHTS} nor {INDEX}; other weight files are not read")


def _open_shards(path: Path) -> dict[str, SafetensorsTensor]:
    """Every tensor of every file that the index names; where two files have it, the one that the index says."""
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(f"{path / INDEX}: tensor {name!r} is said to be in {file!r}, which is no file name")
        if file not in shards:
            if not (path / file).exists():
                raise CheckpointError(f"{path / file}: is missing, but {INDEX} names it")
            shards[file] = open_safetensors(path / file)
        if name not in shards[file]:
            raise CheckpointError(f"{path / file}: has no tensor {name!r}, but {INDEX} says so")
        tensors[name] = shards[file][name]
    for shard in shards.values():
        for name, tensor in shard.items():
            tensors.setdefault(name, tensor)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return content
