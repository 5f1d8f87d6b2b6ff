"""Reads adapters in terms of a model: every tensor of their files becomes a change of one of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llmjax import models
from llmjax.adapters.adapter import Adapter, Floats, LowRank, summed
from llmjax.adapters.gguf import read_gguf
from llmjax.adapters.own import own_config
from llmjax.adapters.parts import StoredParts
from llmjax.adapters.peft import ExpertSizes, parts_of, read_peft
from llmjax.adapters.product import Factors, factors_of
from llmjax.adapters.reference import MOST_BYTES, files_of
from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models import Experts, ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters for one model; several threads may.

    Attributes:
        base: the model's files.
        model: what they describe.
        shapes: shapes of the parameters that adapters may change, [out, in] or [experts, out, in].
        most_rank: the largest rank.
        of_encoder: shapes of the parameters of the encoder of images that adapters may change, by its names.
    """

    base: Checkpoint
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    most_rank: int
    of_encoder: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def read(self, path: Path, digest: str) -> Adapter:
        """Reads the adapter in a PEFT folder or a GGUF file; at the model's own path, that among its tensors.

        Args:
            digest: identifies its content.

        Raises:
            CheckpointError: it is missing, malformed, too large, for another model, or has a part that is not
                supported.
        """
        among = bool(self.base.adapter_tensors) and path == self.base.path
        if not among and (size := sum(file.stat().st_size for file in files_of(path))) > MOST_BYTES:
            raise CheckpointError(f"{path}: an adapter of {size} bytes, where {MOST_BYTES} are the most")
        if path.is_file():
            return Adapter(
                digest=digest, parts=self._whole([self._text.products(read_gguf(path, self.base), path)], path)
            )
        stored = (
            parts_of(own_config(self.base), self.base.adapter_tensors, path, self._experts)
            if among
            else read_peft(path, self._experts)
        )
        seeing, products = self.base.of_encoder(stored.products)
        seeing_replaced, replaced = self.base.of_encoder(stored.replaced)
        found = [
            self._text.products(self.base.by_model_names(products), path),
            self._text.replaced(self.base.by_model_names(replaced), path),
            self._rows(stored, path),
        ]
        of_encoder = [self._encoder.products(seeing, path), self._encoder.replaced(seeing_replaced, path)]
        return Adapter(digest=digest, parts=self._whole(found, path), of_encoder=self._whole(of_encoder, path))

    def _whole(self, found: Sequence[Mapping[str, LowRank]], path: Path) -> dict[str, LowRank]:
        """The sums of what the tensors of each kind change."""
        parts = {}
        for name in dict.fromkeys(name for part in found for name in part):
            part = summed([own[name] for own in found if name in own])
            if part.rank > self.most_rank:
                raise CheckpointError(
                    f"{path}: the adapter of {name} has rank {part.rank}; max_lora_rank is {self.most_rank}"
                )
            parts[name] = part
        return parts

    @cached_property
    def _text(self) -> _Part:
        unit = models.has_unit_head(self.base.config)
        return _Part(self.base.tensors, self.shapes, has_unit_head=unit)

    @cached_property
    def _encoder(self) -> _Part:
        return _Part(self.base.vision_tensors, self.of_encoder)

    @cached_property
    def _experts(self) -> ExpertSizes | None:
        mixtures = [layer.feed_forward for layer in self.model.layers if isinstance(layer.feed_forward, Experts)]
        if not mixtures:
            return None
        return ExpertSizes(mixtures[0].count, mixtures[0].latent or self.model.hidden_size, mixtures[0].inner)

    def _rows(self, stored: StoredParts, path: Path) -> dict[str, LowRank]:
        """Changes of single rows of the embedding and of the head; a tied head has those of the embedding."""
        found = dict[str, LowRank]()
        for stored_name, (numbers, values) in stored.rows.items():
            name = self._vocabulary_name(stored_name)
            if name is None or values.shape[1] != self.shapes[name][1]:
                raise CheckpointError(
                    f"{path}: rows of {stored_name} are replaced, which is supported of the embedding and the head"
                )
            size = self.shapes[name][0]
            if max(numbers) >= size:
                raise CheckpointError(f"{path}: trainable_token_indices has {max(numbers)}; there are {size} tokens")
            chosen = np.zeros((size, len(numbers)), np.float32)
            chosen[list(numbers), range(len(numbers))] = 1
            change = values - self._text.of_base(name)[list(numbers)]
            if name == HEAD:
                found[HEAD] = LowRank(a=change, b=chosen)
                continue
            found[EMBEDDING] = LowRank(a=_transposed(chosen), b=_transposed(change))
            if self.model.tie_word_embeddings and HEAD in self.shapes:
                found.setdefault(HEAD, LowRank(a=change, b=chosen))
        return found

    def _vocabulary_name(self, name: str) -> str | None:
        """The model's name of a tensor, if it is the embedding or the head and may be adapted."""
        base = self.base.tensors.get(EMBEDDING)
        renamed = self.base.by_model_names({} if base is None else {name: base})  # type: ignore[dict-item]
        return next((one for one in (EMBEDDING, HEAD) if one in renamed and one in self.shapes), None)


@dataclass(frozen=True)
class _Part:
    """A part of a model: the text model, or the encoder of images.

    Attributes:
        tensors: those of its files, by its names.
        shapes: see `AdapterReader`.
        has_unit_head: whether the rows of its head are scaled to length one.
    """

    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]]
    has_unit_head: bool = False

    def products(self, tensors: Mapping[str, StoredTensor], path: Path) -> dict[str, LowRank]:
        """Low-rank changes from products by the model's names."""
        found = {}
        for name, tensor in tensors.items():
            factors = factors_of(tensor)
            assert factors is not None, "only products were given"
            self._check(name, factors.shape, path)
            if name == EMBEDDING:
                found[name] = LowRank(a=_transposed(factors.b), b=_transposed(factors.a))
            else:
                found[name] = self._low_rank(name, factors)
        return found

    def _low_rank(self, name: str, factors: Factors) -> LowRank:
        part = LowRank(a=factors.a, b=factors.b, bias=factors.bias)
        if factors.magnitude is None:
            return part
        # V = W + b a is scaled by rows to the magnitudes, which are of the adapted matrix (Liu et al. 2024,
        # arXiv:2402.09353).
        lengths = np.linalg.norm(self.of_base(name) + part.delta(), axis=1)
        gain = factors.magnitude / lengths
        return replace(part, b=part.b * gain[:, None], gain=gain)

    def replaced(self, tensors: Mapping[str, StoredTensor], path: Path) -> dict[str, LowRank]:
        """Changes that make the base's tensors those that the adapter has in their place."""
        found: dict[str, LowRank] = {}
        for name, tensor in tensors.items():
            values = tensor.read(np.dtype(np.float32))
            before = self.of_base(name, path)
            if values.shape != before.shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has shape {list(values.shape)}, that of the model {list(before.shape)}; "
                    "adapters that change the vocabulary's size are not supported"
                )
            if not np.isfinite(values).all():
                raise CheckpointError(f"{path}: tensor {name!r} holds what is not a finite number")
            change = values - before
            if not change.any():
                continue
            weight = f"{name.removesuffix('.bias')}.weight"
            if name.endswith(".bias") and len(self.shapes.get(weight, ())) == 2:
                part = _bias_alone(change, self.shapes[weight])
                found[weight] = summed([*([found[weight]] if weight in found else []), part])
            elif len(values.shape) == 2:
                self._check(name, values.shape, path)
                part = _of_rows(change)
                part = LowRank(a=_transposed(part.b), b=_transposed(part.a)) if name == EMBEDDING else part
                found[name] = summed([*([found[name]] if name in found else []), part])
            else:
                raise CheckpointError(
                    f"{path}: tensor {name!r} takes the place of the model's, which is supported of matrices and of "
                    "their biases; merge the adapter into its model with PEFT"
                )
        return found

    def _check(self, name: str, shape: tuple[int, ...], path: Path) -> None:
        expected = self.shapes.get(name)
        if expected is None:
            raise CheckpointError(
                f"{path}: {name} has an adapter, but is not a matrix that the model only multiplies with; the "
                "adapter is for another model, or has to be merged into it"
            )
        if tuple(shape) != tuple(expected):
            raise CheckpointError(
                f"{path}: the adapter of {name} is of a matrix {list(shape)}, the model's is {list(expected)}: it is "
                "for another model"
            )
        if name == HEAD and self.has_unit_head:
            raise CheckpointError(f"{path}: the rows of {name} are scaled to length one, so it can have no adapter")

    def of_base(self, name: str, path: Path | None = None) -> Floats:
        tied = name == HEAD and name not in self.tensors
        tensor = self.tensors.get(EMBEDDING if tied else name)
        if tensor is None:
            raise CheckpointError(f"{path}: {name!r} takes the place of a tensor that the model does not have")
        return tensor.read(np.dtype(np.float32))


def _transposed(values: Floats) -> Floats:
    return np.ascontiguousarray(values.T)


def _of_rows(change: Floats) -> LowRank:
    """A change of a matrix as factors, of a rank of as many rows as change, or of its columns where these are fewer."""
    rows, size_in = np.flatnonzero(change.any(axis=1)), change.shape[1]
    if len(rows) > size_in:
        return LowRank(a=np.eye(size_in, dtype=np.float32), b=change)
    chosen = np.zeros((len(change), len(rows)), np.float32)
    chosen[rows, range(len(rows))] = 1
    return LowRank(a=np.ascontiguousarray(change[rows]), b=chosen)


def _bias_alone(change: Floats, shape: tuple[int, ...]) -> LowRank:
    return LowRank(a=np.zeros((0, shape[1]), np.float32), b=np.zeros((shape[0], 0), np.float32), bias=change)
