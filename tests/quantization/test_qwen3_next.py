"""Qwen3-Next with quantized weights: files of other makers' formats, and what is quantized at load.

The matrices of gated delta nets, gated attention and experts stay quantized; convolutions, which are not products, and
routers never are. A model computes with them what it does with the weights that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax import models
from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.experts import with_separate_experts
from llmjax.config import EngineConfig
from llmjax.conversion import quantize
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.qtensor import QTensor
from llmjax.models.layers.state import make_stacks
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN

QWEN3_NEXT = GOLDEN / "qwen3-next"
F32 = np.dtype(np.float32)
BLOCK = 16
TOKENS = 20
SLOW = pytest.mark.slow  # each kind of weight is a program of its own
PLAIN = ("conv1d", "mlp.gate.", "shared_expert_gate", "norm", "A_log", "dt_bias")


@pytest.fixture(scope="module")
def logits() -> Callable[[Any], np.ndarray]:
    """f32 [tokens, V] of a model's weights, over pages of 4 tokens."""
    config = open_checkpoint(QWEN3_NEXT).model_config()
    graph, _ = models.abstract_model(config, dtype=F32, activation_dtype=F32)
    count = TOKENS // 4
    batch = RaggedBatch(
        query_start=jnp.array([0, TOKENS], jnp.int32),
        kv_len=jnp.array([TOKENS], jnp.int32),
        page_table=1 + jnp.arange(count, dtype=jnp.int32)[None],
        kv_index=4 + jnp.arange(TOKENS, dtype=jnp.int32),
    )

    @jax.jit
    def run(params: Any) -> jax.Array:
        kv = make_stacks(config.states, num_pages=dict.fromkeys(config.spans, 1 + count), page_size=4, dtype=F32)
        tokens = jnp.arange(3, 3 + TOKENS, dtype=jnp.int32)
        model = models.merge(graph, params)
        return model.logits(model(tokens, tokens - 3, kv, (batch,) * len(config.spans)).hidden)

    return lambda params: np.asarray(run(params))


def loaded(path: Path, quantization: str | None = None) -> LoadedModel:
    config = EngineConfig(
        model=str(path), quantization=quantization, dtype="float32", activations="float", device="cpu"
    )
    return load_model(config, select_platform(config))


ALL = {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
WIDE = {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"}  # the others' rows may fill no blocks of 32


def check(model: LoadedModel, logits: Callable[[Any], np.ndarray], *, atol: float, products: set[str] = ALL) -> None:
    """Compares with plain weights, and these with the golden ones.

    Args:
        atol: absolute tolerance of weights.
        products: what stays quantized.
    """
    kept = {name for name, weight in model.params.items() if isinstance(weight, QTensor)}
    assert products <= {name.split(".")[-2] for name in kept}
    assert not [name for name in kept if any(part in name for part in PLAIN)]
    plain = {
        name: weight.dequantize() if isinstance(weight, QTensor) else weight for name, weight in model.params.items()
    }
    for name, tensor in open_checkpoint(QWEN3_NEXT).tensors.items():
        np.testing.assert_allclose(plain[name], tensor.read(F32), rtol=0, atol=atol if name in kept else 0)
    expected = logits(plain)
    assert np.isfinite(expected).all() and expected.std() > 1e-2
    np.testing.assert_allclose(logits(model.params), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("scheme", "form", "atol"),
    [
        pytest.param("int4", "gptq", 0.2, marks=SLOW),
        pytest.param("int8", "gptq", 0.02, marks=SLOW),
        pytest.param("int4_asym", "awq", 0.2, marks=SLOW),
        pytest.param("fp8", "compressed-tensors", 0.2, marks=SLOW),
    ],
)
def test_files(tmp_path: Path, logits: Callable[[Any], np.ndarray], scheme: str, form: str, atol: float) -> None:
    group_size = None if scheme in ("fp8", "int8") else 0
    quantize(
        str(QWEN3_NEXT), tmp_path / "out", scheme=scheme, format=form, group_size=group_size, skip_tokenizer_init=True
    )
    assert open_checkpoint(tmp_path / "out").quantization == form
    check(loaded(tmp_path / "out"), logits, atol=atol)


@SLOW
def test_blocks_of_float8(tmp_path: Path, logits: Callable[[Any], np.ndarray]) -> None:
    """Blocks as Qwen publishes them: a scale for each block of a matrix, experts one by one."""
    source, stored = open_checkpoint(QWEN3_NEXT), {}
    for name, tensor in with_separate_experts(source.tensors, mixtral=False).items():
        values = tensor.read(F32)
        if values.ndim != 2 or "embed_tokens" in name or "lm_head" in name or any(part in name for part in PLAIN):
            stored[name] = values
            continue
        scales = np.array(
            [
                [np.abs(values[i : i + BLOCK, j : j + BLOCK]).max() / 448 for j in range(0, values.shape[1], BLOCK)]
                for i in range(0, len(values), BLOCK)
            ],
            np.float32,
        )
        spread = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[: len(values), : values.shape[1]]
        stored[name] = (values / spread).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (tmp_path / "config.json").write_text(json.dumps(source.config | {"quantization_config": settings}))
    check(loaded(tmp_path), logits, atol=0.2)


@pytest.mark.parametrize(
    ("quantization", "products", "atol"),
    [
        pytest.param("int8", ALL, 0.02, marks=SLOW),
        pytest.param("fp8", ALL, 0.2, marks=SLOW),
        pytest.param("int4", ALL, 0.2, marks=SLOW),
        pytest.param("q8_0", WIDE, 0.02, marks=SLOW),
        pytest.param("q4_k_m", WIDE, 0.3, marks=SLOW),
    ],
)
def test_at_load(logits: Callable[[Any], np.ndarray], quantization: str, products: set[str], atol: float) -> None:
    check(loaded(QWEN3_NEXT, quantization), logits, atol=atol, products=products)
