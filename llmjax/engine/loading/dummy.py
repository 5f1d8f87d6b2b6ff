"""Random weights in the shape of a model, made where they are needed: for speeds and memory without a download.

vLLM's ``--load-format dummy``: of the model only its config is read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax import models
from llmjax.checkpoint import Checkpoint, StoredTensor
from llmjax.checkpoint.experts import ExpertStack
from llmjax.errors import ConfigError
from llmjax.kernels.qtensor import QTensor
from llmjax.quantization.plan import Kept
from llmjax.quantization.rounding import InSituRows
from llmjax.weights.packing import RowSource, RowStack, pack, put

DEVIATION = 0.02  # of the normal numbers that matrices get: what most configs have as initializer_range
BLOCK = 1 << 20  # random numbers that a tensor repeats on the host: each has memory of its own all the same
QUANTIZED_ROWS = 128  # random rows that a quantized matrix repeats


@dataclass(frozen=True, eq=False)
class DummyTensor:
    """A tensor of random numbers as a `StoredTensor`: matrices are normal, vectors ones."""

    name: str
    shape: tuple[int, ...]

    nbytes = 0
    type_name = "dummy"

    def row_source(self) -> RowSource | RowStack | None:
        """None: these are plain numbers."""
        return None

    def read(self, dtype: np.dtype) -> np.ndarray:
        """See `StoredTensor.read`."""
        if len(self.shape) < 2:
            return np.ones(self.shape, dtype)
        size = int(np.prod(self.shape))
        block = np.random.default_rng(_seed(self.name)).standard_normal(min(size, BLOCK), np.float32)
        return np.resize((block * DEVIATION).astype(dtype), self.shape)


def with_dummy_weights(checkpoint: Checkpoint, *, max_model_len: int | None) -> Checkpoint:
    """The checkpoint of a model's config with random weights.

    Args:
        checkpoint: opened without weights.
        max_model_len: see ``llmjax.models.model_config``.

    Raises:
        CheckpointError: the model is not supported.
        ConfigError: the config says that weights are quantized, in a form that no random numbers have.
    """
    if stored := checkpoint.quantization:
        raise ConfigError(
            f"load_format dummy: {checkpoint.path} is stored as {stored}, and random weights are plain numbers; take "
            "the config of the model that is not quantized, and set quantization"
        )
    model = checkpoint.declared_config(max_model_len=max_model_len)
    _, shapes = models.abstract_model(model, dtype=jnp.dtype(jnp.bfloat16), activation_dtype=jnp.dtype(jnp.bfloat16))
    tensors = {name: _tensor(name, tuple(shape.shape)) for name, shape in shapes.items()}
    seen: dict[str, StoredTensor] = {}
    if checkpoint.vision is not None:
        from llmjax.models.vision.functional import abstract_encoder

        types = {"dtype": jnp.dtype(jnp.bfloat16), "activation_dtype": jnp.dtype(jnp.bfloat16)}
        declared = abstract_encoder(checkpoint.vision, **types)[1]
        seen = {name: DummyTensor(name, tuple(shape.shape)) for name, shape in declared.items()}
    return replace(checkpoint, tensors=MappingProxyType(tensors), vision_tensors=MappingProxyType(seen))


def _tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
    if ".experts." in name and len(shape) == 3:
        return ExpertStack(name, tuple(DummyTensor(f"{name}.{expert}", shape[1:]) for expert in range(shape[0])))
    return DummyTensor(name, shape)


def is_dummy(tensor: StoredTensor) -> bool:
    """Whether a tensor is random numbers, or a stack of such."""
    return isinstance(tensor, DummyTensor) or (isinstance(tensor, ExpertStack) and is_dummy(tensor.sources[0]))


def make_on_device(
    name: str,
    kept: Kept,
    shape: jax.ShapeDtypeStruct,
    place: jax.sharding.Sharding,
    *,
    tile: int,
    activations: str,
) -> jax.Array | QTensor:
    """A weight of random numbers that the host neither makes nor sends, but for some rows of quantized ones.

    Args:
        name: decides the numbers.
        kept: the form in which it is kept.
        shape: its shape and dtype.
        place: where it is to be.
        tile, activations: see `QTensor`.
    """
    source = kept.source
    if source is None:
        make = partial(_numbers, shape=shape.shape, dtype=shape.dtype)
        numbers: jax.Array = jax.jit(make, out_shardings=place)(_seed(name))
        return numbers
    matrix = source.first if isinstance(source, RowStack) else source
    assert isinstance(matrix, InSituRows)
    rows = min(source.size_out, -(-QUANTIZED_ROWS // tile) * tile)
    few = replace(matrix, tensor=DummyTensor(name, (rows, source.format.size_in)))
    one = put(few, pack(few, tile=tile), dtype=shape.dtype, activations=activations, device=place)
    outer = (source.count,) if isinstance(source, RowStack) else ()
    repeat = partial(_repeated, outer=outer, tiles=-(-source.size_out // tile))
    return replace(one, words=jax.jit(repeat, out_shardings=place)(one.words), size_out=source.size_out)


def _numbers(seed: Any, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    # Bits of their own kind of generator: threefry would take longer than to read the weights from a disk.
    key = jax.random.key(seed, impl="rbg")
    return (jax.random.normal(key, shape, jnp.bfloat16) * DEVIATION).astype(dtype)


def _repeated(words: jax.Array, *, outer: tuple[int, ...], tiles: int) -> jax.Array:
    """Words of some tiles as often as they fill all of a matrix, or of each one of a stack."""
    return jnp.broadcast_to(words[jnp.arange(tiles) % len(words)], (*outer, tiles, *words.shape[1:]))


def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1  # as JAX takes it: 31 bits
