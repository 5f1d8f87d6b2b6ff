"""Writes the golden files beside it: tiny random checkpoints and the f32 logits of Hugging Face's models on them.

Needs ``torch`` (CPU), ``transformers`` and ``safetensors``, none of which the tests need:

    python -m tests.models.golden.make_golden [--greedy] [name ...]

An archive a checkpoint, ``<name>.zip``, of a folder in Hugging Face layout: ``config.json`` in the style of
Transformers 4, ``config-v5.json`` as Transformers 5 rewrites it, ``model.safetensors`` (bf16 values, which f32 holds
exactly) and ``golden.npz``. The last holds, per case, ``<case>/tokens`` [n], ``<case>/at`` [m] and ``<case>/logits``
f32 [m, V], the logits at the positions ``at``. Case ``rope-x`` runs under the keys of ``rope-x.json`` on top of
config.json; every other case runs under config.json alone. ``greedy.npy`` is a token and its greedy continuation by
64, i32 [65]; with --greedy only that is written anew, of the weights that are there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion  # type: ignore[import-not-found,unused-ignore]

from tests.checkpoints import GOLDEN, pack
from tests.models.golden.republished import REPUBLISHED

HERE = Path(__file__).parent
VOCAB = 96
LONG, SHORT = 40, 17  # tokens; the long prompt exceeds every window below

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

_EQUAL_HEADS = {"num_key_value_heads": None, "num_hidden_layers": 2}
# Families with keys of their own have none of these.
_WITHOUT = dict.fromkeys(("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
_WITHOUT["max_position_embeddings"] = None
_GPT2 = {**_WITHOUT, "hidden_size": None, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GRANITE = {
    "num_hidden_layers": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_GRANITE_MOE = {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_FALCON_H1 = {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 12, "rope_theta": 1e4}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 1.4,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.6, 1.2, 0.8, 1.1, 0.7],
    "mlp_multipliers": [1.7, 0.5],
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_GEMMA4 = {
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 12.0,
    "tie_word_embeddings": True,
}
_GEMMA3N = {
    "head_dim": 12,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 8,
    "tie_word_embeddings": True,
}
_ODD = {
    "num_hidden_layers": 2,
    "vocab_size": 1003,
    "hidden_size": 76,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}
_GLM = {"num_hidden_layers": 2, "head_dim": 12, "partial_rotary_factor": 0.5, "pad_token_id": 0}

# Heads times head size differs from the hidden size wherever the family allows it.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 9, "rope_theta": 10000.0, "head_dim": 16}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 1,
            "rope_theta": 1e6,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 12.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "rope_theta": 1e6,
            "use_sliding_window": False,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_theta": 10000.0,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "topk_method": "greedy",
            "rope_theta": 100.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e4,
            "full_attention_interval": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"sliding_window": 9, "use_bias": True, "norm_epsilon": 1e-5, "rope_theta": 1e5, "num_attention_heads": 4},
    ),
    "starcoder2-plain": (
        "Starcoder2ForCausalLM",
        {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False, "num_hidden_layers": 2},
    ),
    "phi": (
        "PhiForCausalLM",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "num_hidden_layers": 2},
    ),
    "phi-norm": (
        "PhiForCausalLM",
        {"qk_layernorm": True, "partial_rotary_factor": 0.25, "hidden_act": "gelu_new", "num_hidden_layers": 2},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 11,
            "original_max_position_embeddings": 24,
            "pad_token_id": 0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.2, 2.5, 6.0, 9.5],
            },
        },
    ),
    "phi4-mini": (
        "Phi3ForCausalLM",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 24,
            "pad_token_id": 0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.5, 3.0, 9.0]},
        },
    ),
    "stablelm-3b": (
        "StableLmForCausalLM",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.25, "num_hidden_layers": 2},
    ),
    "stablelm-2": (
        "StableLmForCausalLM",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "use_qkv_bias": True, "num_hidden_layers": 2},
    ),
    "stablelm-2-12b": (
        "StableLmForCausalLM",
        {
            "partial_rotary_factor": 0.25,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "num_hidden_layers": 2,
        },
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**_EQUAL_HEADS, "rotary_pct": 0.25, "rotary_emb_base": 5000}),
    "gpt-neox-in-turn": (
        "GPTNeoXForCausalLM",
        {**_EQUAL_HEADS, "rotary_pct": 0.5, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-scaled": (
        "GPT2LMHeadModel",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 40},
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {**_GPT2, "multi_query": True}),
    "gpt-bigcode-heads": ("GPTBigCodeForCausalLM", {**_GPT2, "multi_query": False}),
    "opt": ("OPTForCausalLM", {**_EQUAL_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "opt-no-bias": (
        "OPTForCausalLM",
        {**_EQUAL_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1, "enable_bias": False},
    ),
    "falcon-7b": ("FalconForCausalLM", {**_EQUAL_HEADS, "multi_query": True}),
    "falcon-40b": (
        "FalconForCausalLM",
        {**_EQUAL_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-11b": (
        "FalconForCausalLM",
        {
            **_EQUAL_HEADS,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 40,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-rw": (
        "FalconForCausalLM",
        {**_EQUAL_HEADS, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": (
        "BloomForCausalLM",
        {**_WITHOUT, "hidden_size": 24, "n_layer": 2, "n_head": 6, "seq_length": 64},
    ),
    "bloom-normed": (
        "BloomForCausalLM",
        {
            **_WITHOUT,
            "hidden_size": 24,
            "n_layer": 2,
            "n_head": 6,
            "seq_length": 64,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        {
            **_WITHOUT,
            "hidden_size": None,
            "d_model": 24,
            "n_layers": 2,
            "n_heads": 6,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 1.5},
        },
    ),
    "opt-350m": (
        "OPTForCausalLM",
        {
            **_EQUAL_HEADS,
            "ffn_dim": 48,
            "word_embed_proj_dim": 20,
            "do_layer_norm_before": False,
            "pad_token_id": 1,
        },
    ),
    "gemma": (
        "GemmaForCausalLM",
        {"num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu", "num_hidden_layers": 2},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 12.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "rope_theta": 1e4, "pad_token_id": 0}),
    "granite": ("GraniteForCausalLM", _GRANITE),
    "granite-moe": ("GraniteMoeForCausalLM", _GRANITE_MOE),
    "granite-moe-shared": ("GraniteMoeSharedForCausalLM", {**_GRANITE_MOE, "shared_intermediate_size": 24}),
    "granite4-dense": (
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 40,
            "layer_types": ["attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "pad_token_id": 0,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.2,
            },
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0},
    ),
    "glm": ("GlmForCausalLM", _GLM),
    "glm4": ("Glm4ForCausalLM", _GLM),
    "chatglm": ("GlmForCausalLM", {**_GLM, "rope_theta": 500.0, "rms_norm_eps": 1e-5}),
    "cohere": (
        "CohereForCausalLM",
        {"num_hidden_layers": 2, "use_qk_norm": True, "logit_scale": 0.25, "pad_token_id": 0},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.5, "pad_token_id": 0},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"num_hidden_layers": 2, "head_dim": 12}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"num_hidden_layers": 2, "head_dim": 12, "use_bias": True}),
    "exaone": ("LlamaForCausalLM", {"num_hidden_layers": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}),
    "exaone4": ("Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4}),
    "internlm2": ("LlamaForCausalLM", {"num_hidden_layers": 2, "attention_bias": True}),
    "internlm3": (
        "LlamaForCausalLM",
        {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "rms_norm_eps": 1e-5},
    ),
    "baichuan": ("LlamaForCausalLM", {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    "baichuan-13b": ("LlamaForCausalLM", {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    "hunyuan": (
        "HunYuanDenseV1ForCausalLM",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "rope_scaling": {
                "type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "minicpm": (
        "GraniteForCausalLM",
        {
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 8**-0.5,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 4.0,
        },
    ),
    "yi": ("LlamaForCausalLM", {"num_hidden_layers": 2}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_theta": 100.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek-v32": (
        "DeepseekV32ForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_theta": 100.0,
            "index_topk": 64,
            "index_head_dim": 16,
            "index_n_heads": 2,
        },
    ),
    # Odd shapes of newer families: head sizes of 72 and 100, hidden sizes that are not multiples of 32, one key for
    # seven queries, a vocabulary of 1,003.
    "qwen3-odd": (
        "Qwen3ForCausalLM",
        {**_ODD, "head_dim": 72, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "mixtral-odd": (
        "MixtralForCausalLM",
        {**_ODD, "head_dim": 100, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek-v3-odd": (
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            **_ODD,
            "num_key_value_heads": 7,
            "qk_nope_head_dim": 72,
            "v_head_dim": 100,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
        },
    ),
    "lfm2-odd": (
        "Lfm2ForCausalLM",
        {
            **_ODD,
            "hidden_size": 84,
            "head_dim": 12,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_multiple_of": 4,
            "rope_theta": 1e4,
        },
    ),
    "gemma4-odd": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            **_ODD,
            "head_dim": 72,
            "global_head_dim": 100,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 1003,
        },
    ),
    "qwen3_5-odd": (
        "Qwen3_5ForCausalLM",
        {
            **_DELTA_NET,
            **_ODD,
            "head_dim": 72,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 7,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
        },
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "dots1": (
        "Dots1ForCausalLM",
        {**_DEEPSEEK_EXPERTS, "head_dim": 12, "sliding_window": 9, "max_window_layers": 2, "norm_topk_prob": True},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "rotary_dim": 6,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        {"num_hidden_layers": 2, "head_dim": 12, "intermediate_size": 16, "num_experts": 8, "moe_topk": 3},
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {
            **_LATENT,
            "num_hidden_layers": 2,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 8,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-moe": ("LlamaForCausalLM", {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "intermediate_size": 60,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.1,
            "rope_theta": 1e4,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
            "rope_theta": 1e4,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            **_WITHOUT,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 12,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 8,
            "use_bias": True,
        },
    ),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE_MOE,
            **_MAMBA,
            "num_hidden_layers": 3,
            "intermediate_size": 16,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {**_MAMBA, "attn_layer_indices": [2], "mamba_proj_bias": True, "time_step_limit": [0.2, 1.5]},
    ),
    "falcon-h1": ("FalconH1ForCausalLM", {**_FALCON_H1, **_FACTORS, "num_hidden_layers": 3}),
    # 7 queries a key, of which there is one; a head size and a hidden size that are not multiples of 32.
    "falcon-h1-odd": (
        "FalconH1ForCausalLM",
        {
            **_FALCON_H1,
            "num_hidden_layers": 2,
            "vocab_size": 1003,
            "hidden_size": 76,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 100,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.7,
            "mlp_multipliers": [1.0, 0.6],
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 7,
            "hybrid_override_pattern": "M-MM*-M",
            "head_dim": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 12,
            "time_step_min": 0.2,
        },
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**_DELTA_NET, "tie_word_embeddings": True}),
    "qwen3_5-moe": (
        "Qwen3_5MoeForCausalLM",
        {
            **_DELTA_NET,
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 128,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.2, 2.5, 6.0, 9.5],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            **_WITHOUT,
            "hidden_size": None,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "rope_theta": 5000.0,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 3},
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 16,
            "intermediate_size_mlp": 40,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "floor_scale": 64,
            "rope_theta": 5000.0,
        },
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "ME*EMM",
            "head_dim": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": 20,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "block_size": 7,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "rope_theta": 1e4,
            "full_attn_alpha_factor": 1.5,
            "linear_attn_alpha_factor": 0.7,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.8,
        },
    ),
    "gemma4-plain": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-experts": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "llama4-long": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 16,
            "intermediate_size_mlp": 40,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "rope_theta": 5000.0,
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **_GEMMA3N,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 3,
            "activation_sparsity_pattern": [0.7, 0.4, 0.0, 0.0, 0.0, 0.0],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3n-odd": (
        "Gemma3nForCausalLM",
        {
            **_GEMMA3N,
            **_ODD,
            "hidden_size": 70,  # which heads have to divide
            "layer_types": ["sliding_attention", "full_attention"],
            "intermediate_size": [40, 56],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.5],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_coef_clip": 0.4,
            "altup_correct_scale": False,
        },
    ),
    "deepseek-v32-sparse": (
        "DeepseekV32ForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "rope_theta": 100.0,
            "index_topk": 12,
            "index_head_dim": 20,
            "index_n_heads": 16,  # many, so that scores are not zero, and so alike
        },
    ),
    "arcee": ("ArceeForCausalLM", {"num_hidden_layers": 2, "hidden_act": "relu2", "attention_bias": True}),
    "olmo": ("OlmoForCausalLM", {"num_hidden_layers": 2, "clip_qkv": 1.2}),
    "nemotron": ("NemotronForCausalLM", {"num_hidden_layers": 2, "hidden_act": "relu2", "head_dim": 12}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rope_theta": 1e4,
        },
    ),
    "glm-moe-dsa": (
        "GlmMoeDsaForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 2,
            "n_shared_experts": 1,
            "rope_theta": 100.0,
            "index_topk": 12,
            "index_head_dim": 20,
            "index_n_heads": 16,
        },
    ),
    "glm-moe-dsa-shared": (
        "GlmMoeDsaForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 4,
            "n_shared_experts": 1,
            "rope_theta": 100.0,
            "index_topk": 12,
            "index_head_dim": 20,
            "index_n_heads": 16,
            "indexer_types": ["full", "shared", "shared", "full", "shared"],
        },
    ),
    "apertus": (
        "ApertusForCausalLM",
        {
            "num_hidden_layers": 2,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "rope_theta": 500.0,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        {
            **_WITHOUT,
            "num_hidden_layers": 2,
            "state_size": 6,
            "time_step_rank": 5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-mamba": (
        "FalconMambaForCausalLM",
        {**_WITHOUT, "num_hidden_layers": 2, "state_size": 6, "tie_word_embeddings": False},
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_d_state": 6,
            "pad_token_id": 0,
        },
    ),
    "kimi-linear": (
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 10,
            "linear_num_heads": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "pad_token_id": 0,
        },
    ),
    "bitnet": ("BitNetForCausalLM", {"num_hidden_layers": 2, "rope_theta": 1e4, "tie_word_embeddings": True}),
}
CONTINUED = 64  # tokens: with one before them no more positions than SIZES has
CLOSE = 2e-3  # logits that are nearer to each other may change places
SAME = 2e-4  # as far apart may logits of the same model be
CONSTANTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # of MiniMax, which follow from the config
STACKED = ("qwen2-moe",)  # experts as Transformers 5 has them in memory; else one by one, as checkpoints are published

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.5, 6.0, 9.5],
    "original_max_position_embeddings": 24,
}
_DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 24}
GROWN = {"rope-longrope-grown": 17, "rope-dynamic-grown": 17, "rope-dynamic-further": 30}
"""Cases that continue a prompt token by token, with the prompt's number of tokens."""

ROPES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "rope-dynamic": _DYNAMIC,
        "rope-llama3": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "rope_theta": 500.0,
        },
        "rope-yarn": {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "rope_theta": 500.0,
        },
        "rope-yarn-mscale": {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 2,
                "beta_slow": 0.5,
                "mscale": 1.5,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
            "rope_theta": 100.0,
        },
        "rope-longrope-long": {"rope_scaling": _LONGROPE},
        "rope-longrope-short": {"rope_scaling": _LONGROPE},
        "rope-longrope-grown": {"rope_scaling": _LONGROPE},
        "rope-dynamic-grown": _DYNAMIC,
        "rope-dynamic-further": _DYNAMIC,
    },
    "qwen3": {
        "rope-v5": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            }
        }
    },
}


def build(architecture: str, config: dict) -> torch.nn.Module:
    cls = getattr(transformers, architecture)
    made = cls.config_class(**json.loads(json.dumps({k: v for k, v in config.items() if k != "architectures"})))
    # Falcon's eager attention adds ALiBi's biases twice, in the mask and to the scores.
    made._attn_implementation = "sdpa" if config.get("alibi") else "eager"
    return cls(made).eval().float()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights with enough spread that every operation shows in the logits, rounded to bf16."""
    generator = torch.Generator().manual_seed(seed)
    # Norms with weights of about zero.
    plus_one = type(model).__name__.startswith(("GemmaF", "Gemma2", "Gemma3F", "NemotronF", "Qwen3Next", "Qwen3_5"))
    corrections = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
    ]
    for name, parameter in [*model.named_parameters(), *corrections]:
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(".weight") and parameter.ndim == 1:
            value = 0.3 * noise + (0.0 if plus_one and "linear_attn" not in name else 1.0)
        elif parameter.ndim > 1:
            value = noise * (1.6 / parameter.shape[-1] ** 0.5)
        elif name.endswith("layer_scalar"):
            value = 1 + 0.1 * noise
        else:
            value = 0.3 * noise
        parameter.data.copy_(value.to(torch.bfloat16).float())


def published(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The weights by the names that checkpoints have them under, experts one by one."""
    state = model.state_dict()
    return state if name in STACKED else revert_weight_conversion(model, state)


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: np.ndarray, at: np.ndarray, prompt_len: int | None = None) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    out = model(ids[:, :prompt_len], use_cache=prompt_len is not None)
    found = [out.logits[0]]
    for i in range(prompt_len or len(tokens), len(tokens)):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits[0])
    return torch.cat(found)[torch.from_numpy(at)].float().numpy()


@torch.no_grad()
def greedy(model: torch.nn.Module) -> np.ndarray:
    """A token and its likeliest continuation, i32 [65], none of whose tokens is nearly as likely as another.

    Token by token with a cache where angles depend on how long a sequence is when a token is taken in.
    """
    scaling = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_length = scaling.get("rope_type") in ("longrope", "dynamic")
    for first in np.random.default_rng(7).permutation(model.config.get_text_config().vocab_size):
        tokens, nearest, kept = torch.tensor([[int(first)]]), float("inf"), None
        while tokens.shape[1] <= CONTINUED and nearest > CLOSE:
            out = model(tokens if kept is None else tokens[:, -1:], past_key_values=kept, use_cache=by_length)
            best, chosen = out.logits[0, -1].topk(2)
            kept = out.past_key_values if by_length else None
            nearest = min(nearest, float(best[0] - best[1]))
            tokens = torch.cat([tokens, chosen[None, :1]], dim=1)
        if nearest > CLOSE:
            return tokens[0].numpy().astype(np.int32)
    raise ValueError(f"every continuation comes to two tokens that are within {CLOSE} of each other")


def stored(name: str, architecture: str, config: dict, seed: int) -> torch.nn.Module:
    """The model whose files are there.

    Raises:
        ValueError: this version of transformers finds other logits.
    """
    again = REPUBLISHED.get(name)
    if again is None:
        model = build(architecture, config)
        cls, how = type(model), model.config._attn_implementation
        model = cls.from_pretrained(GOLDEN / name, dtype=torch.float32, attn_implementation=how).eval()
    else:  # no class of transformers reads these files
        model = build(architecture, config)
        again.adapt(model, config)
        randomize(model, seed)
        if again.fused is None:  # the seed is a place among all checkpoints, which may have changed
            files = load_file(GOLDEN / name / "model.safetensors")
            model.load_state_dict({own: files[again.name_of(own)] for own in model.state_dict()})
    with np.load(GOLDEN / name / "golden.npz") as archive:
        tokens, at, expected = (archive[f"long/{part}"] for part in ("tokens", "at", "logits"))
    if np.abs(logits_of(model, tokens, at) - expected).max() > SAME:
        raise ValueError(f"{name}: other logits than those in golden.npz")
    return model


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--greedy"]
    for seed, (name, (architecture, differences)) in enumerate(CHECKPOINTS.items()):
        if names and name not in names:
            continue
        config = {"architectures": [architecture], **SIZES, **differences}
        own = {key for key, value in differences.items() if value is None and key in SIZES}
        config = {key: value for key, value in config.items() if key not in own}
        config["model_type"] = getattr(transformers, architecture).config_class.model_type
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if "--greedy" in sys.argv:
                model = stored(name, architecture, config, seed)
                shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
            else:
                model = drawn(name, architecture, config, seed, folder)
                write_cases(name, architecture, config, model, folder)
            np.save(folder / "greedy.npy", greedy(model))
            pack(folder, HERE / f"{name}.zip")


def drawn(name: str, architecture: str, config: dict, seed: int, folder: Path) -> torch.nn.Module:
    """A model with random weights; its configuration and weights are written."""
    again = REPUBLISHED.get(name)
    written = config if again is None else again.config(config)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    model = build(architecture, config)
    if again is None:
        model.config.architectures = [architecture]
        (folder / "config-v5.json").write_text(model.config.to_json_string() + "\n")
    else:
        again.adapt(model, config)
    randomize(model, seed)
    tied = model.config.tie_word_embeddings
    state = {
        k: v.to(torch.bfloat16).contiguous()
        for k, v in published(model, name).items()
        if not (tied and k == "lm_head.weight") and not k.endswith(CONSTANTS)
    }
    state = state if again is None else again.tensors(state, config)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def write_cases(name: str, architecture: str, config: dict, model: torch.nn.Module, folder: Path) -> None:
    """The prompts, and what the model makes of them."""
    rng = np.random.default_rng(2)
    prompts = {
        "long": rng.integers(0, VOCAB, LONG, dtype=np.int32),
        "short": rng.integers(0, VOCAB, SHORT, dtype=np.int32),
    }
    cases: dict[str, np.ndarray] = {}

    def record(case: str, under: torch.nn.Module, tokens: np.ndarray, step: int) -> None:
        at = np.arange(len(tokens) - 1, -1, -step)[::-1].copy()
        logits = logits_of(under, tokens, at, GROWN.get(case))
        cases.update({f"{case}/tokens": tokens, f"{case}/at": at, f"{case}/logits": logits})

    for prompt, tokens in prompts.items():
        record(prompt, model, tokens, 1)
    for case, keys in ROPES.get(name, {}).items():
        (folder / f"{case}.json").write_text(json.dumps(keys, indent=2) + "\n")
        scaled = build(architecture, {**config, **keys})
        scaled.load_state_dict(model.state_dict())
        record(case, scaled, prompts["short" if case.endswith("-short") else "long"], 3)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **cases)
    print(name, sum(p.numel() for p in model.parameters()), float(np.abs(cases["long/logits"]).max()))


if __name__ == "__main__":
    main()
