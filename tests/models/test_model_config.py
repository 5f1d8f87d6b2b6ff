"""config.json of every family: what is read, what a missing key means, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmjax.kernels.activations import CLAMPED_SWIGLU
from llmjax.models import (
    MLP,
    RMS,
    Attention,
    ChannelDelta,
    Dense,
    ExpertGroups,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    Layer,
    LayerSpec,
    LearnedPositions,
    LightningAttention,
    Mamba,
    Mamba2,
    Parallel,
    PostNorm,
    PreNorm,
    Sandwich,
    SharedExpert,
    ShortConvolution,
    UnsupportedModel,
    has_unit_head,
    model_config,
    tensor_names,
    text_config,
)
from llmjax.models.families import ARCHITECTURES
from llmjax.models.layers.alibi import alibi_slopes
from llmjax.models.layers.altup import AltUp, LowRank
from llmjax.models.layers.chunks import Sharpening
from llmjax.models.layers.picture import Picture
from llmjax.models.layers.rope_lengths import LongFrequencies
from llmjax.models.layers.state import AllTokens, LastState, LatentKV
from llmjax.models.registry import LACKING
from tests.checkpoints import GOLDEN

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


# What a family cannot do without beside SMALL.
CHATGLM = {"num_layers": 4, "ffn_hidden_size": 96, "padded_vocab_size": 100, "kv_channels": 16, "seq_length": 512}
NEEDED: dict[str, dict[str, Any]] = {
    "BaiChuanForCausalLM": {"num_key_value_heads": 4},
    "BaichuanForCausalLM": {"num_key_value_heads": 4},
    "ChatGLMForConditionalGeneration": CHATGLM,
    "ChatGLMModel": CHATGLM,
    "ApertusForCausalLM": {"rope_scaling": None},
    "BambaForCausalLM": {"mamba_n_heads": 8},
    "DbrxForCausalLM": {"num_key_value_heads": 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*-"},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "KimiLinearForCausalLM": {"num_key_value_heads": 4},
    "MiniCPMForCausalLM": {"head_dim": None},
    "DeepseekForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "DeepseekV32ForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "GlmMoeDsaForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "Ministral3ForCausalLM": {"rope_scaling": {"rope_type": "default"}},
    "Dots1ForCausalLM": {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8, "moe_topk": [2, 2]},
    "MiniCPM3ForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "num_experts_per_tok": 2},
    "GPTBigCodeForCausalLM": {"num_key_value_heads": 1},
    "GptOssForCausalLM": {"rope_scaling": {"rope_type": "default"}},
    "GPTJForCausalLM": {"num_key_value_heads": 4, "rotary_dim": 8},
    **{
        family: {"num_key_value_heads": 4}
        for family in (
            "BloomForCausalLM",
            "GPT2LMHeadModel",
            "GPTNeoXForCausalLM",
            "MPTForCausalLM",
            "MptForCausalLM",
            "OPTForCausalLM",
        )
    },
}


def config(architecture: str, **keys: Any) -> Any:
    return model_config({"architectures": [architecture], **SMALL, **keys})


def windows_of(got: Any) -> list[int | None]:
    return [layer.mixer.window for layer in got.layers]


def sparse_layers(got: Any) -> list[bool]:
    return [isinstance(layer.feed_forward, Experts) for layer in got.layers]


def theta_of(rope: Any, head_dim: int) -> float:
    return float(rope.inv_freq[1]) ** (-head_dim / 2)


def test_llama_defaults() -> None:
    got = model_config({"model_type": "llama"})
    assert (got.vocab_size, got.hidden_size, got.num_layers, got.max_position) == (32000, 4096, 32, 2048)
    attention = Attention(heads=32, kv_heads=32, head_dim=128, scale=128**-0.5, rope=got.ropes[0])
    mlp, norm = GatedMLP(inner=11008, activation="silu"), RMS(1e-6)
    assert set(got.layers) == {LayerSpec(mixer=attention, feed_forward=mlp, norm=norm, residual=PreNorm())}
    assert (got.norm, got.embedding_scale, got.tie_word_embeddings) == (norm, 1.0, False)
    assert (got.bos_token_id, got.eos_token_ids) == (1, (2,))
    assert got.windows == (None,)
    assert theta_of(got.ropes[0], 128) == pytest.approx(1e4, rel=1e-4)


def test_llama_3_1() -> None:
    got = model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "eos_token_id": [128001, 128008, 128009],
            "bos_token_id": 128000,
            "torch_dtype": "bfloat16",
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        }
    )
    assert got.eos_token_ids == (128001, 128008, 128009)
    assert (got.layers[0].mixer.kv_heads, got.max_position, got.dtype) == (8, 131072, "bfloat16")
    assert got.ropes[0].inv_freq[-1] == pytest.approx(500000.0 ** (-126 / 128) / 8, rel=1e-6)


def test_llama_biases_and_nulls() -> None:
    got = config(
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        head_dim=None,
        num_key_value_heads=None,
        eos_token_id=None,
        rope_scaling=None,
        dtype="torch.float16",
    )
    attention, mlp = got.layers[0].mixer, got.layers[0].feed_forward
    assert attention.qkv_bias and attention.o_bias and mlp.bias
    assert (attention.head_dim, attention.kv_heads, got.eos_token_ids, got.dtype) == (16, 4, (), "float16")


def test_mistral_window() -> None:
    kv = {"num_key_value_heads": 2}
    assert config("MistralForCausalLM", **kv).windows == (4096,)  # a missing key
    assert config("MistralForCausalLM", **kv, sliding_window=None).windows == (None,)
    assert windows_of(config("MistralForCausalLM", **kv, sliding_window=128)) == [128] * 4
    nemo = config("MistralForCausalLM", **kv, sliding_window=None, head_dim=40)
    assert (nemo.layers[0].mixer.head_dim, nemo.hidden_size) == (40, 64)
    assert model_config({"model_type": "mistral"}).layers[0].mixer.kv_heads == 8
    mixed = config(
        "MistralForCausalLM", **kv, sliding_window=8, layer_types=["full_attention", "sliding_attention"] * 2
    )
    assert windows_of(mixed) == [None, 8, None, 8]


def test_qwen2_windows() -> None:
    kv = {"num_key_value_heads": 2}
    plain = config("Qwen2ForCausalLM", **kv)
    assert plain.layers[0].mixer.qkv_bias and not plain.layers[0].mixer.o_bias and plain.windows == (None,)
    assert config("Qwen2ForCausalLM", **kv, sliding_window=64).windows == (None,)  # not switched on
    got = config("Qwen2ForCausalLM", **kv, use_sliding_window=True, sliding_window=64, max_window_layers=3)
    assert windows_of(got) == [None, None, None, 64]
    assert got.windows == (None, 64)
    assert [got.group_of(i) for i in range(4)] == [0, 0, 0, 1]
    late = config("Qwen2ForCausalLM", **kv, use_sliding_window=True, sliding_window=64)
    assert late.windows == (None,)  # max_window_layers 28
    named = ["sliding_attention", "full_attention"] * 2
    listed = config("Qwen2ForCausalLM", **kv, use_sliding_window=True, sliding_window=64, layer_types=named)
    assert windows_of(listed) == [64, None, 64, None]
    assert [listed.group_of(i) for i in range(4)] == [1, 0, 1, 0]


def test_qwen2_yarn_extends_the_context() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 512, "type": "yarn"}
    assert config("Qwen2ForCausalLM", num_key_value_heads=2, rope_scaling=yarn).max_position == 2048


def test_qwen3() -> None:
    got = config("Qwen3ForCausalLM", num_key_value_heads=2)
    attention = got.layers[0].mixer
    assert (attention.head_dim, attention.qk_norm, attention.qkv_bias) == (128, RMS(1e-6), False)
    assert attention.scale == 128**-0.5 and got.eos_token_ids == ()
    assert config("Qwen3ForCausalLM", num_key_value_heads=2, attention_bias=True).layers[0].mixer.o_bias


def test_gemma3() -> None:
    got = config("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=32, query_pre_attn_scalar=168)
    assert windows_of(got) == [32] * 5 + [None, 32]
    assert got.windows == (None, 32)
    norm = RMS(1e-6, plus_one=True)
    for layer in got.layers:
        assert (layer.norm, layer.mixer.qk_norm, layer.residual) == (norm, norm, Sandwich())
        assert (layer.mixer.scale, layer.mixer.head_dim) == (168**-0.5, 256)
        assert layer.feed_forward.activation == "gelu_pytorch_tanh"
    assert (got.norm, got.embedding_scale, got.tie_word_embeddings) == (norm, 8.0, True)
    assert theta_of(got.layers[0].mixer.rope, 256) == pytest.approx(1e4, rel=1e-3)
    assert theta_of(got.layers[5].mixer.rope, 256) == pytest.approx(1e6, rel=1e-3)


def test_gemma3_rope_in_both_styles() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    keys = {"num_hidden_layers": 6, "sliding_window": 32, "head_dim": 32}
    old = config("Gemma3ForCausalLM", **keys, rope_scaling=linear, rope_theta=5e5, rope_local_base_freq=2e4)
    nested = {
        "full_attention": {**linear, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert config("Gemma3ForCausalLM", **keys, rope_parameters=nested) == old
    full, local = (old.layers[i].mixer.rope for i in (5, 0))
    np.testing.assert_allclose(full.inv_freq, 5e5 ** (-np.arange(0, 32, 2) / 32) / 8, rtol=1e-6)
    np.testing.assert_allclose(local.inv_freq, 2e4 ** (-np.arange(0, 32, 2) / 32), rtol=1e-6)


def test_mixtral_defaults() -> None:
    got = model_config({"model_type": "mixtral"})
    experts = Experts(count=8, per_token=2, inner=14336, activation="silu", normalize=True)
    assert {layer.feed_forward for layer in got.layers} == {experts} and got.windows == (None,)
    assert (got.norm.eps, theta_of(got.ropes[0], 128)) == (1e-5, pytest.approx(1e6, rel=1e-4))


def test_qwen2_moe_defaults() -> None:
    got = model_config({"model_type": "qwen2_moe"})
    experts = Experts(
        count=60, per_token=4, inner=1408, activation="silu", normalize=False, shared=SharedExpert(inner=5632)
    )
    assert {layer.feed_forward for layer in got.layers} == {experts}
    attention = got.layers[0].mixer
    assert (got.num_layers, got.hidden_size, attention.kv_heads) == (24, 2048, 16)
    assert attention.qkv_bias and attention.qk_norm is None


def test_qwen3_moe_defaults_and_dense_layers() -> None:
    got = model_config(
        {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    )
    experts = Experts(count=128, per_token=8, inner=768, activation="silu", normalize=False)
    assert got.layers[1].feed_forward == experts
    assert got.layers[0].feed_forward == GatedMLP(inner=6144, activation="silu")
    assert sparse_layers(got) == [False, True, False, False, False, True]
    attention = got.layers[0].mixer
    assert (attention.qk_norm, attention.qkv_bias, attention.head_dim) == (RMS(1e-6), False, 64)


def test_deepseek_v2() -> None:
    got = model_config({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "first_k_dense_replace": 1})
    assert (got.vocab_size, got.hidden_size, got.num_layers, got.max_position) == (102400, 4096, 32, 2048)
    attention = got.layers[0].mixer
    assert isinstance(attention, LatentAttention) and {layer.mixer for layer in got.layers} == {attention}
    assert (attention.heads, attention.q_rank, attention.kv_rank) == (32, 1536, 512)
    assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == (128, 64, 128)
    assert (attention.scale, attention.rope.interleaved, attention.norm) == (192**-0.5, True, RMS(1e-6))
    assert attention.state == LatentKV(dim=576, value_dim=512)
    assert got.layers[0].feed_forward == GatedMLP(inner=11008, activation="silu")
    shared = SharedExpert(inner=2814, name="shared_experts", gated=False)
    assert {layer.feed_forward for layer in got.layers[1:]} == {
        Experts(count=64, per_token=6, inner=1407, activation="silu", normalize=False, shared=shared)
    }


def test_deepseek_v2_lite() -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
    got = model_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "rope_scaling": {**scaling, "original_max_position_embeddings": 4096},
            "max_position_embeddings": 163840,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        }
    )
    attention, experts = got.layers[0].mixer, got.layers[0].feed_forward
    gain = 0.1 * 0.707 * np.log(40) + 1
    assert attention.q_rank is None and attention.scale == pytest.approx(192**-0.5 * gain**2, rel=1e-12)
    assert attention.rope.attention_factor == 1.0
    assert (experts.groups, experts.scaling) == (ExpertGroups(8, 3), 16.0)


def test_the_number_of_experts_has_two_names() -> None:
    for key in ("num_experts", "num_local_experts"):
        for architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
            got = config(architecture, num_key_value_heads=4, num_experts_per_tok=1, **{key: 5})
            assert {layer.feed_forward.count for layer in got.layers} == {5}


def test_windows_of_qwen_with_experts() -> None:
    keys = {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert windows_of(config("Qwen2MoeForCausalLM", **keys)) == [9, None, 9, None]
    assert windows_of(config("Qwen3MoeForCausalLM", **keys)) == [9] * 4


def test_starcoder2() -> None:
    got = model_config({"model_type": "starcoder2"})
    assert (got.hidden_size, got.num_layers, got.tie_word_embeddings, got.windows) == (3072, 30, True, (None,))
    attention = got.layers[0].mixer
    assert (attention.heads, attention.kv_heads, attention.qkv_bias, attention.o_bias) == (24, 2, True, True)
    assert got.layers[0].feed_forward == MLP(inner=12288, activation="gelu_pytorch_tanh")
    assert got.layers[0].norm == got.norm == Layer(1e-5)
    published = config("Starcoder2ForCausalLM", num_key_value_heads=2, sliding_window=128, use_bias=False)
    assert windows_of(published) == [128] * 4
    assert not published.layers[0].mixer.qkv_bias and not published.layers[0].feed_forward.bias


def test_phi_2() -> None:
    keys = {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 10240, "partial_rotary_factor": 0.4}
    got = model_config({"architectures": ["PhiForCausalLM"], **keys})
    attention = got.layers[0].mixer
    assert (attention.head_dim, attention.rope.rotary_dim, attention.qk_norm) == (80, 32, None)
    assert attention.qkv_bias and attention.o_bias and got.head_bias
    assert set(got.layers) == {
        LayerSpec(
            mixer=attention,
            feed_forward=MLP(inner=10240, activation="gelu_new"),
            norm=Layer(1e-5),
            residual=Parallel(),
        )
    }
    assert config("PhiForCausalLM", qk_layernorm=True).layers[0].mixer.qk_norm == Layer(1e-5)


def test_phi_3_and_4_mini() -> None:
    plain = model_config({"model_type": "phi3", "sliding_window": 2047})
    assert (plain.windows, plain.norm, plain.eos_token_ids) == ((2047,), RMS(1e-5), (32000,))
    factors = {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
    keys = {"model_type": "phi3", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    for name in ("su", "longrope", "yarn"):  # names that one scaling has had
        rope = model_config({**keys, "rope_scaling": {"type": name, **factors}}).ropes[0]
        assert rope.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
        assert isinstance(rope.by_length, LongFrequencies) and rope.by_length.original == 4096
    mini = model_config({**keys, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75})
    assert (mini.layers[0].mixer.head_dim, mini.ropes[0].rotary_dim) == (128, 96)


def test_stablelm_2_12b_and_the_first_one() -> None:
    got = model_config({"model_type": "stablelm"})
    attention = got.layers[0].mixer
    assert (attention.head_dim, attention.rope.rotary_dim, attention.qkv_bias, attention.qk_norm) == (
        80,
        20,
        False,
        None,
    )
    assert (got.layers[0].norm, got.layers[0].residual) == (Layer(1e-5), PreNorm())
    large = config("StableLmForCausalLM", num_key_value_heads=2, qk_layernorm=True, use_parallel_residual=True)
    attention = large.layers[0].mixer
    assert (attention.qk_norm, attention.qk_norm_over) == (Layer(1e-5, bias=False), "each head")
    assert large.layers[0].residual == Parallel() and not attention.is_fused
    old = config("StableLMEpochForCausalLM", num_key_value_heads=4, rope_pct=0.5, norm_eps=1e-3)
    assert (old.layers[0].mixer.rope.rotary_dim, old.norm) == (8, Layer(1e-3))


def test_pythia_and_gpt_j() -> None:
    keys = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8}
    got = model_config({"architectures": ["GPTNeoXForCausalLM"], **keys, "rotary_pct": 0.25, "rotary_emb_base": 10000})
    layer = got.layers[0]
    assert (layer.mixer.head_dim, layer.mixer.rope.rotary_dim, layer.mixer.qkv_bias) == (256, 64, True)
    assert layer.residual == Parallel(before_feed_forward="post_attention_layernorm")
    assert layer.feed_forward == MLP(inner=8192, activation="gelu")
    got = model_config({"model_type": "gptj"})
    layer = got.layers[0]
    assert (layer.mixer.head_dim, layer.mixer.rope.rotary_dim, layer.mixer.rope.interleaved) == (256, 64, True)
    assert (layer.feed_forward.inner, layer.residual, got.head_bias) == (16384, Parallel(), True)
    assert not layer.mixer.qkv_bias and not layer.mixer.o_bias


def test_gpt_2_and_its_kin() -> None:
    got = model_config({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_ctx": 1024})
    assert (got.hidden_size, got.num_layers, got.max_position, got.tie_word_embeddings) == (1024, 24, 1024, True)
    assert (got.positions, got.ropes) == (LearnedPositions(count=1024), ())
    assert got.layers[0].mixer.scale == 0.125 and got.layers[0].feed_forward.inner == 4096
    deep = config("GPT2LMHeadModel", scale_attn_by_inverse_layer_idx=True)
    assert [layer.mixer.scale for layer in deep.layers] == [0.25 / (i + 1) for i in range(4)]
    code = model_config({"model_type": "gpt_bigcode", "n_inner": 24576, "n_embd": 6144, "n_head": 48})
    assert (code.layers[0].mixer.kv_heads, code.layers[0].feed_forward.inner) == (1, 24576)
    assert config("GPTBigCodeForCausalLM", multi_query=False).layers[0].mixer.kv_heads == 4
    opt = model_config({"model_type": "opt"})
    assert (opt.positions, opt.layers[0].feed_forward.activation) == (LearnedPositions(count=2048, offset=2), "relu")
    assert (opt.layers[0].residual, opt.norm, opt.embedding_size) == (PreNorm(), Layer(1e-5), None)
    small = config("OPTForCausalLM", do_layer_norm_before=False, word_embed_proj_dim=32)
    assert (small.layers[0].residual, small.norm, small.embedding_size) == (PostNorm(), None, 32)


def test_falcon() -> None:
    seven = model_config({"model_type": "falcon"})
    attention = seven.layers[0].mixer
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qkv_bias) == (71, 1, 64, False)
    assert seven.layers[0].residual == Parallel() and attention.slopes is None
    keys = {"new_decoder_architecture": True, "num_kv_heads": 2}
    forty = config("FalconForCausalLM", **keys)
    assert forty.layers[0].residual == Parallel(before_feed_forward="post_attention_layernorm")
    assert forty.layers[0].mixer.kv_heads == 2
    eleven = config("FalconForCausalLM", **keys, num_ln_in_parallel_attn=1)
    assert eleven.layers[0].residual == Parallel()
    first = config("FalconForCausalLM", alibi=True, multi_query=False, parallel_attn=False, bias=True)
    attention = first.layers[0].mixer
    assert (first.layers[0].residual, attention.kv_heads, attention.rope) == (PreNorm(), 4, None)
    assert attention.slopes == tuple(0.25 * 2.0 ** (-2 * k) for k in (1, 2, 3, 4))


def test_bloom_and_mpt() -> None:
    got = model_config({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "n_head": 16, "seq_length": 2048})
    assert (got.hidden_size, got.num_layers, got.max_position, got.embedding_norm) == (1024, 24, 2048, Layer(1e-5))
    assert got.layers[0].mixer.slopes == tuple(2.0 ** (-k / 2) for k in range(1, 17))
    seven = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True, "clip_qkv": 8}}
    got = model_config({"architectures": ["MPTForCausalLM"], **seven})
    assert (got.hidden_size, got.norm, got.layers[0].mixer.clip) == (4096, Layer(1e-5, bias=False), 8)
    assert got.layers[0].feed_forward == MLP(inner=16384, activation="gelu", bias=False)
    writer = model_config({"model_type": "mpt", "attn_config": {"alibi_bias_max": 16, "clip_qkv": 6}})
    assert writer.layers[0].mixer.slopes == tuple(2.0**-k for k in range(1, 17))


def test_gemma_1_and_2() -> None:
    codegemma = model_config({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None})
    assert (codegemma.embedding_scale, codegemma.tie_word_embeddings) == (3072**0.5, True)
    layer = codegemma.layers[0]
    assert layer.feed_forward == GatedMLP(inner=24576, activation="gelu_pytorch_tanh")
    assert (layer.norm, layer.residual, layer.mixer.head_dim) == (RMS(1e-6, True), PreNorm(), 256)
    got = model_config({"model_type": "gemma2", "query_pre_attn_scalar": 144, "num_hidden_layers": 4})
    assert windows_of(got) == [4096, None, 4096, None]
    assert {(layer.mixer.softcap, layer.mixer.scale) for layer in got.layers} == {(50.0, 1 / 12)}
    assert (got.final_softcap, got.layers[0].residual) == (30.0, Sandwich())


def test_layers_that_are_not_rotated() -> None:
    def rotated(got: Any) -> list[bool]:
        return [layer.mixer.rope is not None for layer in got.layers]

    assert rotated(config("SmolLM3ForCausalLM")) == [True, True, True, False]
    assert rotated(config("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1])) == [False, True, True, False]
    got = config("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8)
    assert windows_of(got) == [None, None, None, 8]
    got = config("Cohere2ForCausalLM", layer_switch=2)
    assert (rotated(got), windows_of(got)) == ([True, False] * 2, [4096, None] * 2)
    got = config("Exaone4ForCausalLM", num_key_value_heads=4, sliding_window_pattern="LLG")
    assert (rotated(got), windows_of(got)) == ([True, True, False, True], [4096, 4096, None, 4096])
    got = config("Exaone4ForCausalLM", num_key_value_heads=4, sliding_window=None)
    assert (rotated(got), windows_of(got)) == ([True] * 4, [None] * 4)
    keys = NEEDED["GraniteMoeHybridForCausalLM"]
    assert rotated(config("GraniteMoeHybridForCausalLM", **keys)) == [True] * 4
    assert rotated(config("GraniteMoeHybridForCausalLM", **keys | {"position_embedding_type": "nope"})) == [False] * 4


def test_factors_of_granite_cohere_and_minicpm() -> None:
    factors = {"embedding_multiplier": 12, "attention_multiplier": 0.0625, "residual_multiplier": 0.22}
    got = config("GraniteForCausalLM", **factors, logits_scaling=8)
    assert (got.embedding_scale, got.logit_scale) == (12, 0.125)
    assert (got.layers[0].mixer.scale, got.layers[0].residual) == (0.0625, PreNorm(scale=0.22))
    got = config("CohereForCausalLM", logit_scale=0.5, use_qk_norm=True)
    assert (got.logit_scale, got.layers[0].norm, got.layers[0].residual) == (0.5, Layer(1e-5, bias=False), Parallel())
    assert (got.layers[0].mixer.qk_norm_over, got.layers[0].mixer.rope.interleaved) == ("each head", True)
    got = config("MiniCPMForCausalLM", scale_emb=12, scale_depth=1.4, dim_model_base=16)
    assert (got.embedding_scale, got.logit_scale, got.layers[0].residual.scale) == (12, 0.25, 0.7)


def test_baichuan_by_size_and_vocabulary() -> None:
    wide = config("BaichuanForCausalLM", hidden_size=4096)
    assert wide.layers[0].mixer.rope is not None and wide.layers[0].mixer.slopes is None
    large = config("BaichuanForCausalLM", hidden_size=5120, num_attention_heads=40)
    assert large.layers[0].mixer.rope is None and large.layers[0].mixer.slopes == alibi_slopes(40)
    keys = {"architectures": ["BaichuanForCausalLM"]}
    assert has_unit_head({**keys, "vocab_size": 125696}) and not has_unit_head({**keys, "vocab_size": 64000})
    assert not has_unit_head({"model_type": "llama", "vocab_size": 125696}) and not has_unit_head({})


def test_a_stretched_base_of_hunyuan() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}
    got = config("HunYuanDenseV1ForCausalLM", rope_scaling=scaling)
    assert theta_of(got.ropes[0], 16) == pytest.approx(10000 * 1000 ** (16 / 14), rel=1e-5)
    assert not got.layers[0].mixer.qk_norm_first and got.max_position == 512
    with pytest.raises(UnsupportedModel, match=r"alpha = 1000\.0 is not supported here"):
        config("LlamaForCausalLM", rope_scaling=scaling)


def test_experts_of_deepseek_v3_and_kimi() -> None:
    got = model_config({"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    assert sparse_layers(got) == [False] * 3 + [True] * 58
    experts = got.layers[3].feed_forward
    assert experts == Experts(
        count=256,
        per_token=8,
        inner=2048,
        activation="silu",
        normalize=True,
        score="sigmoid",
        corrected=True,
        scaling=2.5,
        groups=ExpertGroups(8, 4, best=2),
        shared=SharedExpert(inner=2048, name="shared_experts", gated=False),
    )
    kimi = model_config({"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384})
    assert (kimi.layers[-1].feed_forward.groups, kimi.layers[-1].feed_forward.count) == (None, 384)
    plain = config("DeepseekV3ForCausalLM", **NEEDED["DeepseekV3ForCausalLM"], rope_interleave=False)
    assert not plain.layers[0].mixer.rope.interleaved


def test_which_layers_have_experts() -> None:
    keys = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert sparse_layers(config("DeepseekForCausalLM", **keys)) == [False, False, True, False]
    keys = {"num_key_value_heads": 4, "moe_layer_start_index": 1, "moe_layer_interval": 2}
    assert sparse_layers(config("Ernie4_5_MoeForCausalLM", **keys)) == [False, True, False, True]
    assert sparse_layers(config("Ernie4_5_MoeForCausalLM", **keys, moe_layer_end_index=2)) == [
        False,
        True,
        False,
        False,
    ]
    got = config("MiniMaxM2ForCausalLM", num_key_value_heads=4, rotary_dim=64)
    assert (got.ropes[0].rotary_dim, got.layers[0].mixer.qk_norm_over) == (64, "all heads")
    got = config("HunYuanMoEV1ForCausalLM", num_experts=[8] * 4, moe_topk=[2] * 4, num_shared_expert=[1] * 4)
    assert (got.layers[0].feed_forward.per_token, got.layers[0].feed_forward.shared.inner) == (2, 96)


def test_gpt_oss() -> None:
    got = model_config({"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 32, "swiglu_limit": 7.0})
    assert windows_of(got) == [128, None, 128, None]
    assert got.max_position == 131072 and got.ropes[0].attention_factor == pytest.approx(1 + 0.1 * np.log(32))
    layer = got.layers[0]
    assert (layer.mixer.sinks, layer.mixer.qkv_bias, layer.mixer.o_bias) == (True, True, True)
    experts = layer.feed_forward
    assert (experts.activation, experts.bias, experts.normalize, experts.count) == (CLAMPED_SWIGLU, True, True, 32)
    with pytest.raises(UnsupportedModel, match="swiglu_limit = 8 is not supported"):
        config("GptOssForCausalLM", swiglu_limit=8)


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    assert alibi_slopes(3) == (2.0**-4, 2.0**-8, 2.0**-2)
    assert alibi_slopes(6) == (*(2.0 ** (-2 * k) for k in (1, 2, 3, 4)), 2.0**-1, 2.0**-3)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*/config-v5.json")), ids=lambda path: path.parent.name)
def test_transformers_5_rewrites_mean_the_same(file: Path) -> None:
    old, new = json.loads(file.with_name("config.json").read_text()), json.loads(file.read_text())
    assert "rope_theta" not in new and model_config(new) == model_config(old)


def test_longrope_does_not_depend_on_what_is_served() -> None:
    long, short = [2.0] * 8, [1.0] * 8
    keys = {
        **SMALL,
        "model_type": "llama",
        "original_max_position_embeddings": 256,
        "rope_scaling": {"type": "longrope", "long_factor": long, "short_factor": short},
    }
    for max_model_len in (None, 256, 300):
        got = model_config(keys, max_model_len=max_model_len)
        assert got.ropes[0].inv_freq[0] == 1.0
        assert got.ropes[0].by_length == LongFrequencies(256, tuple(x / 2 for x in got.ropes[0].inv_freq))
        assert [got.prompt_kind(length) for length in (1, 256, 257)] == [(0,), (0,), (1,)]
    assert model_config({**SMALL, "model_type": "llama"}).prompt_kind(1000) == ()
    with pytest.raises(UnsupportedModel, match="max_model_len = 0"):
        model_config(keys, max_model_len=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"architectures": ["BlooomForCausalLM"]},
            "architecture 'BlooomForCausalLM' is not supported; if it is BloomForCausalLM under another name, "
            'set hf_overrides to {"architectures": ["BloomForCausalLM"]}; supported are Apertus',
        ),
        (
            {"architectures": ["WhisperForConditionalGeneration"]},
            "architecture 'WhisperForConditionalGeneration' is not supported; if it is one of these under ",
        ),
        ({"architectures": ["LlamaVision"], "model_type": "llama"}, "architecture 'LlamaVision' is not supported"),
        ({"architectures": [7]}, "architecture 7 is not supported"),
        ({"architectures": [["x"]]}, "architecture ['x'] is not supported"),
        ({"architectures": [], "model_type": "t5"}, "model_type 't5' is not supported; supported are Yi"),
        ({}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ],
)
def test_unknown_models(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        model_config(keys)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("LlamaForCausalLM", {"hidden_size": 0}, "hidden_size = 0 must be an integer from 1"),
        ("LlamaForCausalLM", {"hidden_size": 64.0}, "hidden_size = 64.0 must be an integer"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size = True must be an integer"),
        ("LlamaForCausalLM", {"vocab_size": 2**40}, "must be an integer from 1 to 2147483647"),
        (
            "LlamaForCausalLM",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000 must be an integer from 1 to",
        ),
        (
            "LlamaForCausalLM",
            {"num_attention_heads": 5},
            "hidden_size = 64 is not divisible by num_attention_heads = 5",
        ),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ("LlamaForCausalLM", {"head_dim": 15}, "leaves 15 of 15"),
        ("LlamaForCausalLM", {"head_dim": 2**31 - 2}, "heads of 2147483646 entries are more than 65536"),
        ("Gemma3ForCausalLM", {"head_dim": None, "hidden_size": 2**30, "num_key_value_heads": 4}, "heads of 268435456"),
        ("DeepseekV2ForCausalLM", {**NEEDED["DeepseekV2ForCausalLM"], "qk_rope_head_dim": 2**20}, "heads of 1048576"),
        ("LlamaForCausalLM", {"hidden_act": "relu6"}, "hidden_act = 'relu6' is not supported; supported are gelu"),
        ("LlamaForCausalLM", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' must be a positive number"),
        ("LlamaForCausalLM", {"attention_bias": 1}, "attention_bias = 1 must be true or false"),
        ("LlamaForCausalLM", {"eos_token_id": [2, -1]}, "eos_token_id = -1 must be an integer from 0"),
        ("LlamaForCausalLM", {"rope_theta": None}, "rope_theta = None must be a positive number"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window = 8 is not part of Llama"),
        ("LlamaForCausalLM", {"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is not supported"),
        ("LlamaForCausalLM", {"dtype": 16}, "dtype = 16 must be a string"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, "must be a list of num_hidden_layers = 4 names"),
        ("LlamaForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types = 'chunked_attention' is not"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_window = None but some layers"),
        ("MistralForCausalLM", {"num_key_value_heads": 4, "attention_bias": True}, "attention_bias = True is not"),
        ("MistralForCausalLM", {"num_key_value_heads": 4, "sliding_window": 0}, "sliding_window = 0 must be"),
        ("Qwen2ForCausalLM", {"num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 4}, "some layers have"),
        (
            "MixtralForCausalLM",
            {"num_key_value_heads": 4, "num_experts_per_tok": 9},
            "is more than there are experts, 8",
        ),
        ("Qwen2MoeForCausalLM", {"num_key_value_heads": 4, "norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("DeepseekV2ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not num_attention_heads = 4"),
        ("DeepseekV2ForCausalLM", {}, "num_experts_per_tok = None must be an integer"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group = 3 does not divide n_routed_experts = 64",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1, "num_experts_per_tok": 9},
            "num_experts_per_tok = 9 is more than there are experts, 8",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            "which latent attention does not",
        ),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers = 3 must be a list of integers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [-1]}, "mlp_only_layers = -1 must be an integer from 0"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be an integer from 1"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": 1}, "use_bidirectional_attention = 1 must be true or"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "must be nested by layer type"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window = None but some layers"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads = 3 does not"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn = False is"),
        ("FalconForCausalLM", {"n_layer": 0, "num_hidden_layers": None}, "n_layer = 0 must be an integer"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("GPTJForCausalLM", {"rotary_dim": None}, "rotary_dim = None must be an integer"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "config.json: attn_config: alibi = False is not"),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln = True is not supported"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "elementwise_affine = False is not supported"),
        ("PhiForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias = True is not supported"),
        ("Phi3ForCausalLM", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("Starcoder2ForCausalLM", {"num_key_value_heads": 4, "norm_type": "rms"}, "norm_type = 'rms' is not"),
        ("BaichuanForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ("ChatGLMModel", {**CHATGLM, "rmsnorm": False}, "rmsnorm = False is not supported"),
        ("ChatGLMModel", {**CHATGLM, "add_bias_linear": True}, "add_bias_linear = True is not supported"),
        ("CohereForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types = 'sliding_attention' is not"),
        ("Exaone4ForCausalLM", {"num_key_value_heads": 4, "sliding_window_pattern": "LLX"}, "'LLX' must be an integer"),
        (
            "GemmaForCausalLM",
            {"num_key_value_heads": 4, "use_bidirectional_attention": True},
            "= True is not supported",
        ),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier = 0 must be a positive number"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["rwkv"] * 4}, "layer_types = 'rwkv' is not supported"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 100}, "mamba_n_heads = 100 does not divide 128"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("Mamba2ForCausalLM", {"head_dim": 32}, "head_dim = 32 times mamba_n_heads = 128 is not 128"),
        ("Mamba2ForCausalLM", {"num_heads": 4, "n_groups": 3}, "n_groups = 3 does not divide mamba_n_heads = 4"),
        (
            "BambaForCausalLM",
            {"mamba_n_heads": 8, "num_key_value_heads": 2, "time_step_limit": [2, 1]},
            "must be two numbers, the smaller one first",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*-E"},
            "or experts that do not follow a mixer",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M--"},
            "or experts that do not follow a mixer",
        ),
        ("NemotronHForCausalLM", {"layers_block_type": ["rwkv"]}, "has blocks of an unknown kind, 'rwkv'"),
        ("NemotronHForCausalLM", {}, "must say what each block is"),
        ("Lfm2ForCausalLM", {"layer_types": ["mamba"] * 4}, "layer_types = 'mamba' is not supported"),
        ("PhimoeForCausalLM", {"num_key_value_heads": 2, "num_experts_per_tok": 3}, "num_experts_per_tok = 3 is not"),
        ("PhimoeForCausalLM", {"rope_scaling": {"short_mscale": 1, "long_mscale": 2}}, "must be short_mscale"),
        (
            "DbrxForCausalLM",
            {"ffn_config": {"moe_top_k": 9}},
            "ffn_config: moe_top_k = 9 is more than there are experts, 4",
        ),
        (
            "DbrxForCausalLM",
            {"ffn_config": {"moe_normalize_expert_weights": 2}},
            "ffn_config: moe_normalize_expert_weights = 2 is not supported",
        ),
        ("Llama4ForCausalLM", {"num_key_value_heads": 2, "no_rope_layers": [1]}, "must have a 0 or a 1 for each of 4"),
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("DeepseekV3ForCausalLM", {"n_group": 256}, "n_group = 256 leaves 1 of 256 experts in a group, less than 2"),
        ("DeepseekForCausalLM", {"n_routed_experts": None}, "n_routed_experts = None must be an integer"),
        ("Ernie4_5_MoeForCausalLM", {"num_key_value_heads": 4, "use_bias": True}, "use_bias = True is not supported"),
        ("Ernie4_5_MoeForCausalLM", {"num_key_value_heads": 4, "moe_k": 65}, "moe_k = 65 is more than there are"),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 8, "moe_topk": [1, 2]}, "moe_topk = [1, 2] must be an integer"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": [64, 64]}, "moe_intermediate_size = 64 is not supported"),
        ("MiniMaxM2ForCausalLM", {"num_key_value_heads": 4, "use_routing_bias": False}, "use_routing_bias = False is"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla = True is not supported"),
        ("LlamaForCausalLM", {"use_qk_norm": True}, "use_qk_norm = True is not supported"),
        ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}, "sparse_config: dense_len = None must be an integer"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] must be a list of 4 numbers"),
        ("FalconForCausalLM", {"hidden_size": 8, "num_attention_heads": 71, "alibi": True}, "hidden_size = 8 is not"),
        ("MPTForCausalLM", {"d_model": 8, "n_heads": 71}, "d_model = 8 is not divisible by num_attention_heads = 71"),
    ],
)
def test_refused(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        config(architecture, **keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["yarn", "linear"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *SMALL,
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "layer_types",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "max_window_layers",
        "tie_word_embeddings",
        "eos_token_id",
        "bos_token_id",
        "dtype",
        "architectures",
        "model_type",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "topk_method",
        "first_k_dense_replace",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "moe_intermediate_size",
        "mlp_only_layers",
        "decoder_sparse_step",
        "norm_topk_prob",
        "query_pre_attn_scalar",
    ]
)
ROPE_KEYS = st.sampled_from(
    [
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "inv_freq_divisors",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "short_factor",
        "truncate",
    ]
)
SCALINGS = st.builds(
    lambda kind, keys: {"rope_type": kind, **keys},
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "custom"]),
    st.dictionaries(ROPE_KEYS, st.floats(0, 1e9) | st.integers(0, 10**6) | st.just([1.5] * 8) | VALUES, max_size=6),
)


def test_qwen3_next() -> None:
    got = model_config({"model_type": "qwen3_next"})
    delta_net, attention = got.layers[0].mixer, got.layers[3].mixer
    assert delta_net == GatedDelta(
        key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4, activation="silu", norm=RMS(1e-6)
    )
    assert (attention.heads, attention.kv_heads, attention.gated, attention.qk_norm) == (16, 2, True, RMS(1e-6, True))
    assert attention.rope.rotary_dim == 64  # a quarter of a head
    assert [layer.mixer for layer in got.layers] == 12 * [delta_net, delta_net, delta_net, attention]
    experts = got.layers[0].feed_forward
    assert (experts.count, experts.per_token, experts.inner, experts.shared) == (512, 10, 512, SharedExpert(inner=512))
    assert got.spans == (AllTokens(), LastState()) and got.windows == (None,)
    assert [got.group_of(i) for i in range(4)] == [1, 1, 1, 0]
    published = config("Qwen3NextForCausalLM", layer_types=["full_attention", "linear_attention"] * 2)
    assert [published.group_of(i) for i in range(4)] == [0, 1, 0, 1]
    with pytest.raises(UnsupportedModel, match="linear_num_value_heads = 24 is not divisible by linear_num_key_heads"):
        config("Qwen3NextForCausalLM", linear_num_value_heads=24)
    with pytest.raises(UnsupportedModel, match="layer_types = 'sliding_attention' is not supported"):
        config("Qwen3NextForCausalLM", layer_types=["sliding_attention"] * 4)


def test_state_spaces_of_mamba2() -> None:
    got = model_config({"model_type": "mamba2"})
    state_space = Mamba2(
        heads=128, head_dim=64, groups=8, state_dim=128, width=4, activation="silu", norm=RMS(1e-5), steps=(0, np.inf)
    )
    assert {layer.mixer for layer in got.layers} == {state_space} and len(got.layers) == 64
    assert got.layers[0].feed_forward is None and got.spans == (LastState(),) and got.windows == ()
    assert state_space.state.recent == (3, 8192 + 2 * 8 * 128) and state_space.state.memory == (128, 128, 64)
    limits = model_config({"model_type": "mamba2", "time_step_limit": [0.5, {"__float__": "Infinity"}]})
    assert limits.layers[0].mixer.steps == (0.5, np.inf)


def test_hybrids_with_state_spaces() -> None:
    granite = model_config({"model_type": "granitemoehybrid", "num_hidden_layers": 2})
    assert granite.layers[1].mixer == Mamba2(
        heads=128, head_dim=64, groups=1, state_dim=256, width=4, activation="silu", norm=RMS(1e-6)
    )
    assert granite.layers[1].feed_forward.shared == SharedExpert(inner=1024, name="shared_mlp", gated=False)
    bamba = model_config({"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]})
    assert [type(layer.mixer) for layer in bamba.layers] == [Mamba2, Attention, Mamba2]
    assert bamba.layers[1].mixer.rope.rotary_dim == 64  # half of a head
    nemotron = model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "MM-*-M"})
    assert [type(layer.mixer) for layer in nemotron.layers] == [Mamba2, Mamba2, Attention, Mamba2]
    assert [layer.feed_forward for layer in nemotron.layers] == [
        None,
        MLP(inner=21504, activation="relu2", bias=False),
        MLP(inner=21504, activation="relu2", bias=False),
        None,
    ]
    assert nemotron.layers[0].mixer.steps == (0.001, np.inf) and nemotron.layers[2].mixer.rope is None
    listed = ["mamba", "mamba", "mlp", "attention", "mlp", "mamba"]
    assert model_config({"model_type": "nemotron_h", "layers_block_type": listed}) == nemotron
    for sizes, size in (({"attention_head_dim": 64}, 64), ({"attention_head_dim": 128, "head_dim": 64}, 64)):
        sized = model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "MM-*-M", **sizes})
        assert sized.layers[2].mixer.head_dim == size


def test_deepseek_v3_2() -> None:
    keys = {"model_type": "deepseek_v32", "num_hidden_layers": 4, "layer_types": ["indexed_attention"] * 4}
    third = model_config({"model_type": "deepseek_v3", "num_hidden_layers": 4, "max_position_embeddings": 163840})
    # As far as tokens see all before them, nothing has to be chosen.
    assert model_config(keys, max_model_len=2048).layers == third.layers
    got = model_config(keys, max_model_len=2049)
    assert got == model_config(keys) and got.max_position == 163840
    indexer = got.layers[0].indexer
    assert (indexer.heads, indexer.size, indexer.count, indexer.q_rank) == (64, 128, 2048, 1536)
    assert indexer.rope == replace(third.ropes[0], interleaved=False)
    assert [state.dim for state in got.states] == [576] * 4 + [128] * 4
    for wrong in ({"mlp_layer_types": ["sparse"] * 4}, {"q_lora_rank": None}, {"index_head_dim": 32}):
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            model_config({**keys, **wrong})


def test_glm_5_and_4_7_flash() -> None:
    keys = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "head_dim": 64}
    got = model_config(keys)
    assert got.layers[0].indexer.rope == got.layers[0].mixer.rope and got.layers[0].mixer.rope.interleaved
    assert [type(layer.feed_forward) for layer in got.layers] == [GatedMLP] * 3 + [Experts]
    assert model_config(keys, max_model_len=2048).layers[0].indexer is None
    wrongs: tuple[dict[str, Any], ...] = (
        {"indexer_types": ["full", "shared", "full"]},
        {"indexer_types": ["shared", "full", "full", "full"]},
        {"indexer_types": ["full", "half", "full", "full"]},
        {"index_topk_freq": "often"},
        {"index_topk_pattern": "FFSX"},
        {"indexer_rope_interleave": False},
    )
    for wrong in wrongs:
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            model_config({**keys, **wrong})
    lite = model_config({"model_type": "glm4_moe_lite"})
    assert [type(layer.feed_forward) for layer in lite.layers[:2]] == [GatedMLP, Experts]
    assert (lite.layers[1].feed_forward.count, lite.layers[1].feed_forward.scaling) == (64, 1.8)
    with pytest.raises(UnsupportedModel, match="mlp_layer_types"):
        model_config({"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse"] * 47})


@pytest.mark.parametrize(
    ("keys", "letters"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, "FSFS"),
        ({"index_topk_pattern": "FFSS"}, "FFSS"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 8}, "FFFSSSFS"),
    ],
)
def test_layers_of_glm_5_2_share_indexers(keys: dict[str, Any], letters: str) -> None:
    known = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, **keys}
    got = model_config(known)
    assert [layer.indexer is not None for layer in got.layers] == [letter == "F" for letter in letters]
    assert [layer.chosen_before for layer in got.layers] == [letter == "S" for letter in letters]
    assert len(got.states) == len(letters) + letters.count("F")
    short = model_config(known, max_model_len=2048)  # in which an indexer would choose all
    assert not any(layer.chosen_before or layer.indexer for layer in short.layers)


def test_gemma4_of_images() -> None:
    """Only image tokens see later ones; text stays causal, so the key changes nothing."""
    plain = {"model_type": "gemma4_text"}
    assert model_config({**plain, "use_bidirectional_attention": "vision"}) == model_config(plain)
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        model_config({**plain, "use_bidirectional_attention": "all"})


def test_ministral3() -> None:
    got = model_config({"model_type": "ministral3"}).layers[0].mixer
    assert got.sharpened == Sharpening(16384, 0.1, ahead=0) and got.window is None and got.rope.attention_factor == 1
    assert model_config({"model_type": "ministral3"}, max_model_len=16384).layers[0].mixer.sharpened is None
    text = {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    nested = text_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert nested is not None and model_config(nested).layers[0].mixer.sharpened is None


def test_gemma3n() -> None:
    got = model_config({"model_type": "gemma3n_text", "num_hidden_layers": 15, "num_kv_shared_layers": 5})
    assert [layer.state_of for layer in got.layers] == [None] * 10 + [8] * 4 + [9]
    assert [layer.mixer.window for layer in got.layers[:5]] == [512] * 4 + [None]
    assert got.altup == AltUp(streams=4, active=0, norm=RMS(1e-6), scaled=True)
    assert got.layers[0].low_rank == LowRank(rank=64, norm=RMS(1e-6))
    cutoffs = [layer.feed_forward.cutoff for layer in got.layers]
    assert cutoffs == [pytest.approx(1.644854, abs=1e-6)] * 10 + [None] * 5  # 95 of 100 gates
    sizes = {"model_type": "gemma3n_text", "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    sizes |= {"intermediate_size": [64, 96], "activation_sparsity_pattern": [0.5, 0.0]}
    halves = [layer.feed_forward for layer in model_config(sizes).layers]
    assert [(half.inner, half.cutoff) for half in halves] == [(64, 0.0), (96, None)]
    for wrong in (
        {"intermediate_size": [64]},
        {"intermediate_size": [64, 0]},
        {"activation_sparsity_pattern": [0.5]},
        {"activation_sparsity_pattern": [0.5, 1]},
        {"altup_active_idx": 4},
        {"num_kv_shared_layers": 2},
        {"hidden_size_per_layer_input": 0},
    ):
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            model_config({**sizes, **wrong})


def test_gemma4() -> None:
    keys = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 4}
    got = model_config({**keys, "use_double_wide_mlp": True, "attention_k_eq_v": True, "num_global_key_value_heads": 2})
    assert [layer.state_of for layer in got.layers] == [None] * 8 + [7] * 3 + [5]
    assert [state is None for state in got.states] == [False] * 8 + [True] * 4
    sliding, full = got.layers[0].mixer, got.layers[5].mixer
    assert (sliding.head_dim, sliding.kv_heads, sliding.window, sliding.values_of_keys) == (256, 4, 512, False)
    assert (full.head_dim, full.kv_heads, full.window, full.values_of_keys) == (512, 2, None, True)
    assert full.scale == sliding.scale == 1 and full.v_norm == RMS(1e-6, weighted=False)
    # A quarter of the frequencies of whole heads.
    turned = 1e6 ** (-np.arange(0, 128, 2) / 512)
    np.testing.assert_allclose(full.rope.inv_freq, [*turned, *[0] * 192], rtol=1e-6)
    assert got.layers[11].mixer == replace(full, reads_only=True)
    assert [got.layers[i].feed_forward.inner for i in (7, 8)] == [9216, 18432]
    assert got.per_layer == got.layers[0].per_layer and got.per_layer.size == 256
    assert model_config({**keys, "hidden_size_per_layer_input": 0}).per_layer is None
    moe = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    experts = model_config({**keys, **moe}).layers[0].feed_forward
    assert (experts.count, experts.per_token, experts.inner, experts.own_norms) == (128, 8, 704, RMS(1e-6))
    assert experts.shared == SharedExpert(inner=9216, name="dense", gated=False)
    for wrong in (
        {"num_kv_shared_layers": 8},
        {"num_experts": None, "enable_moe_block": True},
        {"top_k_experts": 129, **{key: value for key, value in moe.items() if key != "top_k_experts"}},
        {"use_double_wide_mlp": True, **moe},
        {"use_bidirectional_attention": "all"},
    ):
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            model_config({**keys, **wrong})


def test_nemotron_h_with_experts() -> None:
    got = model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*E", "n_routed_experts": 16})
    experts = got.layers[1].feed_forward
    assert (experts.count, experts.per_token, experts.gated, experts.latent) == (16, 2, False, None)
    assert experts.shared == SharedExpert(inner=7688, name="shared_experts", gated=False)
    with pytest.raises(UnsupportedModel, match="experts that do not follow a mixer"):
        model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "MEE"})
    with pytest.raises(UnsupportedModel, match="mlp_hidden_act"):
        model_config({"model_type": "nemotron_h", "hybrid_override_pattern": "ME", "mlp_hidden_act": "silu"})


def test_minimax_by_its_older_keys() -> None:
    newer = {
        "model_type": "minimax",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "head_dim": 128,
        "rotary_dim": 64,
        "full_attn_alpha_factor": 3.5,
        "linear_attn_alpha_factor": 2.5,
        "mlp_alpha_factor": 1.5,
    }
    older = {
        "architectures": ["MiniMaxM1ForCausalLM"],
        "num_hidden_layers": 3,
        "attn_type_list": [0, 0, 1],
        "head_dim": 128,
        "rotary_dim": 64,
        "layernorm_full_attention_alpha": 3.5,
        "layernorm_linear_attention_alpha": 2.5,
        "layernorm_mlp_alpha": 1.5,
        "postnorm": True,
        "shared_intermediate_size": 0,
    }
    got = model_config(older)
    assert got == model_config(newer)
    assert [type(layer.mixer) for layer in got.layers] == [LightningAttention, LightningAttention, Attention]
    assert got.layers[2].mixer.rope.rotary_dim == 64
    for wrong in ({"attn_type_list": [0, 1]}, {"attn_type_list": [0, 1, 2]}, {"postnorm": False}):
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            model_config({**older, **wrong})


def test_lfm2() -> None:
    got = model_config({"model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [1]})
    assert [type(layer.mixer) for layer in got.layers] == [ShortConvolution, Attention, ShortConvolution]
    assert got.layers[0].mixer == ShortConvolution(size=2560, width=3) and got.tie_word_embeddings
    assert got.layers[0].feed_forward.inner == 8192  # two thirds of 12288
    odd = {"model_type": "lfm2", "block_ff_dim": 1000, "block_ffn_dim_multiplier": 1.3, "tie_embedding": False}
    assert model_config(odd).layers[0].feed_forward.inner == 1024 and not model_config(odd).tie_word_embeddings
    moe = model_config({"model_type": "lfm2_moe", "num_hidden_layers": 3, "layer_types": ["conv"] * 3})
    assert [type(layer.feed_forward) for layer in moe.layers] == [GatedMLP, GatedMLP, Experts]
    experts = moe.layers[2].feed_forward
    assert (experts.score, experts.corrected, experts.normalize, experts.no_share) == ("sigmoid", True, True, 1e-6)


def test_llama4() -> None:
    got = model_config({"model_type": "llama4_text"})
    rotated, plain = got.layers[0].mixer, got.layers[3].mixer
    assert [layer.mixer for layer in got.layers] == 12 * [rotated, rotated, rotated, plain]
    assert rotated.rope.interleaved and rotated.qk_norm == RMS(1e-5, weighted=False) and not rotated.qk_norm_first
    assert plain.rope is None and plain.qk_norm is None
    experts = got.layers[0].feed_forward
    assert (experts.score, experts.scaled_inputs, experts.normalize, experts.inner) == ("sigmoid", True, False, 8192)
    assert experts.shared == SharedExpert(inner=8192, gated=False)
    assert got.max_position == 131072 and (rotated.chunk, plain.chunk) == (8192, None)
    assert (rotated.sharpened, plain.sharpened) == (None, Sharpening(8192, 0.1))
    assert got.windows == (None, 8192)
    # Sequences for which chunks and temperatures make no difference.
    short = model_config({"model_type": "llama4_text"}, max_model_len=8191)
    assert short.windows == (None,) and {layer.mixer.sharpened for layer in short.layers} == {None}
    assert model_config({"model_type": "llama4_text"}, max_model_len=8192).layers[3].mixer.sharpened is not None
    plain = model_config({"model_type": "llama4_text", "attn_temperature_tuning": False}).layers[3].mixer
    assert plain.sharpened is None
    interleaved = model_config({"model_type": "llama4_text", "interleave_moe_layer_step": 2, "num_hidden_layers": 4})
    assert [layer.feed_forward.inner for layer in interleaved.layers] == [16384, 8192, 16384, 8192]
    assert [type(layer.feed_forward) for layer in interleaved.layers] == [GatedMLP, Experts] * 2


def test_phimoe_and_dbrx() -> None:
    phi = model_config({"model_type": "phimoe"})
    experts = phi.layers[0].feed_forward
    assert (experts.count, experts.score, experts.margin, experts.normalize) == (16, "sparse mixer", 0.02, False)
    assert phi.norm == Layer(1e-5) and not phi.head_bias
    inner = {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5}
    dbrx = model_config({"model_type": "dbrx", "attn_config": inner, "ffn_config": {"moe_top_k": 4}})
    assert (dbrx.layers[0].mixer.clip, dbrx.layers[0].mixer.kv_heads, dbrx.norm) == (8.0, 8, Layer(1e-5, bias=False))
    assert dbrx.layers[0].mixer.rope == config("LlamaForCausalLM", head_dim=128, rope_theta=5e5).ropes[0]
    assert (dbrx.layers[0].feed_forward.per_token, dbrx.layers[0].feed_forward.normalize) == (4, True)


def test_qwen3_5() -> None:
    got = model_config({"model_type": "qwen3_5_text"})
    assert got.layers[0].mixer.in_turn and type(got.layers[0].feed_forward) is GatedMLP
    assert [layer.mixer.state.span for layer in got.layers[:4]] == [LastState()] * 3 + [AllTokens()]
    moe = model_config({"model_type": "qwen3_5_moe_text"})
    experts = moe.layers[0].feed_forward
    assert (len(moe.layers), experts.count, experts.per_token, experts.normalize) == (40, 256, 8, True)
    # As published: a model of images whose text model knows sections of positions, which are all alike in text.
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {"model_type": "qwen3_5_text", "rope_parameters": rope | {"partial_rotary_factor": 0.25}}
    nested = text_config({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text})
    assert nested is not None and model_config(nested).ropes[0].rotary_dim == 64
    assert model_config(nested).ropes[0].axes == (*[0, 1, 2] * 10, 0, 1)


def test_text_models_whose_positions_have_axes() -> None:
    """Vision models of Qwen: their text models are the plain ones, in older files flat."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "rope_scaling": rope}
    text = text_config({**flat, "rope_theta": 1e6, "vision_config": {"depth": 2}})
    assert text is not None and "vision_config" not in text
    plain = model_config({"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6})
    (rope_of_axes,), (rope_of_one,) = model_config(text).ropes, plain.ropes
    assert rope_of_axes == replace(rope_of_one, axes=(*[0] * 16, *[1] * 24, *[2] * 24))
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}
    inner = {"model_type": "qwen3_vl_moe_text", "rope_parameters": rope, "head_dim": 128}
    text = text_config({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": inner})
    plain = {"architectures": ["Qwen3MoeForCausalLM"], "rope_theta": 5e6, "head_dim": 128}
    assert text is not None
    (rope_of_axes,), (rope_of_one,) = model_config(text).ropes, model_config(plain).ropes
    assert rope_of_axes == replace(rope_of_one, axes=(*[0, 1, 2] * 20, 0, 0, 0, 0))
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"model_type": "kimi_k2"}}
    text = text_config(kimi)
    assert text is not None and model_config(text).architecture == "DeepseekV3ForCausalLM"


def test_kimi_linear() -> None:
    """The published config counts layers from 1."""
    own = {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 3,
    }
    keys = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "linear_attn_config": own,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "moe_router_activation_func": "sigmoid",
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "model_max_length": 4096,
        "head_dim": 72,
    }
    got = model_config(keys)
    assert [type(layer.mixer) for layer in got.layers] == [ChannelDelta, LatentAttention] * 2
    assert got.layers[0].mixer == ChannelDelta(heads=3, head_dim=16, width=3, activation="silu", norm=RMS(1e-5))
    assert got.layers[1].mixer.rope is None and got.max_position == 4096
    assert [type(layer.feed_forward) for layer in got.layers] == [GatedMLP, Experts, Experts, Experts]
    for wrong, message in (
        ({"linear_attn_config": {**own, "kda_layers": [1, 2]}}, "full_attn_layers"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            model_config({**keys, **wrong})


def test_state_spaces_of_channels() -> None:
    got = model_config({"model_type": "falcon_mamba", "hidden_size": 64, "expand": 16, "intermediate_size": 128})
    assert got.layers[0].mixer == Mamba(
        inner=128, state_dim=16, rank=4, width=4, activation="silu", norm=RMS(1e-6, weighted=False)
    )
    plain = model_config({"model_type": "mamba", "hidden_size": 40, "use_bias": True, "time_step_rank": 5})
    assert plain.layers[0].mixer == Mamba(
        inner=80, state_dim=16, rank=5, width=4, activation="silu", norm=None, bias=True
    )
    jamba = model_config(
        {"model_type": "jamba", "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1}
    )
    assert [type(layer.mixer) for layer in jamba.layers] == [Mamba, Attention, Mamba] * 2
    assert [type(layer.feed_forward) for layer in jamba.layers] == [GatedMLP, Experts] * 3
    dense = model_config({"model_type": "jamba", "num_experts": 1})
    assert {type(layer.feed_forward) for layer in dense.layers} == {GatedMLP}
    with pytest.raises(UnsupportedModel, match="attn_layer_offset"):
        model_config({"model_type": "jamba", "attn_layer_offset": 8})


def test_apertus() -> None:
    """Its rope is Llama 3's where no key says another."""
    plain = model_config({"model_type": "apertus", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})
    assert plain.layers[0].feed_forward == MLP(inner=14336, activation="xielu", bias=False)
    assert plain.ropes != model_config({"model_type": "apertus"}).ropes
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        model_config({"model_type": "apertus", "hidden_act": "silu"})


def test_gte() -> None:
    """Its own way to stretch positions: https://kexue.fm/archives/9706, equations 6 and 10 to 13."""
    keys = {"model_type": "new", "rope_theta": 5e5, "max_position_embeddings": 8192}
    got = model_config({**keys, "rope_scaling": {"type": "ntk", "factor": 2.0}})
    plain = np.array(model_config(keys).ropes[0].inv_freq)
    steps = np.arange(len(plain))
    assert got.max_position == 8192 and got.layers[0].feed_forward.down_bias
    np.testing.assert_allclose(got.ropes[0].inv_freq, (2 * 5e5) ** (-steps / 32) / 2 ** (2 / 64), rtol=1e-6)
    mixed = model_config({**keys, "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}})
    by = np.exp(np.log(2.0) / 32**0.6 * (steps + 1) ** 0.6)
    np.testing.assert_allclose(mixed.ropes[0].inv_freq, plain / by, rtol=1e-6)
    with pytest.raises(UnsupportedModel, match="logn_attention_scale"):
        model_config({**keys, "logn_attention_scale": True})


def test_reward_models() -> None:
    made = model_config({"architectures": ["Qwen2ForProcessRewardModel"], "hidden_size": 64, "num_labels": 2}).pooler
    assert made is not None and made.task == "classify" and made.activation == "identity"
    assert made.dense == (Dense(size=64, activation="relu"), Dense(size=2))
    made = model_config({"architectures": ["InternLM2ForRewardModel"]}).pooler
    assert made is not None and made.dense == (Dense(size=1, bias=False),)
    labels = model_config({"architectures": ["Gemma3TextForSequenceClassification"], "num_labels": 3}).pooler
    assert labels is not None and labels.dense == (Dense(size=3, bias=False),)


def test_exaone_as_the_newest_transformers_writes_it() -> None:
    """With Llama's class, words of Llama for sizes, and the tensors' own names."""
    old = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": 2, "layer_norm_epsilon": 1e-5}
    new = {"architectures": ["LlamaForCausalLM"], "model_type": "exaone", "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    assert model_config({**SMALL, **new}) == model_config({**SMALL, **old})
    assert tensor_names({**SMALL, **new}) == tensor_names({**SMALL, **old}) is not None


def test_rewards_of_a_family_with_other_words_for_sizes() -> None:
    gpt2 = {"architectures": ["GPT2ForRewardModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    pooler = model_config(gpt2).pooler
    assert pooler is not None and [dense.size for dense in pooler.dense] == [64, 1]


ENCODERS = ("Model", "ForMaskedLM", "ForSequenceClassification")
# Families whose layers here have windows, and so no scaling.
WINDOWS = {"Gemma3ForCausalLM", "Gemma3nForCausalLM", *(f"ModernBert{end}" for end in ENCODERS)}
# Families that rotate a part of each head.
PARTIAL = {
    "BambaForCausalLM",
    "Gemma4ForCausalLM",  # by kind of layer
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "ChatGLMForConditionalGeneration",
    "ChatGLMModel",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "NemotronForCausalLM",
    "Phi3ForCausalLM",
    "Molmo2ForCausalLM",
    "MoondreamForCausalLM",
    "PhiForCausalLM",
    "Qwen3NextForCausalLM",
    "StableLMEpochForCausalLM",
    "StableLmForCausalLM",
}
# Families with layers that do not know positions.
PARTLY_ROTATED = {
    "Cohere2ForCausalLM",
    "Exaone4ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Llama4ForCausalLM",
    "NemotronHForCausalLM",
    "SmolLM3ForCausalLM",
}
# Families with positions elsewhere.
ROPELESS = {
    *(f"{name}{end}" for name in ("Bert", "Roberta", "XLMRoberta") for end in ENCODERS),
    "BlipTextLMHeadModel",
    "HF_ColBERT",
    "FalconMambaForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "BaichuanForCausalLM",  # of this size
    "BloomForCausalLM",
    "CLIPTextModelWithProjection",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "MPTForCausalLM",
    "MetaClip2TextModelWithProjection",
    "MptForCausalLM",
    "OPTForCausalLM",
    "SiglipTextModel",
}


@pytest.mark.parametrize("family", sorted(ARCHITECTURES.keys() - PARTIAL - ROPELESS))
def test_heads_are_rotated_whole_as_in_transformers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"architectures": [family], **SMALL, "num_key_value_heads": 2, "head_dim": 16, **NEEDED.get(family, {})}
    plain = model_config(keys)
    assert model_config({**keys, "partial_rotary_factor": 0.5}) == plain and not plain.ropes[0].rotary_dim % 16
    assert "partial_rotary_factor = 0.5 has no effect" in caplog.text
    # A GGUF file means it.
    half = model_config({**keys, "partial_rotary_factor": 0.5, "rope_dimension_count": 8})
    assert {rope.rotary_dim for rope in half.ropes} == {8}
    if family not in WINDOWS:
        with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor = 0\.5 is not supported"):
            model_config({**keys, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2}})


@settings(max_examples=400)
@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.none() | SCALINGS,
    st.none() | st.integers(1, 10**6),
)
@example("LlamaForCausalLM", {"rope_scaling": {"\n": False}}, None, None)
def test_any_config_is_read_or_refused(family: str, keys: Any, scaling: Any, max_model_len: int | None) -> None:
    needed = {"num_key_value_heads": 2, **NEEDED.get(family, {})}
    whole = {"architectures": [family], **SMALL, **needed, "rope_scaling": scaling, **keys}
    try:
        got = model_config(whole, max_model_len=max_model_len)
    except UnsupportedModel as error:
        assert "\n" not in str(error)
        return
    for attention in (layer.mixer for layer in got.layers):
        if isinstance(attention, GatedDelta):
            assert attention.value_heads % attention.key_heads == 0
            continue
        if isinstance(attention, ChannelDelta | LightningAttention | Mamba | Mamba2 | ShortConvolution):
            continue
        rope, latent = attention.rope, isinstance(attention, LatentAttention)
        assert latent or attention.heads % attention.kv_heads == 0
        if rope is None:
            assert attention.slopes is not None or got.positions is not None or family in PARTLY_ROTATED
            continue
        assert np.isfinite(rope.inv_freq).all() and np.isfinite(rope.attention_factor)
        assert 0 < rope.rotary_dim <= (attention.rope_dim if latent else attention.head_dim)


@pytest.mark.parametrize("architecture", sorted(LACKING))
def test_models_that_see_in_other_ways_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        model_config({"architectures": [architecture], "hidden_size": 64})
    assert str(error.value).startswith(f"config.json: architecture {architecture!r} is not supported: ")
    assert LACKING[architecture] in str(error.value) and "hf_overrides" not in str(error.value)


def test_captions_are_written_behind_a_picture() -> None:
    """A layer of a file is two, of which the second sees the picture alone; the first position is that after it."""
    keys = {"architectures": ["BlipForConditionalGeneration"], "text_config": {"model_type": "blip_text_model"}}
    text = text_config({**keys, "vision_config": {"image_size": 384, "patch_size": 16}})
    assert text is not None
    model = model_config({**text, "num_attention_heads": 12, "encoder_hidden_size": 1024})
    assert model.looks_up and model.num_layers == 24 and model.max_position == 577 + 512
    assert model.positions is not None and (model.positions.first, model.positions.count) == (577, 512)
    mixers = [layer.mixer for layer in model.layers]
    assert all(isinstance(mixer, Attention) for mixer in mixers)
    assert [mixer.picture for mixer in mixers] == [Picture(577), Picture(577, 1024)] * 12  # type: ignore[union-attr]
    assert model.eos_token_ids == (102,) and model.head_activation == "gelu"
    with pytest.raises(UnsupportedModel, match="is_decoder"):
        model_config({**text, "is_decoder": False})
