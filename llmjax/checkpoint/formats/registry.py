"""Every format of quantized safetensors files: which one a folder is in, and its tensors under their plain names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.files import read_object
from llmjax.checkpoint.formats import awq, gptq, modelopt, scaled
from llmjax.checkpoint.formats.awq import AWQ, AWQWriter
from llmjax.checkpoint.formats.bitnet import BitNet
from llmjax.checkpoint.formats.bitsandbytes import BitsAndBytes
from llmjax.checkpoint.formats.compressed_tensors import CompressedTensors, CompressedTensorsWriter
from llmjax.checkpoint.formats.enflame import W8A8, W8A16, Repacked, is_repacked
from llmjax.checkpoint.formats.fp4 import MXFP4
from llmjax.checkpoint.formats.gptq import GPTQ, GPTQWriter, Marlin
from llmjax.checkpoint.formats.modelopt import ModelOpt
from llmjax.checkpoint.formats.quantized import (
    LayerReader,
    LayerWriter,
    QuantizedTensor,
    QuantSettings,
    quantized_tensors,
)
from llmjax.checkpoint.formats.scaled import FP8, SmoothQuant
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.errors import CheckpointError

logger = logging.getLogger(__name__)

CONFIG_KEYS = ("quantization_config", "compression_config")
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def _gptq(settings: QuantSettings) -> LayerReader:
    repacked = settings.text("checkpoint_format", "gptq") == "marlin" or settings.flag("is_marlin_format", False)
    return Marlin.from_settings(settings) if repacked else GPTQ.from_settings(settings)


READERS: Mapping[str, Callable[[QuantSettings], LayerReader]] = MappingProxyType(
    {
        "gptq": _gptq,
        "marlin": Marlin.from_settings,
        "awq": AWQ.from_settings,
        "compressed-tensors": CompressedTensors.from_settings,
        "fp8": FP8.from_settings,
        "fbgemm_fp8": FP8.from_settings,
        "bitnet": BitNet.from_settings,
        "bitsandbytes": BitsAndBytes.from_settings,
        "mxfp4": MXFP4.from_settings,
        "smoothquant": SmoothQuant.from_settings,
        "modelopt": ModelOpt.from_settings,
        "modelopt_fp4": ModelOpt.from_settings,
        "w8a16": W8A16.from_settings,
        "w8a8": W8A8.from_settings,
    }
)
"""Readers of checkpoints by ``quant_method``; each is made from the settings."""

WRITERS: Mapping[str, LayerWriter] = MappingProxyType(
    {writer.name: writer for writer in (CompressedTensorsWriter(), GPTQWriter(), AWQWriter())}
)
"""Writers by ``quant_method``, which is also the name that users type."""

DENSE = "dense"  # compressed-tensors' format of weights that are not quantized, only caches or activations

REPACKABLE = frozenset({"gptq", "awq", "w8a16"})
"""The values of ``quant_method`` in checkpoints that Enflame's script may have repacked."""

KERNELS = frozenset({"gptq_marlin", "awq_marlin", "gptq_marlin_24"})
"""Names of vLLM's kernels, which keep weights in layouts that no published checkpoint has."""

METHOD_BY_KEYS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "awq": awq.looks_like,
        "gptq": gptq.looks_like,
        "smoothquant": scaled.looks_like_smoothquant,
        "modelopt": modelopt.looks_like,
    }
)
"""Checks that recognize the settings of tools that write no ``quant_method``."""

TELLING = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".SCB",
    ".weight.absmax",
    ".dequant_scale",
    ".out_scales",
)
"""Endings of names that only quantized checkpoints have."""


def plain_tensors(
    stored: Mapping[str, SafetensorsTensor], config: Mapping[str, Any], folder: Path
) -> Mapping[str, SafetensorsTensor | QuantizedTensor]:
    """The tensors of a checkpoint as if it were not quantized; nothing is dequantized before it is read.

    Args:
        stored: what is in the safetensors files.
        config: content of config.json.
        folder: where quantize_config.json or quant_config.json may lie.

    Raises:
        CheckpointError: the format is unknown or unsupported, or the tensors are not what it says.
    """
    settings = quantization_settings(config, folder)
    if settings is None or settings.value("format") == DENSE:
        for name in stored:
            if name.endswith(TELLING):
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is part of a quantized layer, but config.json has no "
                    f"quantization_config and there is no {' or '.join(FILES)}"
                )
        return stored
    method = _method(settings)
    if method in REPACKABLE and is_repacked(stored):
        how: LayerReader = Repacked.from_settings(settings, stored)
    else:
        how = READERS[method](settings)
    tensors = quantized_tensors(stored, how, folder)
    if _rounds_activations(how, settings):
        logger.info(
            "%s: its makers round activations of %s layers with scales of their own, which are not used; "
            "products round them as the setting `activations` says",
            folder,
            how.name,
        )
    return tensors


def stored_method(config: Mapping[str, Any], folder: Path) -> str:
    """The ``quant_method`` of a folder, whichever file's settings say so; empty: it is not quantized.

    Args:
        config, folder: see `quantization_settings`.

    Raises:
        CheckpointError: the format is unknown, or a file with settings malformed.
    """
    settings = quantization_settings(config, folder)
    return "" if settings is None or settings.value("format") == DENSE else _method(settings)


def quantization_settings(config: Mapping[str, Any], folder: Path) -> QuantSettings | None:
    """The settings that say how a folder's weights are quantized; None: there are none.

    Args:
        config: content of config.json.
        folder: where quantize_config.json or quant_config.json may lie.

    Raises:
        CheckpointError: a file with settings is malformed.
    """
    whole = QuantSettings(f"{folder / 'config.json'}", config)
    for key in CONFIG_KEYS:
        found = whole.child(key)
        if found is not None and found.values:
            return found
    for file in FILES:
        path = folder / file
        if path.exists():
            return QuantSettings(str(path), read_object(path))
    return None


def _method(settings: QuantSettings) -> str:
    if settings.value("quant_method") is None:
        for method, fits in METHOD_BY_KEYS.items():
            if fits(settings.values):
                return method
    method = settings.text("quant_method")
    if method in KERNELS:
        settings.fail(
            f"is {method!r}: weights that vLLM repacked for its Marlin kernel; "
            "load the GPTQ or AWQ checkpoint that they were made from",
            "quant_method",
        )
    if method not in READERS:
        settings.fail(f"is {method[:60]!r}; supported are {', '.join(READERS)}", "quant_method")
    return method


def _rounds_activations(how: LayerReader, settings: QuantSettings) -> bool:
    """Whether the makers of the checkpoint meant activations to be quantized too."""
    if isinstance(how, CompressedTensors):
        groups = settings.value("config_groups")
        return any(isinstance(group, dict) and group.get("input_activations") for group in groups.values())
    return isinstance(how, FP8 | SmoothQuant | ModelOpt | W8A8 | BitNet)
