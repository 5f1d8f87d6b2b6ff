"""Which layers of a model are quantized how when it is written as safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.checkpoint.experts import with_separate_experts
from llmjax.checkpoint.formats.layer_writer import LayerWriter, Part, SavedScheme
from llmjax.checkpoint.formats.registry import WRITERS
from llmjax.checkpoint.safetensors import DTYPES, TensorSpec
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import tensor_names
from llmjax.quantization.mixes import KEEP, NEVER
from llmjax.quantization.schemes import SchemeRules, scheme_key
from llmjax.weights.rows import FLOATS
from llmjax.weights.uniform import SAVED_SCHEMES, UNIT, IntegerScheme

EMBEDDING = re.compile(r"(^|\.)embed_tokens\.weight$")  # no format has quantized embeddings
HEAD = "lm_head"
MODEL_DTYPES: Mapping[str, np.dtype] = MappingProxyType({dtype.name: dtype for dtype in FLOATS.values()})
"""By what config.json calls them."""


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What is written.

    Attributes:
        checkpoint: the source.
        writer: how quantized layers are stored.
        layers: their schemes by tensor name, in order.
        ignored: linear modules that stay plain.
    """

    checkpoint: Checkpoint
    writer: LayerWriter
    layers: Mapping[str, SavedScheme]
    ignored: tuple[str, ...]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        scheme: str,
        *,
        rules: Mapping[str, str] | None = None,
        form: str = "compressed-tensors",
        group_size: int | None = None,
    ) -> SavePlan:
        """Decides for every tensor, before anything is read or written.

        Embeddings, norms and routers of experts are never quantized, the head only by a rule.

        Args:
            checkpoint: the source.
            scheme: a key of SAVED_SCHEMES.
            rules: regular expressions on tensor names with schemes or ``none``; the first that matches decides.
            form: a key of WRITERS.
            group_size: columns that share a scale, instead of the scheme's; 0: all.

        Raises:
            ConfigError: a name is unknown, or the format cannot hold what is asked for; names the tensor.
            CheckpointError: there is nothing to quantize.
        """
        if form not in WRITERS:
            raise ConfigError(f"--format {form!r} is unknown; known are {', '.join(WRITERS)}")
        writer = WRITERS[form]
        if tensor_names(checkpoint.config) is not None:
            raise CheckpointError(
                f"{checkpoint.path}: cannot be written as safetensors: its family's files name or fuse tensors "
                "in a way that is read and not written"
            )
        dtype = model_dtype(checkpoint.config)
        default = _grouped(SAVED_SCHEMES[scheme_key(scheme, SAVED_SCHEMES)], group_size)
        parsed = SchemeRules.parse(rules or {}, (*SAVED_SCHEMES, KEEP))
        layers: dict[str, SavedScheme] = {}
        ignored = []
        for name, tensor in _published(checkpoint).items():
            if not _is_linear(name, tensor):
                continue
            rule = None if NEVER.search(name) else parsed.find(name)
            module = name.removesuffix(".weight")
            if rule == KEEP or NEVER.search(name) or (rule is None and module == HEAD):
                ignored.append(module)
                continue
            layers[name] = writer.kept(default if rule is None else SAVED_SCHEMES[rule], dtype)
            _parts(writer, layers[name], tensor)
        if not layers:
            raise CheckpointError(f"{checkpoint.path}: has no linear layer that would be quantized")
        if HEAD not in ignored and f"{HEAD}.weight" not in layers:
            ignored.append(HEAD)  # tied: engines have the module all the same
        plan = cls(checkpoint, writer, MappingProxyType(layers), tuple(ignored))
        plan.settings()
        return plan

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The source's tensors as they are published, experts one by one."""
        return _published(self.checkpoint)

    def settings(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        modules = {name.removesuffix(".weight"): scheme for name, scheme in self.layers.items()}
        return self.writer.settings(modules, self.ignored)

    def parts(self, name: str) -> dict[str, Part]:
        """The tensors, by name, that a quantized one is stored in."""
        module = name.removesuffix(".weight")
        found = _parts(self.writer, self.layers[name], self.tensors[name])
        return {module + ending: part for ending, part in found.items()}

    def plain_dtype(self, name: str) -> np.dtype:
        """The type that a tensor is written in if it is not quantized: as stored if it is plain, else the model's."""
        stored = DTYPES.get(self.tensors[name].type_name)
        if stored is None:
            return model_dtype(self.checkpoint.config)
        return np.dtype(np.float32) if stored == np.float64 else stored

    def specs(self) -> list[TensorSpec]:
        """Every tensor of the files."""
        specs = []
        for name, tensor in self.tensors.items():
            if name in self.layers:
                specs += [TensorSpec(part_name, part.shape, part.dtype) for part_name, part in self.parts(name).items()]
            else:
                specs.append(TensorSpec(name, tuple(tensor.shape), self.plain_dtype(name)))
        return specs


def _published(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    mixtral = checkpoint.config.get("model_type") == "mixtral"
    return MappingProxyType(with_separate_experts(checkpoint.tensors, mixtral=mixtral))


def model_dtype(config: Mapping[str, Any]) -> np.dtype:
    """The type that a model's config.json says its weights have; bfloat16 if it does not."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return MODEL_DTYPES.get(name, FLOATS["bf16"])


def _is_linear(name: str, tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and 0 not in tensor.shape and name.endswith(".weight") and not EMBEDDING.search(name)


def _grouped(scheme: SavedScheme, group_size: int | None) -> SavedScheme:
    if group_size is None:
        return scheme
    if not isinstance(scheme, IntegerScheme):
        raise ConfigError(f"--group-size does not go with {scheme.name}, which has one scale for each row or tensor")
    if group_size < 0 or group_size % UNIT:
        raise ConfigError(f"--group-size must be a multiple of {UNIT}, or 0 for whole rows, not {group_size}")
    return replace(scheme, group_size=group_size)


def _parts(writer: LayerWriter, scheme: SavedScheme, tensor: StoredTensor) -> Mapping[str, Part]:
    try:
        return writer.parts(scheme, (tensor.shape[0], tensor.shape[1]))
    except ConfigError as error:
        raise ConfigError(f"tensor {tensor.name!r}: {error}") from None
