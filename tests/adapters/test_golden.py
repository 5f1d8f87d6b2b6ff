"""Adapters against PEFT: the logits of the golden checkpoints with each golden adapter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.adapters.adapter import Adapter
from llmjax.adapters.merge import merged
from llmjax.adapters.read import AdapterReader
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.config import EngineConfig
from llmjax.engine.adapters.layout import put_adapter
from llmjax.engine.adapters.stacks import AdapterStacks
from llmjax.errors import CheckpointError
from llmjax.kernels.attention import RaggedBatch
from llmjax.models import ModelGraph, abstract_model, merge
from llmjax.models.layers.state import make_stacks
from llmjax.parallel.division import Division
from llmjax.platforms import select_platform
from llmjax.quantization.gguf_export import export_gguf
from tests.checkpoints import ADAPTERS, GOLDEN, POOLED
from tests.levels import at_levels


def base_of(name: str) -> str:
    return (ADAPTERS / name / "base.txt").read_text()


TOLERANCE = 2e-4
PAGE, LENGTH, BUCKET, ROWS = 4, 24, 24, 4
RANK, PLACES = 32, 3
SOON = {"xla_backend_optimization_level": 0}
NAMES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
# Every key once, and each kind of layer; families whose names and layouts are others' are slow tests.
FAST = [
    name
    for name in NAMES
    if base_of(name) in ("llama", "llama-bias", "gpt2", "phi3", "qwen3-moe", "labels", "qwen3-embedding")
]


class Model:
    """A golden checkpoint with places for adapters."""

    def __init__(self, base: str) -> None:
        folder = next(root / base for root in (GOLDEN, POOLED) if (root / base).exists())
        self.checkpoint: Checkpoint = open_checkpoint(folder)
        self.config = self.checkpoint.model_config()
        f32 = jnp.dtype(jnp.float32)
        graph, shapes = abstract_model(self.config, dtype=f32, activation_dtype=f32)
        self.graph: ModelGraph = graph
        platform = select_platform(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
        self.stacks = AdapterStacks.of(
            graph, shapes, places=PLACES, rank=RANK, division=Division(self.config, 1), platform=platform
        )
        self.stacks.make()
        self.params: Mapping[str, Any] = self.read(self.checkpoint)
        self.reader = AdapterReader(self.checkpoint, self.config, self.stacks.whole_shapes, RANK)
        self._put = jax.jit(put_adapter, static_argnames="layout", compiler_options=SOON)
        self._step = jax.jit(self._run, static_argnames="adapted", compiler_options=SOON)

    def load(self, place: int, adapter: Adapter) -> None:
        values = tuple(map(jnp.asarray, self.stacks.values_of(adapter)))
        self.stacks.arrays = self._put(self.stacks.arrays, values, np.int32(place), layout=self.stacks.layout)

    def _run(self, params: Any, arrays: Any, kv: Any, tokens: Any, of: Any, batches: Any, *, adapted: bool) -> Any:
        params = self.stacks.layout.applied(params, arrays, of) if adapted else params
        model = merge(self.graph, params)
        row = jnp.clip(jnp.searchsorted(batches[0].query_start, jnp.arange(BUCKET), side="right") - 1, 0, ROWS - 1)
        start = batches[0].kv_len - jnp.diff(batches[0].query_start)
        position = jnp.arange(BUCKET) - batches[0].query_start[row] + start[row]
        out = model(tokens, position, kv, batches)
        if self.config.pooler is not None:
            return model.headed(model.model.finish(out.hidden), of), out.kv
        return model.logits(out.hidden, places=of), out.kv

    def read(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The model's parameters from a checkpoint of it."""
        return {name: jnp.asarray(checkpoint.tensors[name].read(np.dtype(np.float32))) for name in self.graph.names}

    def run(
        self,
        texts: list[tuple[np.ndarray, int]],
        *,
        chunk: int = BUCKET,
        adapted: bool = True,
        params: Mapping[str, Any] | None = None,
    ) -> list[np.ndarray]:
        """The logits of texts, side by side, each with the adapter of a place.

        Args:
            chunk: most tokens of a text in a step.
            params: other parameters than the model's.
        """
        pages = LENGTH // PAGE
        kv = make_stacks(
            self.config.states,
            num_pages=dict.fromkeys(self.config.spans, 1 + pages * len(texts)),
            page_size=PAGE,
            dtype=jnp.float32,
        )
        tables = np.zeros((ROWS, pages), np.int32)
        for row in range(len(texts)):
            tables[row] = 1 + row * pages + np.arange(pages)
        found: list[list[np.ndarray]] = [[] for _ in texts]
        done = [0] * len(texts)
        while any(at < len(text) for at, (text, _) in zip(done, texts, strict=True)):
            tokens, of, kv_index = np.full(BUCKET, -1, np.int32), np.zeros(BUCKET, np.int32), np.zeros(BUCKET, np.int32)
            starts, lengths, at = np.zeros(ROWS + 1, np.int32), np.zeros(ROWS, np.int32), 0
            room = min(chunk, BUCKET // len(texts))
            for row, (text, place) in enumerate(texts):
                own = text[done[row] : done[row] + room]
                here = slice(at, at + len(own))
                tokens[here], of[here] = own, place
                where = np.arange(done[row], done[row] + len(own))
                kv_index[here] = tables[row][where // PAGE] * PAGE + where % PAGE
                done[row], at = done[row] + len(own), at + len(own)
                starts[row + 1 :], lengths[row] = at, done[row] if len(own) else 0
            batch = RaggedBatch(query_start=starts, kv_len=lengths, page_table=tables, kv_index=kv_index)
            batches = jax.tree.map(jnp.asarray, tuple(batch for _ in self.config.spans))
            logits, kv = self._step(params or self.params, self.stacks.arrays, kv, tokens, of, batches, adapted=adapted)
            for row, part in enumerate(found):
                part.append(np.asarray(logits)[starts[row] : starts[row + 1]])
        return [np.concatenate(part) for part in found]


@lru_cache(maxsize=1)
def model(base: str) -> Model:
    return Model(base)


def adapter(name: str) -> Adapter:
    return model(base_of(name)).reader.read(ADAPTERS / name, name)


def golden(name: str) -> Mapping[str, np.ndarray]:
    with np.load(ADAPTERS / name / "golden.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("chunk", [3, 8])
def test_batches_of_several_adapters_are_what_each_is_alone(chunk: int) -> None:
    """The model as it is and three adapters side by side, in chunks; then another adapter takes a place."""
    own, names = model("llama"), ["plain", "other", "dora"]
    tokens = golden("plain")["tokens"].astype(np.int32)
    texts = [tokens, tokens[::-1].copy(), tokens[4:].copy(), tokens]
    for place, name in enumerate(names, start=1):
        own.load(place, adapter(name))
    together = own.run(list(zip(texts, [0, 3, 2, 1], strict=True)), chunk=chunk)
    expected = own.run([(texts[0], 0)], adapted=False)[0]
    np.testing.assert_allclose(together[0], expected, atol=TOLERANCE, rtol=0)
    for text, place, found in zip(texts[1:], [3, 2, 1], together[1:], strict=True):
        np.testing.assert_allclose(found, own.run([(text, place)])[0], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(together[3], golden("plain")["logits"], atol=TOLERANCE, rtol=0)
    own.load(1, adapter("layers"))
    again = own.run(list(zip(texts, [0, 3, 2, 1], strict=True)), chunk=chunk)
    np.testing.assert_allclose(again[1], together[1], atol=TOLERANCE, rtol=0)
    layers = golden("layers")
    np.testing.assert_allclose(
        own.run([(layers["tokens"].astype(np.int32), 1)])[0], layers["logits"], atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("name", at_levels(sorted(NAMES, key=base_of), fast=FAST, slow=NAMES))
def test_logits_are_those_of_peft(name: str) -> None:
    own, expected = model(base_of(name)), golden(name)
    own.load(2, adapter(name))
    (logits,) = own.run([(expected["tokens"].astype(np.int32), 2)])
    logits = logits[-1] if name in ("labels", "embedder") else logits
    logits = logits / np.linalg.norm(logits) if name == "embedder" else logits  # as the frontend has it
    for kind in ("logits", "merged"):
        if kind in expected:
            assert np.abs(logits - expected[kind]).max() <= TOLERANCE, kind


@pytest.mark.parametrize("name", ["plain", "dora", "biases", "embeddings", "rows", "gpt2", "qwen3-moe"])
def test_logits_of_merged_weights(name: str) -> None:
    own, expected = model(base_of(name)), golden(name)
    params = own.read(merged(own.checkpoint, adapter(name)))
    (logits,) = own.run([(expected["tokens"].astype(np.int32), 0)], adapted=False, params=params)
    for kind in ("logits", "merged"):
        assert np.abs(logits - expected[kind]).max() <= TOLERANCE, kind


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    own = model("llama")
    with pytest.raises(CheckpointError, match=r"_proj\.bias is missing, so the adapter's bias cannot be merged"):
        merged(own.checkpoint, adapter("lora-bias"))
    path = tmp_path / "llama.gguf"
    export_gguf(own.checkpoint, path, scheme="q8_0")
    with pytest.raises(CheckpointError, match="is stored as Q8_0; an adapter merged into quantized weights"):
        merged(open_checkpoint(path), adapter("plain"))
