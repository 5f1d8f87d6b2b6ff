"""Chooses the scheme of each tensor: llama.cpp's mixes (q4_k_m …), or one scheme for all.

The mixes are those of ``llama_tensor_get_type`` in llama.cpp's llama-quant.cpp without an importance matrix: they give
more bits to the output, and in sensitive layers to attention's values and to the MLP's down projection. MIXES holds
them as data: the first case with a true condition decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from llmjax.checkpoint.experts import ROUTER
from llmjax.errors import ConfigError
from llmjax.models import Attention, Experts, ModelConfig
from llmjax.quantization.schemes import scheme_key
from llmjax.weights.ggml.reference import QUANTIZERS

KEEP = "none"
"""Stands for no scheme: the tensor stays as it is."""

FALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "q2_k": "q4_0",
        "q3_k": "q4_0",
        "q4_k": "q5_0",
        "q5_k": "q5_1",
        "q6_k": "q8_0",
        "iq4_xs": "iq4_nl",
        "tq1_0": "q4_0",
        "tq2_0": "q4_0",
    }
)
"""Replacements of schemes with blocks of 256 for rows that do not fill these."""

_MODULE = r"(?:^|\.)(?:{})\.weight$"
CATEGORIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (category, re.compile(_MODULE.format(modules)))
    for category, modules in (
        ("output", "lm_head"),
        ("embedding", "embed_tokens"),
        ("values", "v_proj|qkv_proj|kv_b_proj"),
        ("keys", "k_proj"),
        ("attention_output", "o_proj"),
        ("down", r"down_proj|experts\.\d+\.w2"),
    )
)
"""Kinds of tensors that mixes distinguish, by Hugging Face name."""

_ALL_LAYERS = r"model\.per_layer\.projection|per_layer_model_projection"  # its names in the model and in checkpoints
_SMALL = rf"indexer\.weights_proj|project_in|project_out|altup\.\w+|laurel\.\w+|{_ALL_LAYERS}"
NEVER = re.compile(rf"(?:norm|conv1d|conv\.conv|{_SMALL}|{ROUTER})\.weight$")
"""Tensors that are never quantized, among them small but sensitive matrices: an indexer's weights of its heads (as in
vLLM), OPT-350m's projections around its layers (as in AutoGPTQ), the matrices that mix Gemma 3n's streams, and the
projection to per-layer embeddings of Gemma 3n and 4 (as in llama.cpp)."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The properties of a model that mixes use.

    Attributes:
        layers: number of decoder layers.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        experts: number of experts in a layer; 0 for dense models.
        tied: the output shares the embedding's weights.
        architecture: `ModelConfig.architecture`.
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    tied: bool = False
    architecture: str = ""

    @classmethod
    def of(cls, model: ModelConfig) -> ModelShape:
        """The shape of a model; where keys come from latent vectors, or there are none, no heads share them."""
        attention = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)), None)
        experts = (layer.feed_forward.count for layer in model.layers if isinstance(layer.feed_forward, Experts))
        return cls(
            layers=model.num_layers,
            heads=attention.heads if attention else 1,
            kv_heads=attention.kv_heads if attention else 1,
            experts=next(experts, 0),
            tied=model.tie_word_embeddings,
            architecture=model.architecture,
        )

    @property
    def shares_heads(self) -> bool:
        """Whether at least four query heads share a key/value head: values are small and cheap to keep precise."""
        return self.heads // self.kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        """Whether this is the shape that llama.cpp calls 70B."""
        return self.layers == 80 and (
            self.architecture == "Qwen2ForCausalLM"
            or (self.architecture == "LlamaForCausalLM" and self.heads != self.kv_heads)
        )


@dataclass(frozen=True)
class Place:
    """The place of a tensor: its layer in a model."""

    layer: int
    model: ModelShape


Condition = Callable[[Place], bool]
Cases = tuple[tuple[Condition, str], ...]
"""Schemes with conditions; the first with a true condition is used."""


def always(place: Place) -> bool:
    return True


def sensitive_layers(place: Place) -> bool:
    """Whether the layer is in the first or last eighth, or one of every three in between."""
    layer, layers = place.layer, place.model.layers
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def first_eighth(place: Place) -> bool:
    return place.layer < place.model.layers // 8


def first_sixteenth(place: Place) -> bool:
    return place.layer < place.model.layers // 16


def first_two(place: Place) -> bool:
    return place.layer < 2


def first_four(place: Place) -> bool:
    return place.layer < 4


def shares_heads(place: Place) -> bool:
    return place.model.shares_heads


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Schemes by kind of tensor.

    Attributes:
        base: scheme of tensors that no case names.
        values, down, attention_output: cases for these tensors.
        embedding: scheme of an embedding that is not the output too; None: base.
        few_experts_output: scheme of attention's output in models of eight experts; None: base.
    """

    base: str
    values: Cases = ()
    down: Cases = ()
    attention_output: Cases = ()
    embedding: str | None = None
    few_experts_output: str | None = None


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "q4_0": Mix(base="q4_0"),
        "q4_1": Mix(base="q4_1"),
        "q5_0": Mix(base="q5_0"),
        "q5_1": Mix(base="q5_1"),
        "q8_0": Mix(base="q8_0"),
        "q2_k": Mix(
            base="q2_k",
            values=((shares_heads, "q4_k"), (always, "q3_k")),
            down=((always, "q3_k"),),
            attention_output=((always, "q3_k"),),
            few_experts_output="q5_k",
        ),
        "q3_k_s": Mix(base="q3_k", few_experts_output="q5_k"),
        "q3_k_m": Mix(
            base="q3_k",
            values=((first_two, "q5_k"), (always, "q4_k")),
            down=((first_sixteenth, "q5_k"), (always, "q4_k")),
            attention_output=((always, "q4_k"),),
            few_experts_output="q5_k",
        ),
        "q3_k_l": Mix(
            base="q3_k",
            values=((always, "q5_k"),),
            down=((always, "q5_k"),),
            attention_output=((always, "q5_k"),),
        ),
        "q4_k_s": Mix(
            base="q4_k", values=((first_four, "q5_k"),), down=((first_eighth, "q5_k"),), few_experts_output="q5_k"
        ),
        "q4_k_m": Mix(
            base="q4_k",
            values=((sensitive_layers, "q6_k"),),
            down=((sensitive_layers, "q6_k"),),
            few_experts_output="q5_k",
        ),
        "q5_k_s": Mix(base="q5_k"),
        "q5_k_m": Mix(base="q5_k", values=((sensitive_layers, "q6_k"),), down=((sensitive_layers, "q6_k"),)),
        "q6_k": Mix(base="q6_k"),
        "iq4_nl": Mix(
            base="iq4_nl",
            values=((shares_heads, "q5_k"),),
            down=((first_eighth, "q5_k"),),
            few_experts_output="q5_k",
        ),
        "iq4_xs": Mix(
            base="iq4_xs",
            values=((shares_heads, "q5_k"),),
            down=((first_eighth, "q5_k"),),
            few_experts_output="q5_k",
        ),
        "tq1_0": Mix(base="tq1_0", embedding="q4_k"),
        "tq2_0": Mix(base="tq2_0", embedding="q4_k"),
    }
)
"""The contents of llama.cpp's files of each name. ``q4_k`` and ``q4k``, ``q2k`` … without an underscore before the k,
are not mixes: every tensor gets that scheme."""


@dataclass(frozen=True)
class Choice:
    """The scheme chosen for a tensor.

    Attributes:
        scheme: a key of QUANTIZERS; None: it stays as it is.
        wanted: the scheme that was intended; it differs from `scheme` if rows do not fill its blocks.
    """

    scheme: str | None
    wanted: str | None

    @property
    def fell_back(self) -> bool:
        return self.scheme != self.wanted


def mix_named(name: str) -> Mix:
    """A mix of llama.cpp, or else one scheme for every tensor.

    Raises:
        ConfigError: `name` is neither.
    """
    if (mix := MIXES.get(name.lower())) is not None:
        return mix
    try:
        scheme = scheme_key(name, QUANTIZERS)
    except ConfigError:
        known = ", ".join(dict.fromkeys((*MIXES, *QUANTIZERS)))
        raise ConfigError(f"quantization {name!r} is unknown; known are {known}") from None
    # The output gets it too; only a rule that names it changes that.
    return Mix(base=scheme, embedding=scheme)


def tensor_scheme(mix: str, *, name: str, shape: Sequence[int], model: ModelShape, rule: str | None = None) -> Choice:
    """The scheme for one tensor.

    Vectors and tensors in NEVER are never quantized, whatever the rule says.

    Args:
        mix: a key of MIXES, or a scheme for every tensor.
        name: Hugging Face name.
        shape: outermost dimension first; rows are cut into blocks.
        model: the model's shape.
        rule: a key of QUANTIZERS, or KEEP, that the user asks for instead; None: no rule.

    Raises:
        ConfigError: the mix is unknown.
    """
    chosen = mix_named(mix)
    if len(shape) < 2 or not name.endswith("weight") or NEVER.search(name):
        return Choice(None, None)
    columns = shape[-1]
    if rule is not None:
        return Choice(None, None) if rule == KEEP else fitting(rule, columns)
    pure = mix.lower() not in MIXES
    return fitting(chosen.base if pure else _mixed(chosen, name, columns, model), columns)


def _mixed(mix: Mix, name: str, columns: int, model: ModelShape) -> str:
    category = next((category for category, pattern in CATEGORIES if pattern.search(name)), "")
    layer = re.search(r"\.layers\.(\d+)\.", name)
    place = Place(int(layer[1]) if layer else 0, model)
    if category == "output" or (category == "embedding" and model.tied):
        return "q8_0" if mix.base == "q8_0" or columns % QUANTIZERS[mix.base].block.elems else "q6_k"
    if category == "embedding":
        return mix.embedding or mix.base
    if model.experts == 8 and category in ("values", "keys"):
        return "q8_0"
    if category == "values":
        scheme = _first(mix.values, place, mix.base)
        return "q5_k" if model.is_70b and scheme in ("q3_k", "q4_k") else scheme
    if category == "attention_output" and model.experts == 8:
        return mix.few_experts_output or mix.base
    if category == "attention_output":
        return _first(mix.attention_output, place, mix.base)
    return _first(mix.down, place, mix.base) if category == "down" else mix.base


def _first(cases: Cases, place: Place, default: str) -> str:
    return next((scheme for condition, scheme in cases if condition(place)), default)


def fitting(scheme: str, columns: int) -> Choice:
    """The scheme, or, if rows of `columns` do not fill its blocks, its replacement or none (llama.cpp: float16)."""
    for candidate in (scheme, FALLBACKS.get(scheme)):
        if candidate is not None and columns % QUANTIZERS[candidate].block.elems == 0:
            return Choice(candidate, scheme)
    return Choice(None, scheme)
