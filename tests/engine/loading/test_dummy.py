"""``load_format dummy``: weights of the right shapes, types and sizes, without a file of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.loading.dummy import DEVIATION, DummyTensor
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.errors import CheckpointError, ConfigError
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import select_platform
from llmjax.settings import parse_text, settings_of
from tests.checkpoints import GOLDEN, SEEING


def config_of(name: str, folder: Path) -> Path:
    """A folder that has a golden checkpoint's config alone."""
    shutil.copy(GOLDEN / name / "config.json", folder)
    return folder


def loaded(path: Path, **settings: object) -> LoadedModel:
    config = EngineConfig(model=str(path), device="cpu", **settings)  # type: ignore[arg-type]
    return load_model(config, select_platform(config), progress=False)


def kinds(model: LoadedModel) -> dict[str, object]:
    """What programs see of the weights: shapes, types and formats."""
    return {
        name: (
            [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weight)],
            (weight.format, weight.size_out, weight.activations) if isinstance(weight, QTensor) else None,
        )
        for name, weight in model.params.items()
    }


@pytest.mark.parametrize("quantization", [None, "q4_k", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_programs_are_those_of_the_model_itself(name: str, quantization: str | None, tmp_path: Path) -> None:
    real = loaded(GOLDEN / name, quantization=quantization)
    dummy = loaded(config_of(name, tmp_path), quantization=quantization, load_format="dummy")
    assert kinds(dummy) == kinds(real)
    assert dummy.digest == real.digest and dummy.num_bytes == real.num_bytes


@pytest.mark.parametrize("quantization", [None, "q8_0", "fp8"])
def test_matrices_are_normal_vectors_ones_and_logits_differ(quantization: str | None, tmp_path: Path) -> None:
    model = loaded(config_of("llama", tmp_path), quantization=quantization, load_format="dummy", dtype="float32")
    for name, weight in model.params.items():
        values = np.asarray(weight.dequantize() if isinstance(weight, QTensor) else weight, np.float32)
        if values.ndim == 1:
            assert (values == 1).all(), name
        else:
            assert values.std() == pytest.approx(DEVIATION, rel=0.2) and abs(values.mean()) < DEVIATION / 5, name
    first, second = (
        np.asarray(weight.dequantize() if isinstance(weight, QTensor) else weight)
        for weight in (model.params[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2))
    )
    assert not np.allclose(first, second)


def test_it_generates(tmp_path: Path) -> None:
    llm = LLM(
        str(config_of("qwen3-moe", tmp_path)),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=1 << 20,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in ([1, 2, 3], [4, 5, 6, 7])]
    llm.close()
    assert all(len(output.token_ids) == 4 and np.isfinite(output.cumulative_logprob) for output in outputs)
    assert outputs[0].cumulative_logprob != outputs[1].cumulative_logprob


def test_what_several_devices_divide_is_read_from_the_host() -> None:
    tensor = DummyTensor("a", (300, 500))
    values = tensor.read(np.dtype(jnp.bfloat16))
    assert values.shape == (300, 500) and values.astype(np.float32).std() == pytest.approx(DEVIATION, rel=0.05)
    assert np.array_equal(values, tensor.read(np.dtype(jnp.bfloat16)))
    assert not np.array_equal(values, DummyTensor("b", (300, 500)).read(np.dtype(jnp.bfloat16)))
    assert DummyTensor("norm", (7,)).read(np.dtype(np.float32)).tolist() == [1.0] * 7


def test_a_quantized_config_and_a_gguf_file_are_refused(tmp_path: Path) -> None:
    path = config_of("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": gptq}))
    with pytest.raises(ConfigError, match=r"load_format dummy: .* is stored as gptq, and random weights are plain"):
        loaded(path, load_format="dummy")
    (file := tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"m.gguf: a model without its weights is a folder with config.json"):
        loaded(file, load_format="dummy")


def test_vllm_s_other_formats_are_recognized_by_the_files() -> None:
    setting = settings_of(EngineConfig)["load_format"]
    assert {parse_text(setting, word, source="s") for word in ("auto", "safetensors", "gguf")} == {"auto"}
    assert parse_text(setting, "dummy", source="s") == "dummy"


def test_an_encoder_of_images_is_random_too(tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(SEEING / "qwen2-vl" / name, tmp_path)
    made, real = loaded(tmp_path, load_format="dummy").encoder, loaded(SEEING / "qwen2-vl").encoder
    assert made is not None and real is not None
    assert {name: (one.shape, one.dtype) for name, one in made.params.items()} == {
        name: (one.shape, one.dtype) for name, one in real.params.items()
    }
