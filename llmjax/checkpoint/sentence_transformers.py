"""Reads sentence-transformers' files beside a model: how hidden states become vectors, and named prompts.

Layout: https://sbert.net/docs/package_reference/sentence_transformer/models.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmjax.checkpoint.files import object_if_there, read_list, read_object
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.config import ModelConfig
from llmjax.models.layers.pooling import DOCUMENT, PUNCTUATION, QUERY, Dense, Pooler, PoolingKind, TextPrompt

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
CAUSAL_LOGITS = "causal_logits"
SENTENCE = "sentence_embedding"  # input and output of a matrix
POOLING_KEYS: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
MODES: Mapping[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
MARKS = {QUERY: "query_prefix", DOCUMENT: "document_prefix"}
"""PyLate's keys of the tokens that stand before texts of each kind."""
ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class SentenceModules:
    """The modules after a transformer.

    Attributes:
        kind: kind of pooling; "each" where matrices follow without any (PyLate).
        normalize: whether vectors are scaled to length one.
        dense: matrices after pooling.
        tensors: tensors of these matrices, by the model's names.
        max_length: longest text in tokens; None: the model's.
        lowercase: whether texts are converted to lower case.
        prompts: what stands around texts, by name.
        default_prompt: name of the prompt for texts without a named one; None: there is none.
    """

    kind: PoolingKind
    normalize: bool
    dense: tuple[Dense, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    max_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, TextPrompt] = field(default_factory=dict)
    default_prompt: str | None = None

    @classmethod
    def read(cls, folder: Path) -> SentenceModules | None:
        """Reads a folder; None: it has no such files.

        Raises:
            CheckpointError: a file is missing or malformed, or a module is not supported.
        """
        if not (folder / MODULES).exists():
            return None
        kind: PoolingKind | None = None
        normalize = False
        dense: list[Dense] = []
        tensors: dict[str, StoredTensor] = {}
        for module in read_list(folder / MODULES):
            if not isinstance(module, Mapping):
                raise CheckpointError(f"{folder / MODULES}: an entry is not a JSON object")
            name, path = str(module.get("type")).rpartition(".")[2], _inside(folder, module)
            match name:
                case "Transformer":
                    continue
                case "Pooling" if dense:
                    raise CheckpointError(f"{folder / MODULES}: module 'Dense' before 'Pooling' is not supported")
                case "Pooling":
                    kind = _pooling(path / "config.json")
                case "Normalize":
                    normalize = True
                case "LogitScore":
                    return None  # see `LogitScore`
                case "Dense" if normalize:
                    raise CheckpointError(f"{folder / MODULES}: module 'Dense' after 'Normalize' is not supported")
                case "Dense":
                    spec, found = _dense(path, number=len(dense))
                    dense.append(spec)
                    tensors.update(found)
                case _:
                    raise CheckpointError(f"{folder / MODULES}: module {name[:80]!r} is not supported")
        settings = object_if_there(folder / SETTINGS)
        marks: dict[str, TextPrompt] = {}
        if kind is None:
            if not dense:
                return None  # what is pooled nowhere, such as a cross-encoder
            kind, normalize, marks = "each", True, _marks(settings, folder / SETTINGS)  # PyLate always normalizes
        prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
        if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
            raise CheckpointError(f"{folder / SETTINGS}: prompts must be an object of texts")
        if default is not None and default not in prompts:
            raise CheckpointError(f"{folder / SETTINGS}: default_prompt_name {default!r} is not among the prompts")
        texts = object_if_there(folder / LENGTHS)
        length = texts.get("max_seq_length")
        if length is not None and (not isinstance(length, int) or length < 1):
            raise CheckpointError(f"{folder / LENGTHS}: max_seq_length must be a positive integer")
        return cls(
            kind=kind,
            normalize=normalize,
            dense=tuple(dense),
            tensors=tensors,
            max_length=length,
            lowercase=texts.get("do_lower_case") is True,
            prompts={**{name: TextPrompt(before=text) for name, text in prompts.items()}, **marks},
            default_prompt=default,
        )

    def of(self, model: ModelConfig) -> ModelConfig:
        """An embedding model with these modules after it."""
        pooler = Pooler(kind=self.kind, dense=self.dense, normalize=self.normalize)
        length = min(model.max_position, self.max_length or model.max_position)
        return replace(model, pooler=pooler, max_position=length)


@dataclass(frozen=True)
class LogitScore:
    """How a generating model scores pairs of texts: by the logits of tokens after its chat template's prompt.

    Attributes:
        keys: keys of config.json that express it in vLLM's way.
        instruction: default instruction for requests without one; None: the template's own.
    """

    keys: Mapping[str, Any]
    instruction: str | None = None

    @classmethod
    def read(cls, folder: Path) -> LogitScore | None:
        """Reads a folder; None: it has no such files.

        Raises:
            CheckpointError: a file is missing or malformed, or names an unknown input.
        """
        if not (folder / MODULES).exists():
            return None
        modules = [module for module in read_list(folder / MODULES) if isinstance(module, Mapping)]
        found = next((module for module in modules if str(module.get("type")).endswith(".LogitScore")), None)
        if found is None:
            return None
        path = _inside(folder, found) / "config.json"
        values, settings = read_object(path), object_if_there(folder / SETTINGS)
        if (given := values.get("module_input_name", CAUSAL_LOGITS)) != CAUSAL_LOGITS:
            raise CheckpointError(f"{path}: module_input_name = {str(given)[:80]!r} is not supported")
        yes, no = values.get("true_token_id"), values.get("false_token_id")
        if type(yes) is not int or type(no) not in (int, type(None)):
            raise CheckpointError(f"{path}: true_token_id and false_token_id must be ids of tokens")
        keys: dict[str, Any] = {
            "classifier_from_token": [yes] if no is None else [no, yes],
            "method": "no_post_processing" if no is None else "from_2_way_softmax",
        }
        if (activation := settings.get("activation_fn")) is not None:
            keys["sentence_transformers"] = {"activation_fn": activation}
        prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
        instruction = prompts.get(name) if isinstance(prompts, Mapping) else None
        return cls(keys, instruction if isinstance(instruction, str) else None)


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module's files."""
    path = folder / str(module.get("path") or "")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / MODULES}: path {module['path']!r} leads out of the folder")
    return path


def _marks(settings: Mapping[str, Any], path: Path) -> dict[str, TextPrompt]:
    """PyLate's prompts of queries and documents: a token each."""
    found = {name: settings[key] for name, key in MARKS.items() if settings.get(key)}
    if wrong := next((name for name, mark in found.items() if not isinstance(mark, str)), None):
        raise CheckpointError(f"{path}: {MARKS[wrong]} must be a text")
    words = settings.get("skiplist_words")
    if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise CheckpointError(f"{path}: skiplist_words must be a list of texts")
    skipped = PUNCTUATION if words is None else tuple(words)
    return {name: TextPrompt(second=mark, skipped=skipped * (name == DOCUMENT)) for name, mark in found.items()}


def _pooling(path: Path) -> PoolingKind:
    values = read_object(path)
    if values.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt = false is not supported")
    if (mode := values.get("pooling_mode")) is not None:
        if not isinstance(mode, str) or mode not in MODES:
            known = ", ".join(MODES)
            raise CheckpointError(f"{path}: pooling_mode = {str(mode)[:80]!r} is not supported; supported are {known}")
        return MODES[mode]
    chosen = [key for key, value in values.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in POOLING_KEYS:
        raise CheckpointError(
            f"{path}: {' and '.join(chosen) or 'no pooling mode'} is not supported; supported is one of "
            f"{', '.join(POOLING_KEYS)}"
        )
    return POOLING_KEYS[chosen[0]]


def _dense(folder: Path, *, number: int) -> tuple[Dense, dict[str, StoredTensor]]:
    values = read_object(folder / "config.json")
    size, bias = values.get("out_features"), values.get("bias", True)
    name: Any = str(values.get("activation_function") or "Identity").removesuffix("()").rpartition(".")[2]
    if not isinstance(size, int) or size < 1 or not isinstance(bias, bool):
        raise CheckpointError(f"{folder / 'config.json'}: out_features or bias is missing or wrong")
    for key in ("module_input_name", "module_output_name"):
        if values.get(key, SENTENCE) not in (SENTENCE, None):
            raise CheckpointError(f"{folder / 'config.json'}: {key} = {str(values[key])[:80]!r} is not supported")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{folder / 'config.json'}: activation_function {name[:80]!r} is not supported")
    stored = stored_tensors(folder)
    tensors: dict[str, StoredTensor] = {
        f"head.{number}.dense.{kind}": stored[f"linear.{kind}"]
        for kind in ("weight", "bias")
        if f"linear.{kind}" in stored
    }
    return Dense(size=size, bias=bias, activation=ACTIVATIONS[name]), tensors
