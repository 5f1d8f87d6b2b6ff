"""A model on disk, whatever its format: a config, and named tensors that are read one at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax import models
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.files import read_object
from llmjax.checkpoint.formats.registry import plain_tensors, stored_method
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.model import hf_config, hf_generation_config, hf_joined_tensors, hf_tensors
from llmjax.checkpoint.model_names import UnitRows, with_model_names
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened model.

    Attributes:
        path: folder or .gguf file.
        config: content of config.json; made up from the metadata for GGUF.
        generation_config: content of generation_config.json, or empty.
        tensors: by Hugging Face name; those of quantized checkpoints too, see docs/formats.md. Experts are stacked.
        gguf: the container, for its tokenizer; None for a folder.
        quantization: ``gguf``, or the ``quant_method`` of a quantized folder; else empty.
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
        model = _model_config(self.config, self.path, max_model_len=max_model_len)
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
    if "architectures" in (overrides or {}):
        logger.warning("%s is read as %s, as hf_overrides has it", path, (overrides or {})["architectures"])
    return _open_folder(path, overrides or {}) if path.is_dir() else _open_gguf(path, overrides or {})


def _open_gguf(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    gguf = GGUFFile.open(path)
    config = hf_config(gguf)
    stacked = with_stacked_experts(hf_tensors(gguf, config), path)
    tensors = _with_unit_head(stacked | hf_joined_tensors(gguf, config), config)
    config = {**config, **overrides}
    return Checkpoint(path, config, hf_generation_config(gguf), MappingProxyType(tensors), gguf, "gguf")


def _open_folder(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    written = read_object(path / CONFIG)
    if (text := models.text_config(written)) is not None:
        logger.warning("%s: the text model alone is read; images are not supported", path)
    config = {**(written if text is None else text), **overrides}
    generation = path / GENERATION_CONFIG
    generation_config = read_object(generation) if generation.exists() else {}
    plain = plain_tensors(stored_tensors(path), config, path)
    if text is not None:
        plain = {models.text_name(name): tensor for name, tensor in plain.items()}
    tensors = with_stacked_experts(plain, path)
    if (names := models.tensor_names(config)) is not None:
        tensors = with_model_names(tensors, names, _model_config(config, path), path)
    tensors, quantization = _with_unit_head(tensors, config), stored_method(config, path)
    return Checkpoint(path, config, generation_config, MappingProxyType(tensors), quantization=quantization)


def _with_unit_head(tensors: dict[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    if HEAD not in tensors or not models.has_unit_head(config):
        return tensors
    return {**tensors, HEAD: UnitRows(tensors[HEAD])}


def _model_config(config: Mapping[str, Any], path: Path, *, max_model_len: int | None = None) -> ModelConfig:
    try:
        return models.model_config(config, max_model_len=max_model_len)
    except UnsupportedModel as error:
        raise CheckpointError(f"{path}: {error}") from error
