"""The registry of model families: finds the one that reads a config.json."""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from llmjax.models.classifiers import TokenLabels, classifier_pooler, reward_pooler
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel
from llmjax.models.families import ARCHITECTURES, MODEL_TYPES
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Pooler
from llmjax.models.names import Names

# Transformers 5.24 and later writes these as Llama, having no class for them; tensors keep their names.
RUN_AS_LLAMA: Mapping[str, str] = MappingProxyType({"exaone": "ExaoneForCausalLM"})
CLASSIFIER = "ForSequenceClassification"
# Decoders whose labels are rewards, for a text or for each of its steps.
REWARDS = ("ForRewardModel", "ForProcessRewardModel")
# The endings of names of decoders without a head and with one.
_BARE, _WITH_HEAD = ("TextModel", "Model"), ("ForCausalLM", "LMHeadModel")
_ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")

Conversion = Literal["embed", "classify"]
_CROSS = "its text layers attend to rows of a picture by cross-attention, which no layer here has"
# Models that see and whose other names are none of those here, with what they lack.
LACKING: Mapping[str, str] = {
    "MllamaForConditionalGeneration": _CROSS,
    "DeepseekVLHybridForConditionalGeneration": "a second encoder, of SAM, sees its pictures too",
    "Moondream": "its files are of an older form; those of an HfMoondream are read",
    "MolmoForCausalLM": "its files are of an older form; those of a Molmo2ForConditionalGeneration are read",
}


def declared_in(file: str) -> Sequence[Family]:
    """The families that a file of this folder declares; imports the file if needed."""
    families: Sequence[Family] = importlib.import_module(f"llmjax.models.{file}").FAMILIES
    return families


def family_of(architecture: str) -> Family:
    """The family of one of ARCHITECTURES."""
    return next(each for each in declared_in(ARCHITECTURES[architecture]) if architecture in each.architectures)


def architecture_of(model_type: str) -> str | None:
    """The architecture of models that a config.json names by their ``model_type`` alone; None: it is not known."""
    if model_type not in MODEL_TYPES:
        return None
    families = declared_in(MODEL_TYPES[model_type])
    return next(each.architectures[0] for each in families if model_type in each.model_types)


def model_config(
    config: Mapping[str, Any], *, max_model_len: int | None = None, convert: Conversion | None = None
) -> ModelConfig:
    """The configuration of a model from its config.json.

    Args:
        config: the parsed file; ``architectures[0]`` decides on the family, else ``model_type``.
        max_model_len: longest sequence that will be served, in tokens, to which dynamic rope scaling extends; None
            means ``max_position_embeddings``.
        convert: what to turn a generating model into; None: what its architecture says, which is an embedding model
            if its tokens see later ones.

    Raises:
        UnsupportedModel: an unknown architecture, or a key whose value is wrong or not supported.
    """
    if max_model_len is not None and max_model_len < 1:
        raise UnsupportedModel(f"max_model_len = {max_model_len} must be at least 1")
    architecture, made = _architecture(config)
    family = family_of(architecture)
    model = family.read(family.fields(config, max_model_len=max_model_len))
    model = replace(model, architecture=family.named or family.architectures[0])
    if config.get("is_causal") is False and model.causal:
        model = replace(model, layers=tuple(_bidirectional(layer, architecture) for layer in model.layers))
    labels = TokenLabels.of(config)
    convert = convert or made or ("classify" if labels is not None else None) or ("embed" if not model.causal else None)
    if model.pooler is not None or convert is None:
        return model
    if convert == "classify" and labels is not None and (model.head_bias or model.final_softcap is not None):
        raise UnsupportedModel(
            f"config.json: classifier_from_token is not supported for {architecture}, "
            "whose logits are more than a product"
        )
    fields = Fields(config)
    if convert == "embed":
        pooler = Pooler(kind="last")
    elif _named(config).endswith(REWARDS):
        pooler = reward_pooler(fields, size=model.hidden_size, one_matrix=family.rewards_by_one_matrix)
    else:
        pooler = classifier_pooler(fields, kind="last", bias=False)
    return replace(model, pooler=pooler)


def _bidirectional(layer: LayerSpec, family: str) -> LayerSpec:
    if not isinstance(layer.mixer, Attention):
        raise UnsupportedModel(f"config.json: is_causal = False is not supported for {family}")
    return replace(layer, mixer=replace(layer.mixer, causal=False))


def tensor_names(config: Mapping[str, Any]) -> Names | None:
    """Names of tensors in a family's checkpoints; None: they are the model's own, or the family is unknown."""
    try:
        return family_of(_architecture(config)[0]).tensor_names(config)
    except UnsupportedModel:
        return None


def makes_vectors(config: Mapping[str, Any], *, convert: Conversion | None = None) -> bool:
    """Whether the model turns texts into vectors; False if it is not known."""
    try:
        return model_config(config, convert=convert).pooler is not None
    except UnsupportedModel:
        return False


def token_labels(config: Mapping[str, Any]) -> TokenLabels | None:
    """Labels that are tokens of the language model's head; None: there are none, or their keys are wrong."""
    try:
        return TokenLabels.of(config)
    except UnsupportedModel:
        return None


def has_unit_head(config: Mapping[str, Any]) -> bool:
    """Whether the rows of the head's matrix are scaled to length one before it is used."""
    try:
        vocabulary = family_of(_architecture(config)[0]).unit_head_vocabulary
    except UnsupportedModel:
        return False
    return vocabulary is not None and config.get("vocab_size") == vocabulary


def _architecture(config: Mapping[str, Any]) -> tuple[str, Conversion | None]:
    """One of ARCHITECTURES, and what a generating model is turned into; None: it stays one."""
    named, model_type = config.get("architectures"), config.get("model_type")
    if named:
        architecture = named[0] if isinstance(named, list | tuple) else named
    else:
        architecture = architecture_of(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            known = ", ".join(sorted(MODEL_TYPES))
            raise UnsupportedModel(f"config.json: model_type {model_type!r} is not supported; supported are {known}")
    if not isinstance(architecture, str):
        raise UnsupportedModel(_unknown(architecture))
    if architecture == "LlamaForCausalLM" and isinstance(model_type, str):
        architecture = RUN_AS_LLAMA.get(model_type, architecture)
    if architecture in ARCHITECTURES:
        return architecture, None
    ends: list[tuple[str, Conversion]] = [(end, "classify") for end in (f"Text{CLASSIFIER}", CLASSIFIER, *REWARDS)]
    ends += [(end, "embed") for end in _BARE]
    for end, made in ends:
        if (stem := architecture.removesuffix(end)) != architecture:
            for head in _WITH_HEAD:
                if stem + head in ARCHITECTURES:
                    return stem + head, made
    raise UnsupportedModel(_unknown(architecture))


def _named(config: Mapping[str, Any]) -> str:
    """The architecture as a config.json names it."""
    named = config.get("architectures") or [""]
    return str(named[0] if isinstance(named, list | tuple) else named)


def _unknown(architecture: Any) -> str:
    """The message about an architecture that is not known."""
    if isinstance(architecture, str) and architecture in LACKING:
        reason = LACKING[architecture]
        return f"config.json: architecture {architecture!r} is not supported: {reason}; see docs/supported-models.md"
    known = sorted(ARCHITECTURES)
    near = _near(str(architecture)[:100], known)
    override = json.dumps({"architectures": near or ["NAME"]})
    return (
        f"config.json: architecture {architecture!r} is not supported; if it is {(near or ['one of these'])[0]} under "
        f"another name, set hf_overrides to {override}; supported are {', '.join(known)}"
    )


def _near(architecture: str, known: Sequence[str]) -> list[str]:
    """The known name most similar to another, if any; the endings that all names share are not compared."""
    stems = {_ENDING.sub("", name): name for name in known}
    return [stems[stem] for stem in difflib.get_close_matches(_ENDING.sub("", architecture), stems, n=1)]
