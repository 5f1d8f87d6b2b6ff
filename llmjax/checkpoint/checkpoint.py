"""A model on disk in any format: a config, and named tensors that are read one at a time."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from llmjax import models
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.files import read_object
from llmjax.checkpoint.gguf.encoders import sentence_modules
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.mmproj import SOUND, encoder_of
from llmjax.checkpoint.gguf.model import (
    hf_config,
    hf_generation_config,
    hf_joined_tensors,
    hf_key_numbers,
    hf_tensors,
)
from llmjax.checkpoint.label_rows import LABELS, LabelRows
from llmjax.checkpoint.late_interaction import token_modules
from llmjax.checkpoint.mistral_layout import WEIGHTS as CONSOLIDATED
from llmjax.checkpoint.mistral_layout import config_in, halved, is_native, processor_in, renamed
from llmjax.checkpoint.model_names import UnitRows, with_model_names, with_pooler_names
from llmjax.checkpoint.overrides import check_reached, overridden
from llmjax.checkpoint.safetensors import WEIGHTS, SafetensorsTensor, stored_tensors
from llmjax.checkpoint.sentence_transformers import LogitScore, SentenceModules
from llmjax.checkpoint.stored_tensor import StoredStack, StoredTensor
from llmjax.checkpoint.vision import vision_tensors, with_tokens_apart, without_adapters
from llmjax.errors import CheckpointError
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel
from llmjax.models.registry import Conversion
from llmjax.models.vision.registry import vision_family
from llmjax.models.vision.spec import VisionSpec

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
BIASED = re.compile(r".*\.mlp\.experts\.gate_proj\.bias")
QWEN3_RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}

Runner = Literal["auto", "generate", "pooling"]
T = TypeVar("T", bound=StoredTensor)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model.

    Attributes:
        path: folder or .gguf file.
        config: content of config.json; for GGUF, derived from the metadata.
        generation_config: content of generation_config.json, or empty.
        tensors: tensors by Hugging Face name, also of quantized checkpoints, see docs/formats.md. Experts are stacked.
        gguf: the container, for its tokenizer; None for a folder.
        convert: what a generating model is turned into, see ``llmjax.models.model_config``.
        modules: sentence-transformers' modules beside the model; None: there are none, or they are not used.
        logit_score: the same for a generating model that scores pairs of texts by tokens.
        quantization: ``gguf``, or the ``quant_method`` of a quantized folder; else empty.
        whole_config: content of config.json as it is in the file, of which ``config`` may be the text model's part.
        processor_config: content of preprocessor_config.json where an encoder's GGUF file says it, or Mistral's
            params.json, else empty.
        vision: the encoder of pictures; None: the model does not see.
        vision_tensors: tensors of the encoder by its own names, see ``models/vision/functional.py``.
        vision_files: the same as a folder has them, by their names there; empty for GGUF files.
        adapter_tensors: tensors among the model's that are those of its own adapter, see ``VisionFamily.adapter``.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    gguf: GGUFFile | None = None
    quantization: str = ""
    convert: Conversion | None = None
    modules: SentenceModules | None = None
    logit_score: LogitScore | None = None
    whole_config: Mapping[str, Any] = field(default_factory=dict)
    processor_config: Mapping[str, Any] = field(default_factory=dict)
    vision: VisionSpec | None = None
    vision_tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    vision_files: Mapping[str, StoredTensor] = field(default_factory=dict)
    adapter_tensors: Mapping[str, SafetensorsTensor] = field(default_factory=dict)

    @property
    def adapter(self) -> str:
        """The name of the model's own adapter; empty: it has none, or does not see."""
        family = None if self.vision is None else vision_family(self.whole_config)
        return "" if family is None else family.adapter

    def model_config(self, *, max_model_len: int | None = None) -> ModelConfig:
        """The model that the config and the tensors describe.

        Args:
            max_model_len: see ``llmjax.models.model_config``.

        Raises:
            CheckpointError: the model is not supported, or has no output weights although its embedding is not tied.
        """
        model = self.declared_config(max_model_len=max_model_len)
        if model.pooler is not None:
            embeds = model.pooler.task == "embed"
            if not embeds and model.causal and LABELS not in self.tensors and models.token_labels(self.config) is None:
                raise CheckpointError(
                    f"{self.path}: the labels' matrix (score.weight) is missing; if tokens are the labels, as in "
                    f"Qwen3-Reranker, set hf_overrides to {json.dumps(QWEN3_RERANKER)}"
                )
            return self.modules.of(model) if self.modules is not None and embeds else model
        if not model.tie_word_embeddings and HEAD not in self.tensors:
            raise CheckpointError(
                f"{self.path}: tensor {HEAD} is missing, and tie_word_embeddings is false; "
                'if the embedding is the head too, set hf_overrides to {"tie_word_embeddings": true}'
            )
        if model.tie_word_embeddings and self._has_own_head():
            logger.warning("%s: %s is used, though tie_word_embeddings is true: it is another one", self.path, HEAD)
            return replace(model, tie_word_embeddings=False)
        return model

    def declared_config(self, *, max_model_len: int | None = None) -> ModelConfig:
        """The model that the config alone describes, whatever tensors there are; see `model_config`."""
        return _model_config(self.config, self.path, max_model_len=max_model_len, convert=self.convert)

    def by_model_names(self, stored: Mapping[str, StoredStack]) -> dict[str, StoredTensor]:
        """Tensors that were made for this model, for example of an adapter, by the model's names.

        Args:
            stored: by their names in a folder in Hugging Face's layout.

        Raises:
            CheckpointError: they cannot be tensors of this model.
        """
        nested = self.gguf is None and models.text_config(dict(self.whole_config)) is not None
        # Of the stacks in files, those with biases have rows of gate and up in turn.
        interleaved = any(BIASED.fullmatch(name) for name in self.tensors)
        return _by_model_names(
            stored, self.config, self.path, convert=self.convert, nested=nested, interleaved=interleaved
        )

    def of_encoder(self, stored: Mapping[str, T]) -> tuple[dict[str, StoredTensor], dict[str, T]]:
        """Divides tensors that were made for this model, for example of an adapter, by where they belong.

        Args:
            stored: by their names in a folder in Hugging Face's layout.

        Returns:
            Those of the encoder of images by its own names, and all others by theirs.

        Raises:
            CheckpointError: they cannot be tensors of this model.
        """
        family = None if self.vision is None else vision_family(self.whole_config)
        if family is None or self.vision is None:
            return {}, dict(stored)
        return vision_tensors(stored, self.vision, family.tensors, self.path)

    def _has_own_head(self) -> bool:
        """Whether a head is stored that differs from the embedding: Transformers 5 and later check that too."""
        head, embedding = self.tensors.get(HEAD), self.tensors.get(EMBEDDING)
        if head is None or embedding is None or any(x.row_source() is not None for x in (head, embedding)):
            return False  # quantization alone may make them differ
        return head.shape != embedding.shape or not np.array_equal(_bits(head), _bits(embedding))

    def with_label_rows(self, tokens: Sequence[int]) -> Checkpoint:
        """The checkpoint with a labels' matrix made of rows of the head, see `models.token_labels`.

        Args:
            tokens: ids of the tokens that the config names.

        Raises:
            CheckpointError: the model is not supported, or its head is missing or has no row for a token.
        """
        model, labels = self.model_config(), models.token_labels(self.config)
        assert labels is not None
        name = EMBEDDING if model.tie_word_embeddings else HEAD
        if (head := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing, of which labels are rows")
        if max(tokens) >= head.shape[0]:
            raise CheckpointError(f"{self.path}: tensor {name} has no row {max(tokens)}, which is to be a label")
        rows = LabelRows.of(head, tokens, difference=labels.difference, scale=model.logit_scale)
        kept = {name: tensor for name, tensor in self.tensors.items() if name != HEAD}
        return replace(self, tensors=MappingProxyType({**kept, LABELS: rows}))


def open_checkpoint(
    path: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    runner: Runner = "auto",
    convert: Conversion | None = None,
    mmproj: str | Path | None = None,
    weights: bool = True,
) -> Checkpoint:
    """Opens a model without reading its weights.

    Args:
        path: folder in Hugging Face's layout (config.json and model.safetensors or its index) or Mistral's (params.json
            and consolidated.safetensors), or a .gguf file (any part of a split one).
        overrides: keys of config.json to replace or add, with their values.
        runner: "pooling": texts become vectors, whatever the model was made for; "generate": the model generates, even
            if it was published for embeddings; "auto": the files decide.
        convert: what a generating model is converted to if texts become vectors.
        mmproj: the file of a .gguf file's encoder of pictures; "none": it is read without one; None: with the one
            beside it, if there is one alone.
        weights: whether the weights are looked for; else there are no tensors, and a folder needs a config.json alone.

    Raises:
        CheckpointError: a part is missing, malformed or of an unknown architecture, or nothing reads an override.
    """
    path = Path(path)
    if "architectures" in (overrides or {}):
        logger.warning("%s is read as %s, as hf_overrides has it", path, (overrides or {})["architectures"])
    if path.is_dir() and mmproj is not None:
        raise CheckpointError(
            f"{path}: mmproj is for .gguf files, beside which the encoder of images has a file of its own",
            hint='limit_mm_per_prompt {"image": 0, "video": 0} has a model take no pictures',
        )
    if path.is_dir():
        checkpoint = _open_folder(path, overrides or {}, runner=runner, convert=convert, weights=weights)
    elif not weights:
        raise CheckpointError(f"{path}: a model without its weights is a folder with {CONFIG}, not a .gguf file")
    else:
        encoder = None if mmproj is None else Path(mmproj)
        checkpoint = _open_gguf(path, overrides or {}, runner=runner, convert=convert, mmproj=encoder)
    if overrides:
        check_reached(checkpoint.config, overrides, path, convert=checkpoint.convert)
    return checkpoint


def _open_gguf(
    path: Path,
    overrides: Mapping[str, Any],
    *,
    runner: Runner,
    convert: Conversion | None,
    mmproj: Path | None = None,
) -> Checkpoint:
    gguf = GGUFFile.open(path)
    config = hf_config(gguf)
    stacked = with_stacked_experts(hf_tensors(gguf, config), path)
    encoder = encoder_of(gguf, config, mmproj)
    vision: VisionSpec | None = None
    seen: dict[str, StoredTensor] = {}
    if encoder is not None and (read := _vision(encoder.whole, path)) is not None:
        vision = read[0]
        seen, others = vision_tensors(encoder.tensors, vision, encoder.names, path)
        if unknown := next((name for name in others if not name.startswith(SOUND)), None):
            raise CheckpointError(f"{path}: the encoder's file has a tensor that is not known, {unknown!r}")
    made = hf_joined_tensors(gguf, config) | hf_key_numbers(gguf, config)
    tensors = _with_unit_head(stacked | made, config)
    config = overridden(config, overrides)
    modules = sentence_modules(gguf) if runner != "generate" and convert != "classify" else None
    if convert is None and (modules is not None or (runner == "pooling" and not models.makes_vectors(config))):
        convert = "embed"
    pools = models.makes_vectors(config, convert=convert)
    if pools and runner == "generate":
        raise CheckpointError(f"{path}: {_named(config)} does not generate text; leave runner and task at auto")
    if pools and convert == "embed":
        tensors = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    return Checkpoint(
        path,
        config,
        hf_generation_config(gguf),
        MappingProxyType(tensors),
        gguf,
        "gguf",
        convert=convert,
        modules=modules if pools else None,
        whole_config={} if encoder is None else encoder.whole,
        processor_config={} if encoder is None else encoder.processor,
        vision=vision,
        vision_tensors=MappingProxyType(seen),
    )


def _open_folder(
    path: Path, overrides: Mapping[str, Any], *, runner: Runner, convert: Conversion | None, weights: bool
) -> Checkpoint:
    from llmjax.checkpoint.formats.registry import plain_tensors, stored_method  # GGUF files need none of them

    written, native = config_in(path), is_native(path)
    text = models.text_config(written)
    vision = None if text is None else _vision(written, path)
    config = overridden(written if text is None else text, overrides)
    generation = path / GENERATION_CONFIG
    generation_config = read_object(generation) if generation.exists() else {}
    stored: Mapping[str, SafetensorsTensor] = {}
    if weights:
        stored = stored_tensors(path, weights=CONSOLIDATED if native else WEIGHTS)
        stored = renamed(stored, nested=text is not None, path=path) if native else stored
    family = None if text is None else vision_family(written)
    of_adapter: dict[str, SafetensorsTensor] = {}
    if family is not None and family.adapter:
        stored, of_adapter = without_adapters(stored, family.adapter)
    plain = plain_tensors(stored, config, path) if weights else {}
    modules = SentenceModules.read(path) if runner != "generate" and convert != "classify" else None
    if weights:
        of_tokens, plain = token_modules(path, written, plain)
        modules = modules or of_tokens
    seen: dict[str, StoredTensor] = {}
    of_encoder: dict[str, StoredTensor] = {}
    if vision is not None:
        every = with_tokens_apart(plain, vision[0])
        seen, plain = vision_tensors(every, vision[0], vision[1], path)
        of_encoder = {name: tensor for name, tensor in every.items() if name not in plain}
        if not seen and weights:
            logger.warning("%s: the text model alone is read; its encoder of images is missing", path)
            vision = None
    logit_score = LogitScore.read(path) if runner != "generate" and convert != "embed" else None
    if logit_score is not None:
        config = {**config, **logit_score.keys, **overrides}
    if convert is None and (modules is not None or (runner == "pooling" and not models.makes_vectors(config))):
        convert = "embed"
    pools = models.makes_vectors(config, convert=convert)
    if pools and runner == "generate":
        raise CheckpointError(f"{path}: {_named(config)} does not generate text; leave runner and task at auto")
    tensors = _by_model_names(plain, config, path, convert=convert, nested=text is not None)
    if native:
        tensors = halved(tensors, config, path)
        seen, of_encoder = (halved(each, written.get("vision_config", config), path) for each in (seen, of_encoder))
    if pools and modules is not None:
        tensors = {**{name: tensor for name, tensor in tensors.items() if name != HEAD}, **modules.tensors}
    tensors, quantization = _with_unit_head(tensors, config), stored_method(config, path)
    return Checkpoint(
        path,
        config,
        generation_config,
        MappingProxyType(tensors),
        quantization=quantization,
        convert=convert,
        modules=modules if pools else None,
        logit_score=logit_score,
        whole_config=written,
        processor_config=processor_in(path) if native else {},
        vision=None if vision is None else vision[0],
        vision_tensors=MappingProxyType(seen),
        vision_files=MappingProxyType(of_encoder),
        adapter_tensors=MappingProxyType(of_adapter),
    )


def _by_model_names(
    stored: Mapping[str, StoredStack],
    config: Mapping[str, Any],
    path: Path,
    *,
    convert: Conversion | None,
    nested: bool,
    interleaved: bool = False,
) -> dict[str, StoredTensor]:
    """Tensors of a folder by the model's names.

    Args:
        nested: whether the text model is a part of the folder's model.
        interleaved: see `with_stacked_experts`.
    """
    if nested:
        stored = {models.text_name(name): tensor for name, tensor in stored.items()}
    if models.makes_vectors(config, convert=convert):
        stored = with_pooler_names(stored)
    tensors = with_stacked_experts(stored, path, interleaved=interleaved)
    if (names := models.tensor_names(config)) is not None:
        tensors = with_model_names(tensors, names, _model_config(config, path, convert=convert), path)
    return tensors


def _vision(config: Mapping[str, Any], path: Path) -> tuple[VisionSpec, Mapping[str, str]] | None:
    """The encoder of pictures, and its names of tensors; None, and a warning: only the text model is read."""
    family = vision_family(config)
    problem = "images are not supported"
    if family is not None:
        try:
            return family.encoder(family.sight(config)), family.tensors
        except UnsupportedModel as error:
            problem = str(error)
    logger.warning("%s: the text model alone is read; %s", path, problem)
    return None


def _bits(tensor: StoredTensor) -> np.ndarray:
    """The bits of the numbers as bfloat16, u16 of the same shape: most files store it, and a view costs no memory."""
    return tensor.read(np.dtype(ml_dtypes.bfloat16)).view(np.uint16)


def _named(config: Mapping[str, Any]) -> str:
    """The name of the model in a config.json."""
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type"))


def _with_unit_head(tensors: dict[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    if HEAD not in tensors or not models.has_unit_head(config):
        return tensors
    return {**tensors, HEAD: UnitRows(HEAD, (tensors[HEAD],))}


def _model_config(
    config: Mapping[str, Any], path: Path, *, max_model_len: int | None = None, convert: Conversion | None = None
) -> ModelConfig:
    try:
        return models.model_config(config, max_model_len=max_model_len, convert=convert)
    except UnsupportedModel as error:
        raise CheckpointError(f"{path}: {error}") from error
