"""A GGUF file as a Hugging Face checkpoint: config, names, and what the converter changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, GGUFFile, open_checkpoint
from llmjax.checkpoint.gguf.model import hf_config
from llmjax.checkpoint.inspection import inspect_model
from llmjax.errors import CheckpointError

F32 = np.dtype(np.float32)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 48, 20

KEYS: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "block_count": 1,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
GEMMA_KEYS = KEYS | {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": 512,
    "rope.freq_base": 1e6,
}


def original_weights(head_dim: int = HEAD_DIM, layers: int = 1) -> dict[str, np.ndarray]:
    """Weights in Hugging Face's layout under the stems that GGUF uses."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * head_dim),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], extra: dict[str, Any] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {**{f"{arch}.{name}": value for name, value in keys.items()}, **(extra or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def llama(path: Path, *, arch: str = "llama", tensors: dict[str, np.ndarray] | None = None, **keys: Any) -> Checkpoint:
    found = KEYS | {name.replace("__", "."): value for name, value in keys.items()}
    return open_checkpoint(write(path, arch, found, original_weights() | (tensors or {})))


def refuse(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        llama(path, **options)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to query and key rows: halves of a head become interleaved."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def test_llama_config(path: Path) -> None:
    checkpoint = llama(path, vocab_size=VOCAB, rope__dimension_count=HEAD_DIM)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    }
    assert checkpoint.generation_config == {}
    assert checkpoint.gguf is not None and checkpoint.gguf.path == path


@pytest.mark.parametrize("value", [[1, 2], [0.5, 1.5], ["a", "b"], "text", True, 0.5], ids=repr)
def test_values_of_any_type_are_read_or_refused(path: Path, value: Any) -> None:
    """Arrays are refused where a number is expected, too."""
    own = [*KEYS, "attention.key_length", "attention.sliding_window", "rope.scaling.type", "expert_count"]
    general = ["general.file_type", "general.sampling.temp", "split.count", "split.no", "tokenizer.ggml.bos_token_id"]
    for key in (*own, *general):
        keys, extra = (KEYS | {key: value}, {}) if key in own else (KEYS, {key: value})
        write(path, "llama", keys, original_weights(), extra)
        try:
            inspect_model(path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


def test_overrides_replace_keys_of_the_config(path: Path) -> None:
    llama(path)
    config = open_checkpoint(path, overrides={"rope_theta": 1.0, "attention_bias": False}).config
    assert (config["rope_theta"], config["attention_bias"], config["vocab_size"]) == (1.0, False, VOCAB)


@pytest.mark.parametrize("quantize", [None, gguf.GGMLQuantizationType.Q8_0])
def test_llama_query_and_key_rows_return_to_their_order(path: Path, quantize: gguf.GGMLQuantizationType | None) -> None:
    weights = original_weights()
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    query, key = weights["blk.0.attn_q.weight"], weights["blk.0.attn_k.weight"]
    stored = {"blk.0.attn_q.weight": permuted(query, HEADS), "blk.0.attn_k.weight": permuted(key, KV_HEADS)}
    if quantize is not None:
        query, key = (gguf.quants.dequantize(gguf.quants.quantize(side, quantize), quantize) for side in (query, key))
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in KEYS.items():
        getattr(writer, "add_uint32" if isinstance(value, int) else "add_float32")(f"llama.{name}", value)
    for name, tensor in (weights | stored | {"blk.0.attn_q.bias": permuted(bias, HEADS)}).items():
        if quantize is not None and name in stored:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = open_checkpoint(path).tensors
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.weight"].read(F32), query)
    assert np.array_equal(tensors["model.layers.0.self_attn.k_proj.weight"].read(F32), key)
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.bias"].read(F32), bias)
    assert np.array_equal(tensors["model.layers.0.self_attn.v_proj.weight"].read(F32), weights["blk.0.attn_v.weight"])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fused_query_key_value_is_split(path: Path, arch: str) -> None:
    weights = original_weights(16)
    sides = {stem: weights.pop(f"blk.0.attn_{stem}.weight") for stem in "qkv"}
    biases = {stem: np.arange(len(side), dtype=np.float32) for stem, side in sides.items()}
    stored, stored_biases = dict(sides), dict(biases)
    if arch == "llama":
        for stem, heads in (("q", HEADS), ("k", KV_HEADS)):
            stored[stem], stored_biases[stem] = permuted(sides[stem], heads), permuted(biases[stem], heads)
    weights["blk.0.attn_qkv.weight"] = np.concatenate(list(stored.values()))
    weights["blk.0.attn_qkv.bias"] = np.concatenate(list(stored_biases.values()))
    keys = {name: value for name, value in GEMMA_KEYS.items() if arch == "gemma3" or "sliding" not in name}
    checkpoint = open_checkpoint(write(path, arch, keys, weights))
    for stem in "qkv":
        module = f"model.layers.0.self_attn.{stem}_proj"
        assert np.array_equal(checkpoint.tensors[f"{module}.weight"].read(F32), sides[stem])
        assert np.array_equal(checkpoint.tensors[f"{module}.bias"].read(F32), biases[stem])
    assert checkpoint.config.get("attention_bias", True) is True


def test_fused_query_key_value_of_wrong_size(path: Path) -> None:
    fused = {"blk.0.attn_qkv.weight": np.zeros((63, HIDDEN), np.float32)}
    refuse(path, r"'blk.0.attn_qkv.weight' has 63 rows, not 64 for queries, keys and values", tensors=fused)


def test_names_and_tied_head(path: Path) -> None:
    head = np.ones((VOCAB, HIDDEN), np.float32)
    checkpoint = llama(path, tensors={"output.weight": head, "odd.weight": head, "rope_freqs.weight": np.ones(4, "f4")})
    assert checkpoint.config["tie_word_embeddings"] is False
    layer = "model.layers.0"
    assert set(checkpoint.tensors) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"{layer}.self_attn.{side}_proj.weight" for side in "qkvo"),
        *(f"{layer}.mlp.{side}_proj.weight" for side in ("gate", "up", "down")),
        f"{layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        "odd.weight",  # unknown: seen under its own name
    }
    assert checkpoint.tensors["lm_head.weight"].shape == (VOCAB, HIDDEN)
    assert checkpoint.tensors["lm_head.weight"].type_name == "F32"
    assert checkpoint.tensors["lm_head.weight"].nbytes == VOCAB * HIDDEN * 4


@pytest.mark.parametrize("name", ["attn_q_norm.weight", "post_ffw_norm.weight", "ssm_in.weight", "odd.scale_of"])
def test_tensors_of_layers_that_the_architecture_has_none_of(path: Path, name: str) -> None:
    """The file is of another model than its keys can say, as with norms that a converter has renamed and kept."""
    with pytest.raises(CheckpointError, match=f"tensor 'blk.0.{name}' is not understood: LlamaForCausalLM has none"):
        llama(path, tensors={f"blk.0.{name}": np.ones(4, np.float32)})


def test_mistral_is_a_llama_with_a_window(path: Path) -> None:
    config = llama(path, attention__sliding_window=64).config
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["sliding_window"] == 64


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay(path: Path, arch: str) -> None:
    norm = np.arange(HEAD_DIM, dtype=np.float32)
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    extra = {"blk.0.attn_q_norm.weight": norm} if arch == "qwen3" else {"blk.0.attn_q.bias": bias}
    checkpoint = llama(path, arch=arch, tensors=extra, attention__key_length=HEAD_DIM)
    assert checkpoint.config["architectures"] == [f"{arch.title()}ForCausalLM"]
    assert checkpoint.config["model_type"] == arch
    assert ("attention_bias" in checkpoint.config) == (arch == "qwen3")
    query = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].read(F32)
    assert np.array_equal(query, original_weights()["blk.0.attn_q.weight"])
    name, value = ("q_norm.weight", norm) if arch == "qwen3" else ("q_proj.bias", bias)
    assert np.array_equal(checkpoint.tensors[f"model.layers.0.self_attn.{name}"].read(F32), value)


def gemma(path: Path, *, layers: int = 1, **keys: Any) -> Checkpoint:
    weights = original_weights(16, layers)
    for layer in range(layers):
        for stem in ("attn_q_norm", "attn_k_norm"):
            weights[f"blk.{layer}.{stem}.weight"] = np.full(16, 1.5, np.float32)
        for stem in ("post_attention_norm", "post_ffw_norm"):
            weights[f"blk.{layer}.{stem}.weight"] = np.full(HIDDEN, 0.25, np.float32)
    found = GEMMA_KEYS | {"block_count": layers} | {name.replace("__", "."): value for name, value in keys.items()}
    return open_checkpoint(write(path, "gemma3", found, weights))


def test_gemma3_config(path: Path) -> None:
    config = gemma(path, rope__scaling__type="linear", rope__scaling__factor=8.0).config
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["model_type"] == "gemma3_text"
    assert config["head_dim"] == 16 and config["query_pre_attn_scalar"] == 16
    assert config["hidden_activation"] == "gelu_pytorch_tanh" and "hidden_act" not in config
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["attn_logit_softcapping"] is None and config["final_logit_softcapping"] is None


def test_gemma3_newer_keys(path: Path) -> None:
    config = gemma(
        path,
        layers=3,
        attention__sliding_window_pattern=[True, True, False],
        rope__freq_base_swa=5000.0,
        final_logit_softcapping=30.0,
        attention__head_count=[HEADS] * 3,
        attention__key_length_swa=16,
    ).config
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config["rope_local_base_freq"], config["final_logit_softcapping"]) == (5000.0, 30.0)
    assert config["num_attention_heads"] == HEADS
    with pytest.raises(CheckpointError, match="sliding_window_pattern' has 2 elements for 3 layers"):
        gemma(path, layers=3, attention__sliding_window_pattern=[True, False])


def test_gemma3_27b_scales_by_hidden_size_over_heads(path: Path) -> None:
    assert gemma(path, layers=62).config["query_pre_attn_scalar"] == HIDDEN // HEADS
    assert gemma(path, layers=2, attention__scale=168**-0.5).config["query_pre_attn_scalar"] == 168


def test_gemma3_norms_lose_the_one(path: Path) -> None:
    tensors = gemma(path).tensors
    weights = original_weights(16)
    layer = "model.layers.0"
    for name, stored in {
        "model.norm": weights["output_norm.weight"],
        f"{layer}.input_layernorm": weights["blk.0.attn_norm.weight"],
        f"{layer}.pre_feedforward_layernorm": weights["blk.0.ffn_norm.weight"],
        f"{layer}.post_attention_layernorm": np.full(HIDDEN, 0.25),
        f"{layer}.post_feedforward_layernorm": np.full(HIDDEN, 0.25),
        f"{layer}.self_attn.q_norm": np.full(16, 1.5),
    }.items():
        assert np.array_equal(tensors[f"{name}.weight"].read(F32), (stored - 1).astype(np.float32)), name
    norm = tensors["model.norm.weight"].read(np.dtype(ml_dtypes.bfloat16))
    assert np.array_equal(norm, (weights["output_norm.weight"] - 1).astype(ml_dtypes.bfloat16))
    assert np.array_equal(tensors["model.embed_tokens.weight"].read(F32), weights["token_embd.weight"])


def test_rope_divisors(path: Path) -> None:
    divisors = np.array([1, 1, 2.5, 8], np.float32)
    assert llama(path, tensors={"rope_freqs.weight": divisors}).config["rope_scaling"] == {
        "rope_type": "custom",
        "inv_freq_divisors": [1.0, 1.0, 2.5, 8.0],
    }
    refuse(path, r"'rope_freqs.weight' has shape \[5\], not \[4\]", tensors={"rope_freqs.weight": np.ones(5, "f4")})
    refuse(path, "not finite and above 0", tensors={"rope_freqs.weight": np.array([1, 0, 1, 1], "f4")})


def test_rope_scalings(path: Path) -> None:
    assert llama(path, rope__scaling__type="none", rope__scaling__factor=4.0).config["rope_scaling"] is None
    assert llama(path, rope__scale_linear=4.0).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert llama(path, rope__scaling__factor=0.0).config["rope_scaling"] is None
    yarn: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 1024,
    }
    expected = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert llama(path, **yarn).config["rope_scaling"] == expected
    scaled = llama(path, **yarn, rope__scaling__attn_factor=0.5).config["rope_scaling"]
    assert scaled["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    # Files of Olmo 3: config.json's attention_factor, and the factor that goes with another one on top.
    own = {"rope__scaling__yarn_attn_factor": 1.25}
    assert llama(path, **yarn, **own).config["rope_scaling"] == {**expected, "attention_factor": 1.25}
    both = llama(path, **yarn, **own, rope__scaling__attn_factor=0.5).config["rope_scaling"]
    assert both["attention_factor"] == pytest.approx(0.625)


def test_granite_of_a_hybrid_family_without_recurrent_layers(path: Path) -> None:
    """Files of Granite 4 Micro, whose config.json has sizes of recurrent layers too."""
    sizes = {"ssm__conv_kernel": 4, "ssm__state_size": 256, "ssm__group_count": 1, "ssm__inner_size": 64}
    keys = sizes | {"ssm__time_step_rank": 4, "expert_count": 0, "expert_used_count": 0, "logit_scale": 2.0}
    found = llama(path, arch="granite", **keys, expert_shared_feed_forward_length=FFN).config
    assert found["model_type"] == "granite" and found["intermediate_size"] == FFN and found["logits_scaling"] == 2.0
    refuse(path, "_length' is 40; .* with 48 only", arch="granite", expert_shared_feed_forward_length=40)


def test_epsilon_of_the_other_kind_of_norm(path: Path) -> None:
    """It is harmless beside the right one, and stands for it where that one is missing."""
    assert llama(path, attention__layer_norm_epsilon=0.5).config["rms_norm_eps"] == 1e-5
    keys = {key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"}
    written = write(path, "llama", keys | {"attention.layer_norm_epsilon": 1e-3}, original_weights())
    assert open_checkpoint(written).config["rms_norm_eps"] == 1e-3


def test_longrope(path: Path) -> None:
    factors = {"rope_factors_long.weight": np.array([1, 2, 3, 4], "f4"), "rope_factors_short.weight": np.ones(4, "f4")}
    scaling = llama(
        path,
        tensors=factors,
        rope__scaling__type="longrope",
        rope__scaling__attn_factor=1.25,
        rope__scaling__original_context_length=2048,
    ).config["rope_scaling"]
    assert scaling == {
        "rope_type": "longrope",
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    }
    refuse(path, "'rope_factors_long.weight' is missing", rope__scaling__type="longrope")


def test_partial_rotary(path: Path) -> None:
    assert llama(path, rope__dimension_count=4).config["partial_rotary_factor"] == 0.5
    refuse(path, "rope.dimension_count' is 10, not an even", rope__dimension_count=10)


def test_special_tokens_and_sampler_settings(path: Path) -> None:
    tokens = {"bos": 1, "eos": 2, "eot": 7, "eom": 2, "padding": VOCAB}
    extra: dict[str, Any] = {f"tokenizer.ggml.{kind}_token_id": token for kind, token in tokens.items()}
    extra |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    checkpoint = open_checkpoint(write(path, "llama", KEYS, original_weights(), extra))
    assert checkpoint.config["bos_token_id"] == 1 and checkpoint.config["eos_token_id"] == [2, 7]
    assert "pad_token_id" not in checkpoint.config  # beyond the embedding
    assert checkpoint.generation_config == {"do_sample": True, "temperature": 0.5, "top_k": 20}
    write(path, "llama", KEYS, original_weights(), {"tokenizer.ggml.eos_token_id": VOCAB})
    with pytest.raises(CheckpointError, match="eos_token_id' is 20, not one of 20 tokens"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("types", "expected"), [({"f4"}, "float32"), ({"f4", "f2"}, "float16"), ({"f4", "i2"}, "bfloat16")]
)
def test_dtype(path: Path, types: set[str], expected: str) -> None:
    extra = {kind: np.ones((2, 2), kind) for kind in types}
    assert llama(path, tensors=extra).config["torch_dtype"] == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": 2}, "block_count is 2, but the tensors are of 1 layers"),
        ({"block_count": 2**32 - 1}, "block_count is 4294967295, but the tensors are of 1 layers"),
        ({"embedding_length": 0}, "'llama.embedding_length' is 0, not a whole number of at least 1"),
        ({"embedding_length": "32"}, "'llama.embedding_length' is '32', not a whole number"),
        ({"embedding_length": 33}, "'llama.attention.key_length' is missing, and 33 cannot be divided among 4"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "is -1.0, not a finite number"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "is nan, not a finite number"),
        ({"rope__freq_base": math.inf}, "is inf, not a finite number"),
        ({"attention__head_count_kv": [2, 1]}, "'llama.attention.head_count_kv' differs from layer to layer"),
        ({"attention__value_length": 16}, "'llama.attention.value_length' is 16; .* with 8 only"),
        ({"attention__scale": 0.5}, "'llama.attention.scale' is 0.5"),
        ({"attention__causal": False}, "'llama.attention.causal' is False; .* with True only"),
        ({"expert_count": 8}, "tensor 'blk.0.ffn_gate_inp.weight' is missing"),
        ({"logit_scale": 2.0}, "'llama.logit_scale' is not understood"),
        ({"rope__scaling__type": "ntk"}, "'llama.rope.scaling.type' is 'ntk'; supported are"),
        ({"rope__scaling__type": 3}, "'llama.rope.scaling.type' is 3, not a string"),
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor' is 2.0, which scaling 'linear' has no use for"),
    ],
)
def test_keys_that_make_no_sense(path: Path, keys: dict[str, Any], message: str) -> None:
    refuse(path, message, **keys)


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention.head_count"])
def test_missing_keys(path: Path, key: str) -> None:
    write(path, "llama", {name: value for name, value in KEYS.items() if name != key}, original_weights())
    with pytest.raises(CheckpointError, match=f"key 'llama.{key}' is missing"):
        open_checkpoint(path)


def test_unknown_architecture_and_missing_embedding(path: Path) -> None:
    refuse(
        path,
        r"architecture 'rwkv6' is not supported; supported are llama, .*, qwen2, qwen3vl, qwen3, gemma",
        arch="rwkv6",
    )
    refuse(path, "architecture 'qwen35next' is not supported; the nearest in name is qwen3next", arch="qwen35next")
    weights = original_weights()
    del weights["token_embd.weight"]
    write(path, "llama", KEYS, weights)
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd.weight' is missing"):
        open_checkpoint(path)


def test_two_tensors_of_one_name(path: Path) -> None:
    twin = {"blk.00.attn_norm.weight": np.ones(HIDDEN, "f4")}
    refuse(path, r"'blk.0.attn_norm.weight' and 'blk.00.attn_norm.weight' are both", tensors=twin)


def test_query_rows_that_do_not_fit_the_heads(path: Path) -> None:
    odd = {"blk.0.attn_q.weight": np.ones((12, HIDDEN), "f4")}
    refuse(path, r"'blk.0.attn_q.weight' has 12 rows, not an even number for 4 heads", tensors=odd)


def matches_reference(checkpoint: Checkpoint, *names: str) -> None:
    assert checkpoint.gguf is not None
    for name in names:
        tensor = checkpoint.gguf.tensors[name]
        values = gguf.quants.dequantize(tensor.raw, gguf.GGMLQuantizationType[tensor.type_name])
        assert np.array_equal(tensor.read(F32).ravel(), values), name


@pytest.mark.real_model
def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert [config[key] for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")] == [
        576,
        30,
        3,
        49152,
    ]
    assert (config["rms_norm_eps"], config["rope_theta"], config["eos_token_id"]) == (1e-5, 1e5, 2)
    assert sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()) == 134_515_008
    assert all(name.startswith("model.") for name in checkpoint.tensors)
    matches_reference(checkpoint, "token_embd.weight", "blk.0.attn_v.weight", "blk.29.ffn_down.weight")


@pytest.mark.real_model
def test_gemma3_270m(gemma3_path: Path) -> None:
    file = GGUFFile.open(gemma3_path)
    config = hf_config(file)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert [config[key] for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size")] == [
        640,
        18,
        256,
        262144,
    ]
    assert (config["sliding_window"], config["query_pre_attn_scalar"], config["bos_token_id"]) == (512, 256, 2)
    checkpoint = open_checkpoint(gemma3_path)
    assert all(name.startswith("model.") for name in checkpoint.tensors)
    matches_reference(checkpoint, "blk.0.attn_q.weight", "blk.0.attn_output.weight", "blk.0.ffn_down.weight")
