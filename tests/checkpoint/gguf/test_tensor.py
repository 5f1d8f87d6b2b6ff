"""GGUF matrices that stay quantized: rows as they are packed, and whole tiny models."""

from __future__ import annotations

import mmap
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.checkpoint import GGUFFile, open_checkpoint
from llmjax.config import EngineConfig
from llmjax.engine.loading.model import load_model
from llmjax.errors import CheckpointError
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import select_platform
from llmjax.weights.ggml.types import GGML_TYPES
from llmjax.weights.packing import pack
from tests.levels import at_levels

F32 = np.dtype(np.float32)
BY_NAME = {block.name: block for block in GGML_TYPES.values()}
MIXES = (
    ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0"),
    ("Q2_K", "Q3_K", "IQ4_XS", "Q5_1", "TQ2_0", "MXFP4"),
    ("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "Q4_1", "NVFP4"),
)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 64, 256, 40


def random_blocks(rng: np.random.Generator, name: str, rows: int, columns: int) -> np.ndarray:
    """Stored rows whose weights are around 0.1, as those of a model."""
    block = BY_NAME[name]
    assert block.layout is not None
    raw = rng.integers(0, 256, (rows, columns // block.elems * block.nbytes), dtype=np.uint8)
    fields = raw.reshape(-1, block.nbytes).view(block.layout)[:, 0]
    if name == "MXFP4":
        fields["e"] = rng.integers(121, 125, len(fields))
        return raw
    if name == "NVFP4":
        fields["d"] = rng.integers(16, 24, fields["d"].shape)
        return raw
    for field in ("d", "m", "dmin"):
        if field in (block.layout.names or ()):
            fields[field] = rng.uniform(0.5, 1, len(fields))
    values = np.empty((rows, columns), np.float32)
    form = block.row_format(columns)
    assert form is not None
    block.quantized_rows(raw, form).dequantize(values)
    for field in ("d", "m", "dmin"):
        if field in (block.layout.names or ()):
            fields[field] *= np.float16(0.1 / values.std())
    return raw


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], *, arch: str = "llama", **keys: Any) -> Path:
    """A file of tensors by name, each with its type."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{arch}.{name.replace('__', '.')}", value)
    for name, (kind, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(
    path: Path, arch: str, mix: tuple[str, ...], more: Mapping[str, tuple[str, np.ndarray]] = MappingProxyType({})
) -> Path:
    rng = np.random.default_rng(0)
    kinds = cycle(mix)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"attn_q": q, "attn_k": kv, "attn_v": kv, "attn_output": HIDDEN, "ffn_gate": HIDDEN, "ffn_up": HIDDEN}
    sizes = {"token_embd": VOCAB, "output": VOCAB, **{f"blk.0.{name}": rows for name, rows in matrices.items()}}
    sizes["blk.0.ffn_down"] = HIDDEN
    tensors = {}
    for name, rows in sizes.items():
        kind = next(kinds)
        tensors[f"{name}.weight"] = kind, random_blocks(rng, kind, rows, HIDDEN)
    norms = {"output_norm": HIDDEN, "blk.0.attn_norm": HIDDEN, "blk.0.ffn_norm": HIDDEN}
    if arch == "qwen3":
        norms |= {"blk.0.attn_q_norm": HEAD_DIM, "blk.0.attn_k_norm": HEAD_DIM}
    tensors |= {f"{name}.weight": ("F32", np.ones(size, np.float32)) for name, size in norms.items()}
    return write(
        path,
        tensors | dict(more),
        arch=arch,
        context_length=64,
        embedding_length=HIDDEN,
        block_count=1,
        feed_forward_length=HIDDEN,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
        attention__key_length=HEAD_DIM,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__freq_base=10000.0,
    )


@pytest.mark.parametrize(
    ("arch", "mix"),
    at_levels(
        [(arch, mix) for arch in ("llama", "qwen3") for mix in MIXES],
        fast=[("llama", mix) for mix in MIXES],
        slow=[("qwen3", mix) for mix in MIXES],
    ),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_logits_equal_those_of_dequantized_weights(
    tmp_path: Path, arch: str, mix: tuple[str, ...], logits: Any
) -> None:
    path = model(tmp_path / "model.gguf", arch, mix)
    checkpoint = open_checkpoint(path)
    config = EngineConfig(model=str(path), dtype="float32", activations="float")
    loaded = load_model(config, select_platform(config))
    assert sum(isinstance(weight, QTensor) for weight in loaded.params.values()) == 9
    plain = {name: jnp.asarray(checkpoint.tensors[name].read(F32)) for name in loaded.params}
    run = jax.jit(partial(logits.run, checkpoint.config))
    expected = np.asarray(run(plain))
    assert np.isfinite(expected).all() and expected.std() > 1e-2
    assert np.abs(np.asarray(run(loaded.params)) - expected).max() < 1e-3 * np.abs(expected).max()


def test_rows_of_permuted_heads_are_packed_in_their_order(tmp_path: Path, packed: Callable[..., Any]) -> None:
    checkpoint = open_checkpoint(model(tmp_path / "model.gguf", "llama", MIXES[0]))
    query = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    stored = checkpoint.gguf.tensors["blk.0.attn_q.weight"] if checkpoint.gguf else None
    assert stored is not None and not np.array_equal(query.read(F32), stored.read(F32))
    assert packed(query) is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["d", "dmin"])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, field: str, value: float) -> None:
    raw = random_blocks(np.random.default_rng(0), "Q4_K", 8, 512)
    raw.reshape(-1, 144).view(BY_NAME["Q4_K"].layout or "V")[field][11] = value
    path = write(tmp_path / "x.gguf", {"a.weight": ("Q4_K", raw)})
    source = GGUFFile.open(path).tensors["a.weight"].row_source()
    assert source is not None
    with pytest.raises(CheckpointError, match=r"x\.gguf: tensor 'a\.weight' has scales that are infinite or not"):
        pack(source, tile=16)


def test_plain_numbers_vectors_and_stacks_have_no_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "plain": ("F16", np.zeros((4, 32), np.float16)),
        "vector": ("Q8_0", random_blocks(rng, "Q8_0", 1, 64)[0]),
        "stack": ("Q8_0", random_blocks(rng, "Q8_0", 6, 64).reshape(2, 3, -1)),
    }
    file = GGUFFile.open(write(tmp_path / "x.gguf", tensors))
    assert {name: file.tensors[name].shape for name in tensors} == {
        "plain": (4, 32),
        "vector": (64,),
        "stack": (2, 3, 64),
    }
    assert all(file.tensors[name].row_source() is None for name in tensors)


def test_a_scale_of_a_whole_tensor_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "x.gguf", "llama", ("NVFP4",), {"blk.0.attn_q.scale": ("F32", np.ones(1, np.float32))})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.scale' scales 'blk\.0\.attn_q\.weight', which is not"):
        open_checkpoint(path)


@given(start=st.integers(0, 299), length=st.integers(1, 300), seed=st.none() | st.integers(0, 9))
@settings(max_examples=30)
def test_taken_rows_stay_readable(rows_file: GGUFFile, start: int, length: int, seed: int | None) -> None:
    tensor = rows_file.tensors["a.weight"]
    expected = np.random.default_rng(1).integers(0, 256, (300, 340), dtype=np.uint8)
    chosen: slice | np.ndarray = slice(start, min(start + length, 300))
    if seed is not None:
        chosen = np.random.default_rng(seed).integers(0, 300, length)
    taken = tensor.take_rows(chosen)
    assert np.array_equal(taken, expected[chosen]) and taken.flags.writeable
    assert np.array_equal(tensor.raw.reshape(300, -1), expected)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    raw = np.random.default_rng(1).integers(0, 256, (300, 340), dtype=np.uint8)
    return GGUFFile.open(write(tmp_path_factory.mktemp("rows") / "x.gguf", {"a.weight": ("Q8_0", raw)}))


def test_rows_are_taken_where_the_system_takes_no_advice(rows_file: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = next(iter(rows_file.tensors.values()))
    expected = tensor.take_rows(slice(0, 2))
    monkeypatch.delattr(mmap, "MADV_DONTNEED")
    assert np.array_equal(tensor.take_rows(slice(0, 2)), expected)


def test_packing_takes_little_memory_beyond_the_result(tmp_path: Path) -> None:
    raw = np.zeros((16384, 8 * 144), np.uint8)
    source = GGUFFile.open(write(tmp_path / "x.gguf", {"a.weight": ("Q4_K", raw)})).tensors["a.weight"].row_source()
    assert source is not None
    tracemalloc.start()
    words = pack(source, tile=16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words.ctypes.data % 64 == 0
    assert words.nbytes > 19e6 and peak < words.nbytes + 12e6
