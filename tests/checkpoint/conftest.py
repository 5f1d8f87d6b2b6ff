"""Tiny models whose linear layers are stored in a quantized format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax import models
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.config import EngineConfig
from llmjax.engine.loading.model import load_model
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.qtensor import QTensor
from llmjax.models.layers.state import make_stacks
from llmjax.platforms import select_platform
from llmjax.weights.packing import pack, put

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
F32 = np.dtype(np.float32)
CONFIGS: Mapping[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN3}

Pack = Callable[[int, int], tuple[dict[str, np.ndarray], np.ndarray]]
"""From outputs and inputs: random stored arrays by what follows the module's name, and the f32 weights they mean."""


class Equal:
    """Comparison of weights, bit for bit but for the payload of what is not a number."""

    def __call__(self, left: np.ndarray, right: np.ndarray) -> bool:
        words = np.dtype(f"u{left.itemsize}")
        nan = np.isnan(left) & np.isnan(right)
        same = left.view(words) == right.view(words) if left.shape == right.shape else False
        return left.dtype == right.dtype and bool(np.all(same | nan))


@pytest.fixture(scope="session")
def same() -> Equal:
    return Equal()


class Packed:
    """Comparison of a tensor's records with what it reads as."""

    def __init__(self) -> None:
        self._dequantize = jax.jit(QTensor.dequantize)  # shared by all tests

    def __call__(self, tensor: StoredTensor) -> QTensor | None:
        """The records, if there are any, after comparing every number but those so small that XLA takes them for 0."""
        source = tensor.row_source()
        if source is None:
            return None
        weight = put(source, pack(source, tile=16), dtype=F32, activations="float", device=jax.devices()[0])
        found, expected = np.asarray(self._dequantize(weight)), tensor.read(F32)
        tiny = np.float32(np.finfo(np.float32).smallest_normal)
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        assert (same | (np.abs(expected) < tiny) & (np.abs(found) < tiny)).all(), tensor.name
        return weight


@pytest.fixture(scope="session")
def packed() -> Packed:
    return Packed()


class Logits:
    """A model run over one short sequence in f32."""

    def __init__(self) -> None:
        self._steps = {family: jax.jit(partial(self.run, config)) for family, config in CONFIGS.items()}

    def __call__(self, family: str, params: Mapping[str, Any]) -> np.ndarray:
        return np.asarray(self._steps[family](params))

    def run(self, settings: dict[str, Any], params: Mapping[str, Any]) -> jax.Array:
        config = models.model_config(settings)
        graph, _ = models.abstract_model(config, dtype=F32, activation_dtype=F32)
        kv = make_stacks(config.states, num_pages=dict.fromkeys(config.spans, 2), page_size=8, dtype=F32)
        tokens = jnp.arange(3, 11, dtype=jnp.int32)
        batch = RaggedBatch(
            query_start=jnp.array([0, 8], jnp.int32),
            kv_len=jnp.array([8], jnp.int32),
            page_table=jnp.ones((1, 1), jnp.int32),
            kv_index=jnp.arange(8, 16, dtype=jnp.int32),
        )
        model = models.merge(graph, params)
        result = model(tokens, tokens - 3, kv, (batch,) * len(config.spans))
        return model.logits(result.hidden)


@pytest.fixture(scope="session")
def logits() -> Logits:
    return Logits()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Programs are compiled for one family; with the other, which adds norms of heads, by slow tests."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if parameters.get("family") == "qwen3" and "check_logits" in item.fixturenames:
        item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def check_logits(family: str, logits: Logits) -> Callable[[Checkpoint], None]:
    """Compares a model whose layers stay quantized with one that has their dequantized weights."""

    def check(checkpoint: Checkpoint) -> None:
        config = EngineConfig(model=str(checkpoint.path), dtype="float32", activations="float")
        loaded = load_model(config, select_platform(config))
        kept = [name for name, weight in loaded.params.items() if isinstance(weight, QTensor)]
        assert len(kept) == 7
        plain = {name: jnp.asarray(checkpoint.tensors[name].read(F32)) for name in loaded.params}
        expected = logits(family, plain)
        assert np.isfinite(expected).all() and expected.std() > 1e-3
        assert np.abs(logits(family, loaded.params) - expected).max() < 1e-3 * np.abs(expected).max()

    return check


@pytest.fixture
def check_model(tmp_path: Path, family: str, same: Equal, packed: Packed) -> Callable[..., Checkpoint]:
    """Builds a whole checkpoint, opens it and compares every tensor."""

    def check(
        pack: Pack,
        settings: dict[str, Any] | None,
        *,
        file: str | None = None,
        head: bool = False,
        records: bool = True,
    ) -> Checkpoint:
        """
        Args:
            pack: makes a layer.
            settings: settings of the quantization: in config.json, or in `file`.
            head: whether lm_head is quantized too.
            records: whether layers stay quantized, rather than being dequantized.
        """
        _, shapes = models.abstract_model(models.model_config(CONFIGS[family]), dtype=F32, activation_dtype=F32)
        rng = np.random.default_rng(0)
        stored: dict[str, np.ndarray] = {}
        expected: dict[str, np.ndarray] = {}
        for name, like in shapes.items():
            if "_proj." in name or (head and name == "lm_head.weight"):
                parts, expected[name] = pack(*like.shape)
                stored |= {name.removesuffix(".weight") + part: array for part, array in parts.items()}
            else:
                stored[name] = rng.standard_normal(like.shape).astype(ml_dtypes.bfloat16)
                expected[name] = stored[name].astype(np.float32)
        save_file(stored, tmp_path / "model.safetensors")
        config = dict(CONFIGS[family])
        if file is None:
            config["quantization_config"] = settings
        else:
            (tmp_path / file).write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(tmp_path)
        assert set(checkpoint.tensors) == set(shapes)
        for name, like in shapes.items():
            tensor = checkpoint.tensors[name]
            assert tensor.shape == like.shape and tensor.name == name
            assert same(tensor.read(np.dtype(np.float32)), expected[name]), name
            rounded = expected[name].astype(ml_dtypes.bfloat16)
            assert same(tensor.read(np.dtype(ml_dtypes.bfloat16)), rounded), name
        for name in ("mlp.up_proj", "mlp.down_proj"):
            weight = packed(checkpoint.tensors[f"model.layers.0.{name}.weight"])
            assert (weight is not None) == records
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == sum(a.nbytes for a in stored.values())
        return checkpoint

    return check


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading go step by step even where a matrix is small."""
    monkeypatch.setattr("llmjax.checkpoint.formats.quantized.TILE", 1)
