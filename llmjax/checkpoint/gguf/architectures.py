"""What each ``general.architecture`` of GGUF files is among Hugging Face's models: the entries of ARCHITECTURES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf import encoders, latent, recurrent
from llmjax.checkpoint.gguf.changes import Change
from llmjax.checkpoint.gguf.experts import deepseek_experts, mixtral_experts, qwen_experts, same_experts
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    CORRECTION,
    CORRECTION_TENSORS,
    DELTA_NET,
    EXPERT_TENSORS,
    FUSED_QKV,
    GEMMA_NORMS,
    GLM4_NORMS,
    HEAD_NORMS,
    LATENT_LAYER,
    LLAMA_LAYER,
    NORM_BEFORE_MLP,
    NORMS_BEHIND,
    ROUTER,
    SHARED_EXPERT_TENSORS,
    SHARED_EXPERTS_TENSORS,
    SHARED_MLP_TENSORS,
    SHORT_CONVOLUTION,
    SINK_TENSORS,
    STATE_SPACE,
    UP,
    WRITTEN_AND_DECAYS,
)
from llmjax.errors import CheckpointError
from llmjax.models import dbrx


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one ``general.architecture`` maps to Hugging Face.

    Attributes:
        hf_class: name for config.json's ``architectures``.
        model_type: config.json's ``model_type``.
        layer_tensors: stem of ``blk.N.<stem>`` to the module below ``model.layers.N``.
        permuted_qk: query and key rows are stored for interleaved rotary embedding.
        norm_offset: what the converter added to weights ending in ``norm.weight``.
        bias_keys: whether config.json says which projections have biases (else the class knows).
        variants: by a stem that only some files have: modules that differ in these.
        fused_gate: ``ffn_up`` holds the gate too, before what it is multiplied with.
        eps: key of the norms' eps in the file, and in config.json.
        activation: config key and value of the MLP's activation.
        attends: whether any layer has attention, and there are keys about it.
        latent: attention is latent, whose heads have other sizes.
        mixed: layers are of several kinds: arrays have 0 for those that a key does not concern.
        family_names: ``layer_tensors`` are called what the family's own checkpoints call them, not what the model does.
        changes: by stem: what the converter does to a tensor, beside what is said here. Takes config.json too.
        parts: by stem: the modules that a tensor is taken apart into. Takes config.json too.
        specialize: keys of this family only, taking what is known of the config so far, and the file.
    """

    hf_class: str
    model_type: str
    layer_tensors: Mapping[str, str]
    permuted_qk: bool = False
    norm_offset: float = 0.0
    bias_keys: bool = True
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_gate: bool = False
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    activation: tuple[str, str] = ("hidden_act", "silu")
    attends: bool = True
    latent: bool = False
    mixed: bool = False
    family_names: bool = False
    changes: Mapping[str, Callable[[GGUFTensor, Mapping[str, Any]], Change]] = field(default_factory=dict)
    parts: Mapping[str, Callable[[GGUFTensor, Mapping[str, Any]], Mapping[str, Change]]] = field(default_factory=dict)
    specialize: Callable[[ArchitectureKeys, dict[str, Any], GGUFFile], dict[str, Any]] = lambda keys, config, gguf: {}

    def modules(self, gguf: GGUFFile) -> Mapping[str, str]:
        """Those of a layer by stem, as a file has them."""
        found = dict(self.layer_tensors)
        for stem, differences in self.variants.items():
            if _in_first_layer(gguf, f"{stem}.weight"):
                found |= differences
        return found


def _llama(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Mistral shares llama's GGUF architecture and differs by its window alone, Mixtral by its experts.
    window = keys.integer("attention.sliding_window", 0, least=0)
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return (windowed if window else {}) | mixtral_experts(keys, config, gguf)


def _gemma3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # 27B, told by its depth, scales by hidden size over heads; no key carries query_pre_attn_scalar.
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    scale = keys.number("attention.scale", scaled_by**-0.5)
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


def _window(keys: ArchitectureKeys) -> int | None:
    return keys.integer("attention.sliding_window", 0, least=0) or None


def _phi3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": _window(keys), "original_max_position_embeddings": None}


def _in_first_layer(gguf: GGUFFile, name: str) -> bool:
    return f"blk.0.{name}" in gguf.tensors


def _stablelm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Converters have written use_parallel_residual for models that are not parallel; readers look at the tensors.
    keys.value("use_parallel_residual", False)
    return {
        "use_qkv_bias": _in_first_layer(gguf, "attn_q.bias") or _in_first_layer(gguf, f"{FUSED_QKV}.bias"),
        "qk_layernorm": _in_first_layer(gguf, "attn_q_norm.weight"),
        "use_parallel_residual": not _in_first_layer(gguf, "ffn_norm.weight"),
    }


def _gptneox(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    parallel = keys.value("use_parallel_residual", True)
    return {"use_parallel_residual": parallel, "attention_bias": _in_first_layer(gguf, f"{FUSED_QKV}.bias")}


def _gpt2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"]}


def _starcoder(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"], "multi_query": config["num_key_value_heads"] == 1}


def _falcon(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    kv_heads, norms = config["num_key_value_heads"], 2 if _in_first_layer(gguf, "attn_norm_2.weight") else 1
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "bias": _in_first_layer(gguf, f"{FUSED_QKV}.bias"),
        "new_decoder_architecture": kv_heads > 1 or norms == 2,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": norms,
    }


def _bloom(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("feed_forward_length", 4 * config["hidden_size"])
    return {}


def _mpt(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    for name in ("position_embd.weight", "blk.0.attn_q_norm.weight", f"blk.0.{FUSED_QKV}.bias"):
        if name in gguf.tensors:
            raise CheckpointError(f"{gguf.path}: tensor {name!r} is not supported with architecture 'mpt'")
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    if inner % hidden:
        keys.fail("feed_forward_length", f"is {inner}, not a multiple of embedding_length = {hidden}")
    keys.value("attention.max_alibi_bias", 0.0)
    attention = {
        "alibi": keys.number("attention.max_alibi_bias", 0.0) > 0,
        "alibi_bias_max": keys.number("attention.max_alibi_bias", 0.0),
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None,
    }
    return {"expansion_ratio": inner // hidden, "attn_config": attention}


def _starcoder2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": _window(keys), "use_bias": _in_first_layer(gguf, "attn_output.bias")}


def _pattern(keys: ArchitectureKeys, layers: int, period: int) -> list[str]:
    """Kinds of layers: as the file has them one by one, or with a full one in each ``period``."""
    given = keys.value("attention.sliding_window_pattern", period)
    if isinstance(given, np.ndarray):
        if given.shape != (layers,):
            keys.fail("attention.sliding_window_pattern", f"has {given.size} elements for {layers} layers")
        sliding = given.tolist()
    else:
        period = keys.integer("attention.sliding_window_pattern", period)
        sliding = [(i + 1) % period > 0 for i in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def _gemma2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # 27B, told by its depth, scales by hidden size over heads; no key carries query_pre_attn_scalar.
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scaled_by = config["hidden_size"] // heads if layers == 46 else config["head_dim"]
    return {
        "query_pre_attn_scalar": round(keys.number("attention.scale", scaled_by**-0.5) ** -2, 3),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": _pattern(keys, layers, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
    }


def _granite(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("rope.scaling.finetuned", True)  # else its heads are not rotated
    return recurrent.granite_factors(keys, config)


def _olmo2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if not (window := _window(keys)):
        return {}
    kinds = _pattern(keys, config["num_hidden_layers"], 4)
    third = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**third, "sliding_window": window, "layer_types": kinds}


def _command_r(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale"), "use_qk_norm": _in_first_layer(gguf, "attn_q_norm.weight")}


def _cohere2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _pattern(keys, config["num_hidden_layers"], 4),
    }


def _glm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {} if "partial_rotary_factor" in config else {"partial_rotary_factor": 1.0}


def _internlm2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"bias": config["attention_bias"]}


def _exaone4(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if not (window := _window(keys)):
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": _pattern(keys, config["num_hidden_layers"], 4)}


def _seed_oss(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"attention_out_bias": _in_first_layer(gguf, "attn_output.bias")}


def _gpt_oss(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 3)  # a softmax over a token's experts
    keys.only("expert_feed_forward_length", config["intermediate_size"])
    scaling = config["rope_scaling"]
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _pattern(keys, config["num_hidden_layers"], 2),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        # No key says that its ramp is not rounded to whole frequencies.
        "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
    }


def _deepseek(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    found = deepseek_experts(keys, config, gguf, gating=1, normalize=False)
    for key in ("n_group", "topk_group"):
        del found[key]
    return found


def _dots1(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": None, **deepseek_experts(keys, config, gguf, gating=2, normalize=False)}


def _glm4_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    experts = deepseek_experts(keys, config, gguf, gating=2, normalize=True)
    return {"use_qk_norm": _in_first_layer(gguf, "attn_q_norm.weight"), **_glm(keys, config, gguf), **experts}


def _ernie(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"use_bias": _in_first_layer(gguf, "attn_output.bias")}


def _ernie_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    experts = deepseek_experts(keys, config, gguf, gating=1, normalize=True)
    return _ernie(keys, config, gguf) | {
        "moe_num_experts": experts["n_routed_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_num_shared_experts": experts["n_shared_experts"] or 0,
        "moe_layer_start_index": experts["first_k_dense_replace"],
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_shared_count", 1)
    keys.only("expert_shared_feed_forward_length", config["intermediate_size"])
    found = same_experts(keys, config, gguf)
    return {"num_experts": found["num_local_experts"], "moe_topk": found["num_experts_per_tok"]}


def _granite_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    found = _granite(keys, config, gguf) | same_experts(keys, config, gguf)
    if shared := keys.integer("expert_shared_feed_forward_length", 0, least=0):
        found |= {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
        found["shared_intermediate_size"] = shared
    return found


def _minimax_m2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return _glm(keys, config, gguf) | same_experts(keys, config, gguf, gating=2)


def _minicpm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    depth, hidden = config["num_hidden_layers"], config["hidden_size"]
    # The first files have none of these keys, and are of the first models.
    return {
        "scale_emb": keys.number("embedding_scale", 12.0),
        "scale_depth": keys.number("residual_scale", 1.4 / depth**0.5) * depth**0.5,
        "dim_model_base": round(hidden / keys.number("logit_scale", hidden / 256)),
    }


def _phimoe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 1)
    return _phi3(keys, config, gguf) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "lm_head_bias": "output.bias" in gguf.tensors,
    }


def _dbrx(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if config["layer_norm_eps"] != dbrx.EPS:
        keys.fail(_LAYER_NORM, f"is not {dbrx.EPS}")
    experts = same_experts(keys, config, gguf)
    clip = keys.number("attention.clamp_kqv", 0.0) or None
    return {
        "attn_config": {"kv_n_heads": config["num_key_value_heads"], "clip_qkv": clip},
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": experts["num_local_experts"],
            "moe_top_k": experts["num_experts_per_tok"],
        },
    }


def _llama4(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 2)
    keys.only("expert_weights_scale", 1.0)
    keys.only("expert_weights_norm", False)
    keys.only("leading_dense_block_count", 0)
    keys.only("attention.sliding_window_pattern", 4)
    keys.only("rope.freq_base_swa", config["rope_theta"])
    experts = keys.integer("expert_count")
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step", 1),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "attention_chunk_size": keys.integer("attention.sliding_window", 8192),
        # No key says it; llama.cpp goes by the number of experts too.
        "use_qk_norm": experts != MAVERICK_EXPERTS,
    }


MAVERICK_EXPERTS = 128
_LAYER_NORM = "attention.layer_norm_epsilon"
_NEMOTRON_H_LAYER = {
    "attn_norm": "norm",
    **{stem: f"mixer.{module.removeprefix('mamba.')}" for stem, module in STATE_SPACE.items()},
    **{stem: f"mixer.{part}_proj" for stem, part in (("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v"))},
    "attn_output": "mixer.o_proj",
    UP: "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_H_MOE_LAYER = _NEMOTRON_H_LAYER | {
    ROUTER: "mixer.gate",
    CORRECTION: "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_LFM2_LAYER = LLAMA_LAYER | HEAD_NORMS | SHORT_CONVOLUTION | {"token_embd_norm": "model.norm"}
_HYBRID_LAYER = LLAMA_LAYER | HEAD_NORMS | NORM_BEFORE_MLP | DELTA_NET

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            hf_class="LlamaForCausalLM",
            model_type="llama",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS,
            permuted_qk=True,
            specialize=_llama,
        ),
        "qwen2": Architecture(
            hf_class="Qwen2ForCausalLM",
            model_type="qwen2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
        ),
        "qwen3": Architecture(
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            specialize=encoders.qwen3,
        ),
        "qwen2moe": Architecture(
            hf_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERT_TENSORS,
            bias_keys=False,
            specialize=qwen_experts,
        ),
        "qwen3moe": Architecture(
            hf_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS,
            specialize=qwen_experts,
        ),
        "gemma3": Architecture(
            hf_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | GEMMA_NORMS,
            norm_offset=1.0,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            specialize=_gemma3,
        ),
        "phi2": Architecture(
            hf_class="PhiForCausalLM",
            model_type="phi",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu_new"),
        ),
        "phi3": Architecture(
            hf_class="Phi3ForCausalLM",
            model_type="phi3",
            layer_tensors=LLAMA_LAYER,
            fused_gate=True,
            specialize=_phi3,
        ),
        "stablelm": Architecture(
            hf_class="StableLmForCausalLM",
            model_type="stablelm",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=_stablelm,
        ),
        "gptneox": Architecture(
            hf_class="GPTNeoXForCausalLM",
            model_type="gpt_neox",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu"),
            specialize=_gptneox,
        ),
        "gpt2": Architecture(
            hf_class="GPT2LMHeadModel",
            model_type="gpt2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_new"),
            specialize=_gpt2,
        ),
        "starcoder": Architecture(
            hf_class="GPTBigCodeForCausalLM",
            model_type="gpt_bigcode",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_pytorch_tanh"),
            specialize=_starcoder,
        ),
        "falcon": Architecture(
            hf_class="FalconForCausalLM",
            model_type="falcon",
            layer_tensors=LLAMA_LAYER,
            # The converter calls the norm of the attention half the second one.
            variants={"attn_norm_2": {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}},
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation", "gelu"),
            specialize=_falcon,
        ),
        "falcon-h1": Architecture(
            hf_class="FalconH1ForCausalLM",
            model_type="falcon_h1",
            layer_tensors=LLAMA_LAYER | STATE_SPACE,
            changes=recurrent.STATE_SPACE_CHANGES,
            specialize=recurrent.falcon_h1,
        ),
        "bloom": Architecture(
            hf_class="BloomForCausalLM",
            model_type="bloom",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            specialize=_bloom,
        ),
        "mpt": Architecture(
            hf_class="MptForCausalLM",
            model_type="mpt",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            specialize=_mpt,
        ),
        "starcoder2": Architecture(
            hf_class="Starcoder2ForCausalLM",
            model_type="starcoder2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "norm_epsilon"),
            activation=("hidden_act", "gelu_pytorch_tanh"),
            specialize=_starcoder2,
        ),
        "gemma": Architecture(
            hf_class="GemmaForCausalLM",
            model_type="gemma",
            layer_tensors=LLAMA_LAYER,
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
        "smollm3": Architecture(
            hf_class="SmolLM3ForCausalLM",
            model_type="smollm3",
            layer_tensors=LLAMA_LAYER,
            permuted_qk=True,
        ),
        "granite": Architecture(
            hf_class="GraniteForCausalLM",
            model_type="granite",
            layer_tensors=LLAMA_LAYER,
            permuted_qk=True,
            specialize=_granite,
        ),
        "olmo2": Architecture(
            hf_class="Olmo2ForCausalLM",
            model_type="olmo2",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | NORMS_BEHIND,
            specialize=_olmo2,
        ),
        "olmoe": Architecture(
            hf_class="OlmoeForCausalLM",
            model_type="olmoe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS,
            specialize=qwen_experts,
        ),
        "chatglm": Architecture(
            hf_class="GlmForCausalLM",
            model_type="glm",
            layer_tensors=LLAMA_LAYER,
            fused_gate=True,
            specialize=_glm,
        ),
        "glm4": Architecture(
            hf_class="Glm4ForCausalLM",
            model_type="glm4",
            layer_tensors=LLAMA_LAYER | GLM4_NORMS,
            fused_gate=True,
            specialize=_glm,
        ),
        "command-r": Architecture(
            hf_class="CohereForCausalLM",
            model_type="cohere",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=_command_r,
        ),
        "cohere2": Architecture(
            hf_class="Cohere2ForCausalLM",
            model_type="cohere2",
            layer_tensors=LLAMA_LAYER,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=_cohere2,
        ),
        "internlm2": Architecture(
            hf_class="InternLM2ForCausalLM",
            model_type="internlm2",
            layer_tensors=LLAMA_LAYER,
            permuted_qk=True,
            specialize=_internlm2,
        ),
        "exaone": Architecture(hf_class="ExaoneForCausalLM", model_type="exaone", layer_tensors=LLAMA_LAYER),
        "exaone4": Architecture(
            hf_class="Exaone4ForCausalLM",
            model_type="exaone4",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | NORMS_BEHIND,
            specialize=_exaone4,
        ),
        "seed_oss": Architecture(
            hf_class="SeedOssForCausalLM",
            model_type="seed_oss",
            layer_tensors=LLAMA_LAYER | NORM_BEFORE_MLP,
            specialize=_seed_oss,
        ),
        "gpt-oss": Architecture(
            hf_class="GptOssForCausalLM",
            model_type="gpt_oss",
            layer_tensors=LLAMA_LAYER | NORM_BEFORE_MLP | EXPERT_TENSORS | SINK_TENSORS,
            specialize=_gpt_oss,
        ),
        "deepseek": Architecture(
            hf_class="DeepseekForCausalLM",
            model_type="deepseek",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS,
            permuted_qk=True,
            specialize=_deepseek,
        ),
        "dots1": Architecture(
            hf_class="Dots1ForCausalLM",
            model_type="dots1",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS,
            specialize=_dots1,
        ),
        "glm4moe": Architecture(
            hf_class="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            layer_tensors=LLAMA_LAYER
            | HEAD_NORMS
            | NORM_BEFORE_MLP
            | EXPERT_TENSORS
            | SHARED_EXPERTS_TENSORS
            | CORRECTION_TENSORS,
            specialize=_glm4_moe,
        ),
        "ernie4_5": Architecture(
            hf_class="Ernie4_5ForCausalLM",
            model_type="ernie4_5",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            specialize=_ernie,
        ),
        "ernie4_5-moe": Architecture(
            hf_class="Ernie4_5_MoeForCausalLM",
            model_type="ernie4_5_moe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS,
            bias_keys=False,
            specialize=_ernie_moe,
        ),
        "hunyuan-dense": Architecture(
            hf_class="HunYuanDenseV1ForCausalLM",
            model_type="hunyuan_v1_dense",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
        ),
        "hunyuan-moe": Architecture(
            hf_class="HunYuanMoEV1ForCausalLM",
            model_type="hunyuan_v1_moe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | SHARED_MLP_TENSORS,
            specialize=_hunyuan_moe,
        ),
        "granitemoe": Architecture(
            hf_class="GraniteMoeForCausalLM",
            model_type="granitemoe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_MLP_TENSORS,
            permuted_qk=True,
            specialize=_granite_moe,
        ),
        "minimax-m2": Architecture(
            hf_class="MiniMaxM2ForCausalLM",
            model_type="minimax_m2",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | CORRECTION_TENSORS,
            specialize=_minimax_m2,
        ),
        "minicpm": Architecture(
            hf_class="MiniCPMForCausalLM",
            model_type="minicpm",
            layer_tensors=LLAMA_LAYER,
            permuted_qk=True,
            specialize=_minicpm,
        ),
        "baichuan": Architecture(
            hf_class="BaichuanForCausalLM",
            model_type="baichuan",
            layer_tensors=LLAMA_LAYER,
            permuted_qk=True,
        ),
        "deepseek2": Architecture(
            hf_class="DeepseekV2ForCausalLM",
            model_type="deepseek_v2",
            layer_tensors=LATENT_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS,
            latent=True,
            specialize=latent.deepseek2,
        ),
        "minicpm3": Architecture(
            hf_class="MiniCPM3ForCausalLM",
            model_type="minicpm3",
            layer_tensors=LATENT_LAYER,
            latent=True,
            specialize=latent.minicpm3,
        ),
        "phimoe": Architecture(
            hf_class="PhimoeForCausalLM",
            model_type="phimoe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS,
            specialize=_phimoe,
        ),
        "dbrx": Architecture(
            hf_class="DbrxForCausalLM",
            model_type="dbrx",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | {"attn_output_norm": "post_attention_layernorm"},
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=_dbrx,
        ),
        "llama4": Architecture(
            hf_class="Llama4ForCausalLM",
            model_type="llama4_text",
            layer_tensors=LLAMA_LAYER
            | EXPERT_TENSORS
            | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            specialize=_llama4,
        ),
        "mamba2": Architecture(
            hf_class="Mamba2ForCausalLM",
            model_type="mamba2",
            layer_tensors={"attn_norm": "input_layernorm"} | STATE_SPACE,
            bias_keys=False,
            attends=False,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            changes=recurrent.STATE_SPACE_CHANGES,
            specialize=recurrent.mamba2,
        ),
        "granitehybrid": Architecture(
            hf_class="GraniteMoeHybridForCausalLM",
            model_type="granitemoehybrid",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_MLP_TENSORS | STATE_SPACE,
            permuted_qk=True,
            mixed=True,
            changes=recurrent.STATE_SPACE_CHANGES,
            specialize=recurrent.granite_hybrid,
        ),
        "nemotron_h": Architecture(
            hf_class="NemotronHForCausalLM",
            model_type="nemotron_h",
            layer_tensors=_NEMOTRON_H_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            activation=("mlp_hidden_act", "relu2"),
            mixed=True,
            family_names=True,
            changes=recurrent.STATE_SPACE_CHANGES,
            specialize=recurrent.nemotron_h,
        ),
        "nemotron_h_moe": Architecture(
            hf_class="NemotronHForCausalLM",
            model_type="nemotron_h",
            layer_tensors=_NEMOTRON_H_MOE_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            activation=("mlp_hidden_act", "relu2"),
            mixed=True,
            family_names=True,
            changes=recurrent.STATE_SPACE_CHANGES,
            specialize=recurrent.nemotron_h_moe,
        ),
        "qwen3next": Architecture(
            hf_class="Qwen3NextForCausalLM",
            model_type="qwen3_next",
            layer_tensors=_HYBRID_LAYER
            | EXPERT_TENSORS
            | SHARED_EXPERT_TENSORS
            | {"ssm_in": "linear_attn.in_proj_qkvz", WRITTEN_AND_DECAYS: "linear_attn.in_proj_ba"},
            norm_offset=1.0,
            mixed=True,
            changes=recurrent.DELTA_NET_CHANGES,
            parts=recurrent.QWEN3NEXT_PARTS,
            specialize=recurrent.qwen3next,
        ),
        "qwen35": Architecture(
            hf_class="Qwen3_5ForCausalLM",
            model_type="qwen3_5_text",
            layer_tensors=_HYBRID_LAYER,
            norm_offset=1.0,
            mixed=True,
            changes=recurrent.QWEN35_CHANGES,
            specialize=recurrent.delta_net,
        ),
        "qwen35moe": Architecture(
            hf_class="Qwen3_5MoeForCausalLM",
            model_type="qwen3_5_moe_text",
            layer_tensors=_HYBRID_LAYER | EXPERT_TENSORS | SHARED_EXPERT_TENSORS,
            norm_offset=1.0,
            mixed=True,
            changes=recurrent.QWEN35_CHANGES,
            specialize=recurrent.qwen35moe,
        ),
        "lfm2": Architecture(
            hf_class="Lfm2ForCausalLM",
            model_type="lfm2",
            layer_tensors=_LFM2_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
            mixed=True,
            changes=recurrent.SHORT_CONVOLUTION_CHANGES,
            specialize=recurrent.lfm2,
        ),
        "lfm2moe": Architecture(
            hf_class="Lfm2MoeForCausalLM",
            model_type="lfm2_moe",
            layer_tensors=_LFM2_LAYER | EXPERT_TENSORS | CORRECTION_TENSORS,
            eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
            mixed=True,
            changes=recurrent.SHORT_CONVOLUTION_CHANGES,
            specialize=recurrent.lfm2moe,
        ),
        "bert": Architecture(
            hf_class="BertModel",
            model_type="bert",
            layer_tensors=encoders.BERT_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu"),
            specialize=encoders.bert,
        ),
        "nomic-bert": Architecture(
            hf_class="NomicBertModel",
            model_type="nomic_bert",
            layer_tensors=encoders.BERT_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=encoders.nomic_bert,
        ),
        "modern-bert": Architecture(
            hf_class="ModernBertModel",
            model_type="modernbert",
            layer_tensors=LLAMA_LAYER,
            fused_gate=True,
            eps=(_LAYER_NORM, "norm_eps"),
            activation=("hidden_activation", "gelu"),
            specialize=encoders.modern_bert,
        ),
    }
)
"""Supported values of ``general.architecture``."""
