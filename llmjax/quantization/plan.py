"""Decides how each weight is quantized, for a model that is loaded and for one that is written as safetensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.checkpoint.experts import expert_name, with_separate_experts
from llmjax.checkpoint.safetensors import DTYPES, TensorSpec
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import ModelConfig, tensor_names
from llmjax.models.names import Names
from llmjax.quantization import mixes
from llmjax.quantization.mixes import KEEP, NEVER, ModelShape
from llmjax.quantization.rounding import rows_in_situ
from llmjax.quantization.schemes import SCHEMES, SchemeRules, scheme_key, scheme_named
from llmjax.weights import uniform
from llmjax.weights.packing import RowSource, RowStack
from llmjax.weights.rows import FLOATS
from llmjax.weights.uniform import SAVED_SCHEMES, UNIT, IntegerScheme

if TYPE_CHECKING:
    from llmjax.checkpoint.formats.quantized import LayerWriter, Part, SavedScheme

STORED_AS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "gptq": frozenset({"gptq"}),
        "gptq_marlin": frozenset({"gptq"}),
        "marlin": frozenset({"marlin", "gptq"}),
        "awq": frozenset({"awq"}),
        "awq_marlin": frozenset({"awq"}),
        "compressed-tensors": frozenset({"compressed-tensors"}),
        "fp8": frozenset({"fp8", "fbgemm_fp8"}),
        "fbgemm_fp8": frozenset({"fbgemm_fp8"}),
        "bitsandbytes": frozenset({"bitsandbytes"}),
        "mxfp4": frozenset({"mxfp4"}),
        "smoothquant": frozenset({"smoothquant"}),
        "modelopt": frozenset({"modelopt"}),
        "modelopt_fp4": frozenset({"modelopt_fp4", "modelopt"}),
        "gguf": frozenset({"gguf"}),
    }
)
"""vLLM's names of checkpoint formats, each with the values of `Checkpoint.quantization` that it allows."""

PLAIN = "none"  # dequantized to the model's dtype
STORED = "stored"  # as in the checkpoint
AT_EIGHT_BITS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
"""Tensors that schemes without a mix keep at 8 bits: every token uses both."""
EMBEDDING = re.compile(r"(^|\.)embed_(?:tokens|positions|types)\.weight$")  # no format quantizes embeddings
HEAD = "lm_head"
MODEL_DTYPES: Mapping[str, np.dtype] = MappingProxyType({dtype.name: dtype for dtype in FLOATS.values()})
"""Types of weights by their names in config.json."""


@dataclass(frozen=True)
class Kept:
    """The form in which a weight is kept in memory.

    Attributes:
        source: its codes and scales; None: plain numbers.
        activations: value of `QTensor.activations`; ``auto``: the engine's setting.
        misfit: if its rows do not fill a scheme's blocks, a text with that scheme and the one used instead.
    """

    source: RowSource | RowStack | None
    activations: str = "auto"
    misfit: str = ""


@dataclass(frozen=True)
class QuantizationPlan:
    """The result of the settings `quantization` and `quantization_rules`.

    Attributes:
        default: a scheme, a mix, ``none`` or ``stored``.
        rules: schemes of single modules, which precede the default.
        model: shape of the model, which mixes use.
    """

    default: str
    rules: SchemeRules
    model: ModelShape

    @classmethod
    def of(
        cls,
        quantization: str | None,
        rules: Mapping[str, str],
        model: ModelConfig,
        *,
        stored: str = "",
    ) -> QuantizationPlan:
        """The plan for one model.

        Args:
            quantization, rules: the settings.
            model: the model, which mixes use.
            stored: the checkpoint's format (`Checkpoint.quantization`).

        Raises:
            ConfigError: a scheme is unknown, an expression malformed, or the checkpoint has another format than asked.
        """
        default = quantization or STORED
        if _says_what_is(default.lower(), stored):
            default = STORED
        return cls(
            _checked(default),
            SchemeRules.parse(rules, (*SCHEMES, PLAIN, STORED)),
            ModelShape.of(model),
        )

    def keep(self, tensor: StoredTensor) -> Kept:
        """Decides how a matrix is kept.

        Args:
            tensor: a matrix or a stack of experts, under its Hugging Face name.
        """
        name, misfit = self._scheme(tensor, self.rules.find(tensor.name))
        if name == PLAIN:
            return Kept(None, misfit=misfit)
        if name in (STORED, tensor.type_name.lower()):
            return Kept(tensor.row_source(), misfit=misfit)
        scheme = scheme_named(name)
        return Kept(rows_in_situ(tensor, scheme), scheme.activations, misfit)

    def _scheme(self, tensor: StoredTensor, rule: str | None) -> tuple[str, str]:
        """The name of a scheme, and `Kept.misfit`."""
        name = rule or self.default
        if name in (PLAIN, STORED):
            return name, ""
        if name in uniform.UNIFORM_SCHEMES and mixes.NEVER.search(tensor.name):
            return STORED, ""
        if name in uniform.UNIFORM_SCHEMES:
            eight_bits = "fp8" if name == "fp8" else "int8"
            return eight_bits if rule is None and AT_EIGHT_BITS.search(tensor.name) else name, ""
        choice = mixes.tensor_scheme(name, name=tensor.name, shape=tensor.shape, model=self.model, rule=rule)
        misfit = f"{choice.wanted}; kept as {choice.scheme or 'stored'}" if choice.fell_back else ""
        return choice.scheme or STORED, misfit


def _says_what_is(name: str, stored: str) -> bool:
    """Whether a name only states the checkpoint's format; for other checkpoints some of these names are schemes."""
    if name not in STORED_AS or stored in STORED_AS[name]:
        return name in STORED_AS
    if name not in SCHEMES:
        found = f"is stored as {stored}" if stored else "is not quantized"
        raise ConfigError(
            f"quantization {name!r} is a checkpoint's format, but this one {found}; leave the setting out"
        )
    return False


def _checked(name: str) -> str:
    """The normalized name of a mix or, if there is no such mix, of a scheme."""
    name = name.lower()
    if name in (PLAIN, STORED, *mixes.MIXES):
        return name
    try:
        scheme = scheme_key(name, SCHEMES)
    except ConfigError:
        known = ", ".join(dict.fromkeys((*mixes.MIXES, *STORED_AS, *SCHEMES, PLAIN, STORED)))
        raise ConfigError(f"quantization {name!r} is unknown; known are {known}") from None
    return name if scheme in mixes.MIXES else scheme  # q2k: one scheme for all, q2_k: the mix


def summary(kinds: Counter[str]) -> str:
    """Counts of matrices by how they are kept, most first: ``210 q4_k, 1 q6_k``."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The plan of what is written.

    Attributes:
        checkpoint: the source.
        writer: format in which quantized layers are stored.
        layers: schemes of the quantized layers by tensor name, in order.
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

        Embeddings and tensors in `NEVER` are never quantized, and the head only by a rule.

        Args:
            checkpoint: the source.
            scheme: a key of SAVED_SCHEMES.
            rules: regular expressions on tensor names with schemes or ``none``; the first that matches decides.
            form: a key of WRITERS.
            group_size: columns that share a scale, instead of the scheme's number; 0: all.

        Raises:
            ConfigError: a name is unknown, or the format cannot hold the scheme; the message names the tensor.
            CheckpointError: there is nothing to quantize.
        """
        from llmjax.checkpoint.formats.registry import WRITERS  # loading a model needs no writers

        if form not in WRITERS:
            raise ConfigError(f"--format {form!r} is unknown; known are {', '.join(WRITERS)}")
        writer = WRITERS[form]
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
            ignored.append(HEAD)  # tied: other engines still have the module
        plan = cls(checkpoint, writer, MappingProxyType(layers), tuple(ignored))
        plan.settings()
        return plan

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The source's tensors in published form, experts one by one."""
        return _published(self.checkpoint)

    def expert_name(self, stack: str, expert: int) -> str:
        """The name in `tensors` of one expert's part of a stack of the model."""
        return expert_name(stack, expert, mixtral=_is_mixtral(self.checkpoint))

    def settings(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        modules = {self.stored_name(name).removesuffix(".weight"): scheme for name, scheme in self.layers.items()}
        ignored = {name: self.stored_name(f"{name}.weight").removesuffix(".weight") for name in self.ignored}
        never = [stored for name, stored in ignored.items() if name == HEAD or NEVER.search(f"{name}.weight")]
        encoder = [name.removesuffix(".weight") for name, one in self.encoder.items() if _is_linear(name, one)]
        return self.writer.settings(modules, (*ignored.values(), *encoder), never=[*never, *encoder])

    @property
    def encoder(self) -> Mapping[str, StoredTensor]:
        """Tensors of an encoder of pictures, which are left as they are, by their names in the files."""
        return self.checkpoint.vision_files

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files: its family's name, if the source uses it.

        Parts of tensors that these files fuse, and tensors that they transpose, keep the model's names: readers of the
        family accept those too.

        Args:
            name: name in the model.
        """
        tensor, names = self.tensors.get(name), self._names
        if tensor is None or names is None:
            return name
        module, _, suffix = tensor.name.rpartition(".")
        own, number = names.in_model(module)
        turned = len(tensor.shape) == 2 and module.endswith(tuple(names.transposed)) and name not in self.layers
        return tensor.name if f"{own}.{suffix}" == name and number is None and not turned else name

    @cached_property
    def _names(self) -> Names | None:
        return tensor_names(self.checkpoint.config)

    def parts(self, name: str) -> dict[str, Part]:
        """The tensors in which a quantized one is stored, by name."""
        module = self.stored_name(name).removesuffix(".weight")
        found = _parts(self.writer, self.layers[name], self.tensors[name])
        return {module + ending: part for ending, part in found.items()}

    def plain_dtype(self, name: str) -> np.dtype:
        """The type in which a tensor is written if it is not quantized: its own if it is plain, else the model's."""
        return self.own_dtype(self.tensors[name])

    def own_dtype(self, tensor: StoredTensor) -> np.dtype:
        """The type of a plain tensor, else the model's."""
        stored = DTYPES.get(tensor.type_name)
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
                specs.append(TensorSpec(self.stored_name(name), tuple(tensor.shape), self.plain_dtype(name)))
        return specs + [TensorSpec(name, tuple(one.shape), self.own_dtype(one)) for name, one in self.encoder.items()]


def _published(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    return MappingProxyType(with_separate_experts(checkpoint.tensors, mixtral=_is_mixtral(checkpoint)))


def _is_mixtral(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "mixtral"


def model_dtype(config: Mapping[str, Any]) -> np.dtype:
    """The type of weights in a model's config.json; bfloat16 if there is none."""
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
