"""Which weight is kept how: the `quantization` settings applied to the tensors of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import ConfigError
from llmjax.models import ModelConfig
from llmjax.quantization import mixes
from llmjax.quantization.mixes import ModelShape
from llmjax.quantization.rounding import rows_in_situ
from llmjax.quantization.schemes import SCHEMES, SchemeRules, scheme_key, scheme_named
from llmjax.weights import uniform
from llmjax.weights.packing import RowSource, RowStack

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
"""Names of formats, as vLLM takes them, that say what a checkpoint is: its `Checkpoint.quantization`."""

PLAIN = "none"  # dequantized to the model's dtype
STORED = "stored"  # whatever the checkpoint has
AT_EIGHT_BITS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
"""What schemes without a mix of their own keep at 8 bits: every token passes through these two."""


@dataclass(frozen=True)
class Kept:
    """How a weight is kept in memory.

    Attributes:
        source: its codes and scales; None: plain numbers.
        activations: for `QTensor.activations`; ``auto``: as the engine is configured.
        misfit: what it could not become and what it is instead, where its rows do not fill a scheme's blocks.
    """

    source: RowSource | RowStack | None
    activations: str = "auto"
    misfit: str = ""


@dataclass(frozen=True)
class QuantizationPlan:
    """What `quantization` and `quantization_rules` ask for.

    Attributes:
        default: a scheme, a mix, ``none`` or ``stored``.
        rules: what single modules become instead.
        model: its shape, which mixes look at.
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
            model: which mixes look at.
            stored: the checkpoint's format (`Checkpoint.quantization`).

        Raises:
            ConfigError: a scheme is unknown, an expression malformed, or the checkpoint of another format than said.
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
        """How a matrix is kept.

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
        if name in uniform.SCHEMES and mixes.NEVER.search(tensor.name):
            return STORED, ""
        if name in uniform.SCHEMES:
            eight_bits = "fp8" if name == "fp8" else "int8"
            return eight_bits if rule is None and AT_EIGHT_BITS.search(tensor.name) else name, ""
        choice = mixes.tensor_scheme(name, name=tensor.name, shape=tensor.shape, model=self.model, rule=rule)
        misfit = f"{choice.wanted}; kept as {choice.scheme or 'stored'}" if choice.fell_back else ""
        return choice.scheme or STORED, misfit


def _says_what_is(name: str, stored: str) -> bool:
    """Whether a name asks for nothing but what the checkpoint is; some names are schemes where it is something else."""
    if name not in STORED_AS or stored in STORED_AS[name]:
        return name in STORED_AS
    if name not in SCHEMES:
        found = f"is stored as {stored}" if stored else "is not quantized"
        raise ConfigError(
            f"quantization {name!r} is a checkpoint's format, but this one {found}; leave the setting out"
        )
    return False


def _checked(name: str) -> str:
    """The name as it is used here: of a mix or, where there is none of that name, of a scheme."""
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
    """``210 q4_k, 1 q6_k``: how many matrices are kept how, most first."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
