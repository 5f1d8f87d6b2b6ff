"""PEFT folders: names and shapes of the tensors in adapter_model.safetensors, and what their numbers mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmjax.adapters.adapter import Floats
from llmjax.adapters.parts import StoredParts
from llmjax.adapters.peft_config import PeftConfig
from llmjax.adapters.product import Factors, Product
from llmjax.adapters.reference import WEIGHTS
from llmjax.checkpoint.safetensors import SafetensorsTensor, open_safetensors
from llmjax.errors import CheckpointError

PREFIX = re.compile(r"^(?:base_model\.model\.|_orig_mod\.)*")
WRAPPERS = re.compile(r"\.(?:_orig_mod|modules_to_save\.default)(?=\.)|\.default(?=\.weight$|\.bias$|$)")
LOW_RANK = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
STACKS = re.compile(r"(?P<experts>.+\.experts)(?P<inner>(?:\.base_layer)*)")
BASE = ".base_layer"


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a base's experts, by which PEFT's tensors of stacks are told apart."""

    count: int
    hidden: int
    inner: int


def read_peft(folder: Path, experts: ExpertSizes | None) -> StoredParts:
    """Reads the adapter in a PEFT folder.

    Args:
        experts: sizes of the base's experts; None: it has none.

    Raises:
        CheckpointError: a file is missing, malformed, or holds what is not understood or supported.
    """
    path = folder / WEIGHTS
    return parts_of(PeftConfig.read(folder), open_safetensors(path), path, experts)


def parts_of(
    config: PeftConfig, tensors: Mapping[str, SafetensorsTensor], path: Path, experts: ExpertSizes | None
) -> StoredParts:
    """What the tensors of an adapter are, by its configuration.

    Args:
        path: where they are, for messages.
        experts: see `read_peft`.

    Raises:
        CheckpointError: a tensor is not understood or supported.
    """
    return _Reader(config, tensors, path, experts).parts()


class _Reader:
    def __init__(
        self,
        config: PeftConfig,
        tensors: Mapping[str, SafetensorsTensor],
        path: Path,
        experts: ExpertSizes | None,
    ) -> None:
        self._config, self._path, self._experts = config, path, experts
        self._whole: dict[str, SafetensorsTensor] = {}
        self._by_module: dict[str, dict[str, SafetensorsTensor]] = {}
        for name, tensor in tensors.items():
            plain = WRAPPERS.sub("", PREFIX.sub("", name))
            if (found := LOW_RANK.fullmatch(plain)) is not None:
                part = found["part"].removesuffix(".weight")
                own = self._by_module.setdefault(found["module"], {})
                if part in own:
                    raise CheckpointError(f"{path}: tensor {name!r} is there twice, under other names")
                own[part] = tensor
            else:
                self._whole[plain.replace(f"{BASE}.", ".")] = tensor

    def parts(self) -> StoredParts:
        products: dict[str, Product] = {}
        rows: dict[str, tuple[tuple[int, ...], Floats]] = {}
        for module, own in self._by_module.items():
            if (delta := own.pop("token_adapter.trainable_tokens_delta", None)) is not None:
                rows[f"{module}.weight"] = self._rows(module, delta)
            if not own:
                continue
            stack = STACKS.fullmatch(module)
            product = self._product(module, own) if stack is None else self._stack(stack, own)
            if product.name in products:
                raise CheckpointError(f"{self._path}: {product.name} has two adapters")
            products[product.name] = product
        for name in self._whole:
            self._check_whole(name)
        return StoredParts(products=products, replaced=self._whole, rows=rows)

    def _product(self, module: str, own: dict[str, SafetensorsTensor]) -> Product:
        config, embeds = self._config, "lora_embedding_A" in own
        kind = "embedding_" if embeds else ""
        a, b = self._taken(module, own, f"lora_{kind}A"), self._taken(module, own, f"lora_{kind}B")
        rank = self._rank(module, a.shape[0], b.shape[1])
        b = b * np.float32(config.scale_of(module, rank=rank))
        magnitude, bias = self._vector(own, "lora_magnitude_vector"), self._vector(own, "lora_B.bias")
        if bias is not None:
            bias = bias * np.float32(config.scale_of(module, rank=rank))
        if (config.dora and magnitude is None) or (embeds and magnitude is not None):
            raise CheckpointError(f"{self._path}: {module}: use_dora without magnitudes, or of an embedding")
        for part in own:
            raise CheckpointError(f"{self._path}: {module}.{part} does not go with the other tensors of {module}")
        factors = Factors(a=a, b=b, magnitude=magnitude, bias=bias)
        if embeds:  # as a matrix [vocabulary, hidden], whose rows are looked up
            factors = Factors(a=np.ascontiguousarray(b.T), b=np.ascontiguousarray(a.T))
        return Product.of(f"{module}.weight", factors, self._path)

    def _stack(self, found: re.Match[str], own: dict[str, SafetensorsTensor]) -> Product:
        """A stack of experts: ``a`` [E * r, in], expert after expert, and ``b`` [out, r * E], rank after rank."""
        sizes, module = self._experts, found.string
        if sizes is None:
            raise CheckpointError(f"{self._path}: {module} has an adapter, but the model has no experts")
        a, b = self._taken(module, own, "lora_A"), self._taken(module, own, "lora_B")
        for part in own:
            raise CheckpointError(f"{self._path}: {module}.{part} is not supported of experts")
        shapes = {
            (sizes.hidden, 2 * sizes.inner): "gate_up_proj",
            (sizes.inner, sizes.hidden): "down_proj",
        }
        projection = shapes.get((a.shape[1], b.shape[0]))
        if projection is None or a.shape[0] % sizes.count or a.shape[0] != b.shape[1]:
            raise CheckpointError(
                f"{self._path}: {module} has lora_A of shape {list(a.shape)} and lora_B of {list(b.shape)}, which are "
                f"not of {sizes.count} experts of {sizes.hidden} x {sizes.inner}: the adapter is for another model"
            )
        rank = a.shape[0] // sizes.count
        name = f"{found['experts']}.{projection}"
        scale = np.float32(self._config.scale_of(name, rank=self._rank(name, rank, rank)))
        by_expert = b.reshape(len(b), rank, sizes.count).transpose(2, 0, 1)
        factors = Factors(a=a.reshape(sizes.count, rank, -1), b=np.ascontiguousarray(by_expert) * scale)
        return Product.of(name, factors, self._path)

    def _rank(self, module: str, of_a: int, of_b: int) -> int:
        if of_a != of_b or of_a != self._config.rank_of(module):
            raise CheckpointError(
                f"{self._path}: {module} has lora_A of rank {of_a} and lora_B of rank {of_b}; {self._config.path.name} "
                f"says {self._config.rank_of(module)}"
            )
        return of_a

    def _taken(self, module: str, own: dict[str, SafetensorsTensor], part: str) -> Floats:
        tensor = own.pop(part, None)
        if tensor is None:
            raise CheckpointError(f"{self._path}: {module}.{part} is missing, but {', '.join(own) or 'more'} is there")
        if len(tensor.shape) not in (2, 4, 5) or 0 in tensor.shape:
            raise CheckpointError(
                f"{self._path}: tensor {tensor.name!r} has shape {list(tensor.shape)}; adapters of matrices have 2 "
                "dimensions, and those of convolutions of images and videos 4 and 5"
            )
        # Encoders of images take the axes of a convolution's kernel as one.
        return self._finite(tensor).reshape(tensor.shape[0], -1)

    def _vector(self, own: dict[str, SafetensorsTensor], part: str) -> Floats | None:
        tensor = own.pop(part, None)
        return None if tensor is None else self._finite(tensor).reshape(-1)

    def _finite(self, tensor: SafetensorsTensor) -> Floats:
        values = tensor.read(np.dtype(np.float32))
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self._path}: tensor {tensor.name!r} holds what is not a finite number")
        return values

    def _rows(self, module: str, tensor: SafetensorsTensor) -> tuple[tuple[int, ...], Floats]:
        table = self._config.token_rows
        rows = next((rows for end, rows in table.items() if not end or f".{module}".endswith(f".{end}")), None)
        if rows is None or len(tensor.shape) != 2 or len(rows) != tensor.shape[0]:
            raise CheckpointError(
                f"{self._path}: tensor {tensor.name!r} of shape {list(tensor.shape)} does not go with "
                f"trainable_token_indices of {self._config.path.name}"
            )
        return tuple(rows), self._finite(tensor)

    def _check_whole(self, name: str) -> None:
        """Refuses a tensor that the configuration gives no reason for."""
        module, _, kind = name.rpartition(".")
        # PEFT stores adapted embeddings and heads as well, in case the vocabulary has grown.
        adapted = kind == "weight" and module in self._by_module
        if self._is_saved(name) or (kind == "bias" and self._config.biases) or adapted or self._is_tied(name):
            return
        raise CheckpointError(
            f"{self._path}: tensor {self._whole[name].name!r} is not understood: it belongs to no low-rank change, and "
            f"{self._config.path.name} names it neither in modules_to_save nor in bias"
        )

    def _is_saved(self, name: str) -> bool:
        module = name.rpartition(".")[0]
        return any(
            module == one or module.endswith(f".{one}") or f".{one}." in f".{name}" for one in self._config.saved
        )

    def _is_tied(self, name: str) -> bool:
        """Whether a tensor is a copy of a saved one, whose module shares it."""
        own = self._whole[name]
        return self._config.ties and any(
            self._is_saved(other)
            and tensor.shape == own.shape
            and np.array_equal(self._floats(tensor), self._floats(own))
            for other, tensor in self._whole.items()
        )

    @staticmethod
    def _floats(tensor: SafetensorsTensor) -> Floats:
        return tensor.read(np.dtype(np.float32))
