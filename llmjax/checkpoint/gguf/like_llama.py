"""Decoders with RMS norms and gated MLPs, like Llama, in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf import encoders, recurrent
from llmjax.checkpoint.gguf.architecture import LAYER_NORM, Architecture, in_first_layer, layer_kinds, window_of
from llmjax.checkpoint.gguf.experts import mixtral_experts
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    EXPERT_TENSORS,
    GEMMA_NORMS,
    GLM4_NORMS,
    HEAD_NORMS,
    LLAMA_LAYER,
    NORM_BEFORE_MLP,
    NORMS_BEHIND,
    NORMS_INSIDE,
)

AXES = 3
"""Time, rows and columns of positions where there are pictures."""


def _llama(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Mistral shares llama's GGUF architecture and differs by its window alone, Mixtral by its experts.
    window = keys.integer("attention.sliding_window", 0, least=0)
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return (windowed if window else {}) | mixtral_experts(keys, config, gguf)


def _gemma2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # 27B, told by its depth, scales by hidden size over heads; no key carries query_pre_attn_scalar.
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scaled_by = config["hidden_size"] // heads if layers == 46 else config["head_dim"]
    return {
        "query_pre_attn_scalar": round(keys.positive("attention.scale", scaled_by**-0.5) ** -2, 3),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": layer_kinds(keys, layers, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # 27B, told by its depth, scales by hidden size over heads; no key carries query_pre_attn_scalar.
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    scale = keys.positive("attention.scale", scaled_by**-0.5)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": round(scale**-2, 3),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }
    pattern = keys.value("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (layers,):
            keys.fail("attention.sliding_window_pattern", f"has {pattern.size} elements for {layers} layers")
        found["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern.tolist()]
    else:
        found["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern", 6)
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.only(key, head_dim)
    return found


def phi3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys about windows; there is no length before scaling."""
    return {"sliding_window": window_of(keys), "original_max_position_embeddings": None}


def granite(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys about Granite's factors."""
    keys.only("rope.scaling.finetuned", True)  # else its heads are not rotated
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        keys.value(f"ssm.{name}", 0)  # of Granite 4 without recurrent layers, whose config.json has them too
    return recurrent.granite_factors(keys, config)


def _granite(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_shared_feed_forward_length", config["intermediate_size"])  # Granite 4's name of its MLP's
    return granite(keys, config, gguf)


def _olmo2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if not (window := window_of(keys)):
        return {}
    kinds = layer_kinds(keys, config["num_hidden_layers"], 4)
    third = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**third, "sliding_window": window, "layer_types": kinds}


def glm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys about rotation: heads are rotated whole unless a key says otherwise."""
    return {} if "partial_rotary_factor" in config else {"partial_rotary_factor": 1.0}


def _of_axes(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of the axes that positions have where there are pictures (Qwen2-VL)."""
    sections = [int(count) for count in np.atleast_1d(keys.value("rope.dimension_sections"))]
    if len(sections) != AXES + 1 or sections[AXES]:
        keys.fail("rope.dimension_sections", f"is not {AXES} numbers and a zero")
    return {
        "rope_scaling": {**(config.get("rope_scaling") or {"rope_type": "default"}), "mrope_section": sections[:AXES]}
    }


def _of_axes_by_turns(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """`_of_axes` of Qwen3-VL, whose axes take turns."""
    keys.integer("n_deepstack_layers", 0, least=0)  # which the encoder's file says too
    found = _of_axes(keys, config, gguf)
    return {"rope_scaling": {**found["rope_scaling"], "mrope_interleaved": True}}


def _internlm2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"bias": config["attention_bias"]}


def _exaone4(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if not (window := window_of(keys)):
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": layer_kinds(keys, config["num_hidden_layers"], 4)}


def _seed_oss(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"attention_out_bias": in_first_layer(gguf, "attn_output.bias")}


def ernie(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys about biases, which either all projections have or none."""
    return {"use_bias": in_first_layer(gguf, "attn_output.bias")}


def _mistral3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    if keys.number("rope.scaling.yarn_log_multiplier", 0.0) and scaling is not None:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}  # equal: queries and keys are not stretched
    if scaling is not None and (sharpens := keys.number("attention.temperature_scale", 0.0)):
        scaling = {**scaling, "llama_4_scaling_beta": sharpens}
    return {"rope_scaling": scaling, "sliding_window": window_of(keys)}


def _olmo(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if config["layer_norm_eps"] != 1e-5:
        keys.fail(LAYER_NORM, "is not that of OLMo, 1e-05")
    return {"clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None}


def _bitnet(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Files that do not say are of the first models, which have SiLU.
    return {"hidden_act": keys.text("hidden_activation", "silu")}


def _minicpm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    depth, hidden = config["num_hidden_layers"], config["hidden_size"]
    # The first files have none of these keys, and are of the first models.
    return {
        "scale_emb": keys.number("embedding_scale", 12.0),
        "scale_depth": keys.number("residual_scale", 1.4 / depth**0.5) * depth**0.5,
        "dim_model_base": round(hidden / keys.positive("logit_scale", hidden / 256)),
    }


_plain = partial(Architecture, layer_tensors=LLAMA_LAYER)
_permuted = partial(_plain, permuted_qk=True)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _permuted(
            hf_class="LlamaForCausalLM",
            model_type="llama",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS,
            specialize=_llama,
        ),
        "mistral3": _permuted(hf_class="Ministral3ForCausalLM", model_type="ministral3", specialize=_mistral3),
        "arcee": _permuted(hf_class="ArceeForCausalLM", model_type="arcee", activation=("hidden_act", "relu2")),
        "olmo": _permuted(
            hf_class="OlmoForCausalLM",
            model_type="olmo",
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=_olmo,
        ),
        "nemotron": _plain(
            hf_class="NemotronForCausalLM",
            model_type="nemotron",
            norm_offset=1.0,
            eps=(LAYER_NORM, "norm_eps"),
            activation=("hidden_act", "relu2"),
        ),
        # Before qwen2, and qwen3vl before qwen3: the last one of a class is what its models are written as.
        "qwen2vl": _plain(hf_class="Qwen2ForCausalLM", model_type="qwen2", bias_keys=False, specialize=_of_axes),
        "qwen2": _plain(hf_class="Qwen2ForCausalLM", model_type="qwen2", bias_keys=False),
        "qwen3vl": Architecture(
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            specialize=_of_axes_by_turns,
        ),
        "qwen3": Architecture(
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            specialize=encoders.qwen3,
        ),
        "gemma": _plain(
            hf_class="GemmaForCausalLM",
            model_type="gemma",
            norm_offset=1.0,
            activation=("hidden_act", "gelu_pytorch_tanh"),
        ),
        "gemma2": Architecture(
            hf_class="Gemma2ForCausalLM",
            model_type="gemma2",
            layer_tensors=LLAMA_LAYER | GEMMA_NORMS,
            norm_offset=1.0,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            specialize=_gemma2,
        ),
        "gemma3": Architecture(
            hf_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | GEMMA_NORMS,
            norm_offset=1.0,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            specialize=_gemma3,
        ),
        "phi3": _plain(hf_class="Phi3ForCausalLM", model_type="phi3", fused_gate=True, specialize=phi3),
        "smollm3": _permuted(hf_class="SmolLM3ForCausalLM", model_type="smollm3"),
        "granite": _permuted(hf_class="GraniteForCausalLM", model_type="granite", specialize=_granite),
        "olmo2": Architecture(
            hf_class="Olmo2ForCausalLM",
            model_type="olmo2",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | NORMS_BEHIND,
            specialize=_olmo2,
        ),
        "chatglm": _plain(hf_class="GlmForCausalLM", model_type="glm", fused_gate=True, specialize=glm),
        "glm4": Architecture(
            hf_class="Glm4ForCausalLM",
            model_type="glm4",
            layer_tensors=LLAMA_LAYER | GLM4_NORMS,
            fused_gate=True,
            specialize=glm,
        ),
        "internlm2": _permuted(hf_class="InternLM2ForCausalLM", model_type="internlm2", specialize=_internlm2),
        "exaone": _plain(hf_class="ExaoneForCausalLM", model_type="exaone"),
        "exaone4": Architecture(
            hf_class="Exaone4ForCausalLM",
            model_type="exaone4",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | NORMS_BEHIND,
            specialize=_exaone4,
        ),
        "apertus": Architecture(
            hf_class="ApertusForCausalLM",
            model_type="apertus",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            activation=("hidden_act", "xielu"),
            numbers={
                f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
                for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
            },
        ),
        "seed_oss": Architecture(
            hf_class="SeedOssForCausalLM",
            model_type="seed_oss",
            layer_tensors=LLAMA_LAYER | NORM_BEFORE_MLP,
            specialize=_seed_oss,
        ),
        "ernie4_5": _plain(hf_class="Ernie4_5ForCausalLM", model_type="ernie4_5", bias_keys=False, specialize=ernie),
        "hunyuan-dense": Architecture(
            hf_class="HunYuanDenseV1ForCausalLM",
            model_type="hunyuan_v1_dense",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
        ),
        "bitnet": Architecture(
            hf_class="BitNetForCausalLM",
            model_type="bitnet",
            layer_tensors=LLAMA_LAYER | NORMS_INSIDE,
            specialize=_bitnet,
        ),
        "minicpm": _permuted(hf_class="MiniCPMForCausalLM", model_type="minicpm", specialize=_minicpm),
        "baichuan": _permuted(hf_class="BaichuanForCausalLM", model_type="baichuan"),
    }
)
