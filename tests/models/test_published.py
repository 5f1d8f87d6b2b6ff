"""config.json of published checkpoints: it gives the model that was published, and each of its keys is read or known
to change nothing.

published.json has a line for each: its keys, and its parameters in billions, as its files have them without layers that
guess further tokens, without images, without keys and values that no layer reads, and tied matrices once. Facts of the
files and cards at https://huggingface.co.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from llmjax.models import Experts, ModelConfig, UnsupportedModel, abstract_model, model_config, text_config
from llmjax.models.fields import Fields

CHECKPOINTS = json.loads((Path(__file__).parent / "published.json").read_text())

# Read elsewhere than by a family.
ELSEWHERE = {"architectures", "model_type", "quantization_config", "tie_word_embeddings", "is_causal", "head_dim"}
TRAINING = {
    *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop"),
    *("emb_pdrop", "resid_pdrop", "attn_pdrop", "dropout", "activation_dropout", "layerdrop", "classifier_dropout"),
    *("embed_dropout", "embedding_dropout", "residual_dropout", "mlp_dropout", "summary_first_dropout"),
    *("initializer_range", "init_std", "init_config", "init_device", "init_method", "block_mlp_init_scale"),
    *("block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init", "rescale_prenorm_residual"),
    *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "gradient_checkpointing", "verbose"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "use_mixed_mlp_moe", "lora_rank", "lora_alpha"),
    *("lora_dropout_p", "lora_main_params_trainable"),
    *("z_loss_weight", "input_jitter_noise", "router_jitter_noise", "moe_capacity", "bias_dropout_fusion"),
    *("sparse_prediction", "sparse_pred_ignore_index", "use_xentropy", "time_step_floor", "time_step_init_scheme"),
    *("altup_coef_clip", "altup_lr_multiplier"),
    *("time_step_max", "time_step_min", "time_step_rank", "time_step_scale", "max_trained_positions", "pretraining_tp"),
}
RUNTIME = {
    *("use_cache", "auto_map", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "tokenizer_class"),
    *("tokenizer_name", "cache_implementation", "attn_implementation", "ep_size", "num_logits_to_keep", "prefix"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "apply_query_key_layer_scaling", "skip_bias_add"),
    *("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input", "masked_softmax_fusion"),
    *("slow_but_exact", "skip_bias_add_qkv", "offset_alibi", "mamba_chunk_size", "chunk_size", "mamba_ssm_dtype"),
    *("mamba_ssm_cache_dtype", "use_mamba_kernels", "residual_in_fp32", "deterministic_flash_attn", "use_flash_attn"),
    *("fused_bias_fc", "fused_dropout_add_ln", "dense_seq_output", "reorder_and_upcast_attn", "is_llama_config"),
    *("transformers.js_config", "pad_vocab_size_multiple", "task_specific_params", "output_past"),
    *("for_llm_compressor", "_attn_implementation_autoset"),
}
# Of heads that are not there, of images, of tokens that tokenizers add, of layers that guess further tokens.
NOT_THERE = {
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "use_mtp"),
    *("mtp_transformer_layers", "num_mtp_modules", "index_share_for_mtp_iteration", "add_classification_head"),
    *("class_num", "pool_type", "dense_list", "id2label", "label2id", "prefix_projection", "classifier_activation"),
    *("classifier_bias", "classifier_pooling", "decoder_bias", "summary_type", "summary_use_proj", "cls_token_id"),
    *("summary_proj_to_labels", "pad_token_id", "pad_id", "unk_token_id", "sep_token_id", "mask_init_id", "im_end_id"),
    *("im_newline_id", "im_start_id", "text_end_id", "text_start_id", "mtp_loss_scaling_factor", "mlp_bias"),
}
# What follows from other keys, or what neither Hugging Face's class nor the published code reads.
FOLLOWS = {
    *("n_ctx", "qk_head_dim", "org_vocab_size", "attention_head_dim", "cla_share_factor", "block_dim", "conv_dim"),
    *("conv_dim_out", "num_heads", "mamba_expand", "expand", "mlp_expansion_factor", "experts_per_token", "mlp_type"),
    *(
        "initial_context_length",
        "sliding_window_size",
        "_sliding_window_pattern",
        "use_grouped_topk",
        "model_max_length",
    ),
    *("block_norm_eps", "rms_norm", "norm_before_gate", "mamba_use_mlp", "norm_type", "use_embedding_sharing"),
    *("use_parallel_embedding", "layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode"),
    *("swa_rope_theta", "moe_gate", "moe_use_aux_free", "learned_pos_emb", "parallel_block_tied_norm"),
    *(
        "hidden_activation",
        "hidden_act",
        "sliding_window_pattern",
        "mup_denominator",
        "activation_function",
        "scale_attn_weights",
        "max_window_layers",
    ),
}


def not_needed(config: Mapping[str, Any]) -> set[str]:
    """Keys that others make meaningless."""
    found = TRAINING | RUNTIME | NOT_THERE | FOLLOWS | ELSEWHERE
    if not config.get("use_sliding_window"):
        found |= {"sliding_window"} if "use_sliding_window" in config else set()
    if config.get("n_group", 1) == 1:
        found |= {"n_group", "topk_group"}
    if "indexer_types" in config:
        found |= {"index_topk_freq", "index_skip_topk_offset"}
    if config["model_type"] in ("mamba2", "nemotron_h", "qwen3_5_moe_text"):  # whose layers have no MLP of that size
        found |= {"intermediate_size", "rms_norm_eps"}
    if "moe_layers" in config:
        found |= {"interleave_moe_layer_step"}
    if config.get("position_embedding_type") == "nope":
        found |= {"rope_theta"}
    if config["model_type"] == "modernbert":
        found |= {"layer_norm_eps", "position_embedding_type"}
    if config.get("new_decoder_architecture"):
        found |= {"multi_query"}
    if config["model_type"] == "starcoder2":
        found |= {"layer_norm_epsilon"}
    return found


def declared(model: ModelConfig) -> dict[str, int]:
    """How many numbers each parameter has."""
    _, shapes = abstract_model(model, dtype=jnp.dtype(jnp.bfloat16), activation_dtype=jnp.dtype(jnp.bfloat16))
    return {name: math.prod(like.shape) for name, like in shapes.items()}


def parameters(model: ModelConfig) -> int:
    """How many numbers all parameters have; of equal layers one is declared."""
    if model.per_layer is not None:  # embeddings have a part for each layer
        return sum(declared(model).values())
    alike = Counter(model.layers)
    times = {f"model.layers.{i}": count for i, count in enumerate(alike.values())}
    return sum(
        size * times.get(".".join(name.split(".")[:3]), 1)
        for name, size in declared(replace(model, layers=tuple(alike))).items()
    )


def config_of(name: str) -> dict[str, Any]:
    whole = CHECKPOINTS[name]["config"]
    return text_config(whole) or whole


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_published_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked, get = config_of(name), set[str](), Fields.get

    def recorded(fields: Fields, key: str) -> Any:
        asked.update((key, fields._shown(key)))
        return get(fields, key)

    monkeypatch.setattr(Fields, "get", recorded)
    model = model_config(config)
    assert {key for key, value in config.items() if value is not None} - asked - not_needed(config) == set()
    assert parameters(model) / 1e9 == pytest.approx(CHECKPOINTS[name]["parameters"], rel=2e-3)


QWEN_1M = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", {"attn_logit_softcapping": 30.0}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"final_logit_softcapping": 30.0}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"query_pre_attn_scalar": 144}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"num_experts": 8}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"no_rope_layers": [1, 0] * 40}),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", {"rope_interleaved": True}),
        ("Qwen/Qwen3-8B", {"num_kv_shared_layers": 4}),
        ("Qwen/Qwen2.5-72B-Instruct", {"use_mrope": True}),
        (
            "Qwen/Qwen2.5-72B-Instruct",
            {"dual_chunk_attention_config": QWEN_1M, "max_position_embeddings": 1010000},
        ),
        ("mistralai/Mistral-7B-v0.1", {"use_sliding_window": True}),
        ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}),
        ("stabilityai/stablelm-3b-4e1t (first upload)", {"rotary_scaling_factor": 4.0}),
        ("EleutherAI/gpt-j-6b", {"rotary": False}),
        ("zai-org/chatglm2-6b", {"quantization_bit": 4}),
        ("zai-org/chatglm2-6b", {"interleaved_qkv": True}),
        ("tencent/Hunyuan-7B-Instruct", {"use_cla": True}),
        ("tencent/Hunyuan-7B-Instruct", {"use_rotary_pos_emb": False}),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [0] * 62}),
        ("MiniMaxAI/MiniMax-M2", {"layernorm_mlp_beta": 2.0}),
        ("LiquidAI/LFM2-1.2B", {"block_use_swiglu": False}),
        ("ibm-granite/granite-4.0-h-tiny", {"normalization_function": "layernorm"}),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"position_embedding_type": "alibi"}),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"use_parallel_block": False}),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", {"num_hidden_layers": 55}),
        ("mosaicml/mpt-7b-instruct", {"no_bias": False}),
        ("mosaicml/mpt-7b-instruct", {"use_norm_bias": True}),
        ("mosaicml/mpt-7b-instruct", {"ffn_config": {"ffn_type": "mptglu"}}),
        ("databricks/dbrx-instruct", {"attn_config": {"rope_scaling": {"type": "linear", "factor": 2.0}}}),
        ("baidu/ERNIE-4.5-0.3B-PT", {"compression_ratio": 2.0}),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"compression_ratio": 2.0}),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"moe_norm_gate_logits": False}),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"moe_norm_min": 0.5}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"attn_output_gate": False}),
        ("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", {"attention_bias": True}),
        ("tencent/Hunyuan-A13B-Instruct", {"routed_scaling_factor": 2.5}),
        ("Qwen/Qwen2.5-72B-Instruct", {"use_logn_attn": True}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"position_embedding_type": "alibi"}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"pruned_heads": {"0": [1]}}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"lm_head_multiplier": 0.5}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"key_multiplier": 0.5}),
        ("meta-llama/Llama-3.1-70B-Instruct", {"scale_depth": 1.4}),
    ],
)
def test_mathematics_that_is_not_implemented(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        model_config({**config_of(name), **changes})


def test_lengths() -> None:
    assert model_config(config_of("CohereLabs/c4ai-command-r-v01")).max_position == 131072
    long = {**config_of("Qwen/Qwen2.5-72B-Instruct"), "max_position_embeddings": 1010000}
    chunked = model_config({**long, "dual_chunk_attention_config": QWEN_1M}, max_model_len=262144)
    assert chunked == model_config(long, max_model_len=262144)


def test_lengths_at_which_blocks_of_keys_are_chosen() -> None:
    """MiniCPM 4.1's InfLLM v2: all keys are attended to below ``dense_len``."""
    config = config_of("openbmb/MiniCPM4-8B")
    sparse = {**config, "sparse_config": {"topk": 64, "block_size": 64, "use_nope": False, "dense_len": 8192}}
    assert model_config(sparse, max_model_len=8191) == model_config(config, max_model_len=8191)
    for longest in (8192, None):
        with pytest.raises(UnsupportedModel, match=r"sparse_config = .* set max_model_len to 8191 or less"):
            model_config(sparse, max_model_len=longest)


def test_a_band_of_no_width_between_scaled_and_plain_frequencies() -> None:
    """Llama 4 Scout's."""
    (rope,) = model_config(config_of("meta-llama/Llama-4-Scout-17B-16E-Instruct")).ropes
    plain = [500000.0 ** (-i / 64) for i in range(64)]
    assert list(rope.inv_freq) == pytest.approx([x if 8192 * x / (2 * math.pi) >= 1 else x / 16 for x in plain])


def test_dense_layers_between_those_of_experts() -> None:
    """Llama 4 Maverick's: every second one, of another size; and no rotation in every fourth."""
    layers = model_config(config_of("meta-llama/Llama-4-Maverick-17B-128E-Instruct (first upload)")).layers
    sizes = [part.count if isinstance(part, Experts) else part.inner for part in (each.feed_forward for each in layers)]
    assert sizes == [16384, 128] * 24
    assert [each.mixer.rope is None for each in layers] == [False, False, False, True] * 12
