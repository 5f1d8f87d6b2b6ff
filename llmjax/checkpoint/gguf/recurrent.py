"""Models with recurrent layers in GGUF files: their keys of config.json, and the changes of converters to tensors.

Source: llama.cpp's converters of Mamba, Jamba, Mamba 2, Granite 4, Bamba, Falcon-H1, Nemotron-H, Qwen3-Next, Qwen3.5
and LFM2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.architecture import Architecture
from llmjax.checkpoint.gguf.changes import Change, log_of_minus
from llmjax.checkpoint.gguf.experts import deepseek_experts, has_experts, qwen_experts, same_experts
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    CONVOLUTION,
    CORRECTION,
    CORRECTION_TENSORS,
    DECAY,
    DELTA_NET,
    EXPERT_TENSORS,
    FUSED_QKV,
    HEAD_NORMS,
    HEADS_NORM,
    LLAMA_LAYER,
    NORM_BEFORE_MLP,
    RECURRENT_OUT,
    ROUTER,
    SHARED_EXPERT_TENSORS,
    SHARED_MLP_TENSORS,
    SHORT_CONVOLUTION,
    SKIP,
    STATE_SPACE,
    STATE_SPACE_OF_CHANNELS,
    STEPS,
    UP,
    WRITTEN_AND_DECAYS,
    has_any,
)

Config = Mapping[str, Any]
Changes = Mapping[str, Callable[[GGUFTensor, Config], Change]]


def _with_middle(tensor: GGUFTensor, config: Config) -> Change:
    """The convolution's weight [channels, 1, width]; its bias is as it was."""
    return Change(shape=(tensor.shape[0], 1, tensor.shape[1])) if len(tensor.shape) == 2 else Change()


def _flat(tensor: GGUFTensor, config: Config) -> Change:
    return Change(shape=(int(np.prod(tensor.shape)),))


def _decays(tensor: GGUFTensor, config: Config) -> Change:
    return Change(values=log_of_minus, shape=_flat(tensor, config).shape)


STATE_SPACE_CHANGES: Changes = MappingProxyType(
    {CONVOLUTION: _with_middle, DECAY: _decays, SKIP: _flat, HEADS_NORM: _flat}
)
CHANNEL_CHANGES: Changes = MappingProxyType(
    {CONVOLUTION: _with_middle, DECAY: lambda tensor, config: Change(values=log_of_minus)}
)
SHORT_CONVOLUTION_CHANGES: Changes = MappingProxyType({"shortconv.conv": _with_middle})


def _heads_in_order(config: Config, count: int, size: int = 1) -> np.ndarray | None:
    """The stored order of the ``count`` elements of value heads, ``size`` each; None: they are in order.

    Qwen3.5's converter stores the first value head of each key head first, then all second ones.

    Raises:
        ValueError: the number of elements is wrong.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values:
        return None
    if count != values * size:
        raise ValueError(f"does not have {size} rows or columns for each of {values} heads of values")
    order = np.arange(values).reshape(-1, keys).T.reshape(-1)
    return (order[:, None] * size + np.arange(size)).reshape(-1)


def _behind_keys(config: Config, count: int) -> np.ndarray | None:
    """`_heads_in_order` for rows in which queries and keys of all heads come first."""
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    order = _heads_in_order(config, count - before, config["linear_value_head_dim"])
    return None if order is None else np.concatenate([np.arange(before), before + order])


def _by_value_head(tensor: GGUFTensor, config: Config) -> Change:
    return Change(rows=_heads_in_order(config, tensor.shape[0]))


def _gate(tensor: GGUFTensor, config: Config) -> Change:
    return Change(rows=_heads_in_order(config, tensor.shape[0], config["linear_value_head_dim"]))


def _out(tensor: GGUFTensor, config: Config) -> Change:
    return Change(columns=_heads_in_order(config, tensor.shape[-1], config["linear_value_head_dim"]))


def _qwen35_decays(tensor: GGUFTensor, config: Config) -> Change:
    return Change(values=log_of_minus, rows=_heads_in_order(config, tensor.shape[0]))


def _qwen35_convolution(tensor: GGUFTensor, config: Config) -> Change:
    return replace(_with_middle(tensor, config), rows=_behind_keys(config, tensor.shape[0]))


DELTA_NET_CHANGES: Changes = MappingProxyType({CONVOLUTION: _with_middle, DECAY: _decays})
QWEN35_CHANGES: Changes = MappingProxyType(
    {
        FUSED_QKV: lambda tensor, config: Change(rows=_behind_keys(config, tensor.shape[0])),
        "attn_gate": _gate,
        "ssm_beta": _by_value_head,
        "ssm_alpha": _by_value_head,
        STEPS: _by_value_head,
        DECAY: _qwen35_decays,
        CONVOLUTION: _qwen35_convolution,
        RECURRENT_OUT: _out,
    }
)


def _taken_apart(tensor: GGUFTensor, config: Config) -> dict[str, Change]:
    """The modules of the write strengths and decays, which files fuse key head by key head; empty: they stay fused."""
    if not config["linear_in_turn"]:
        return {}
    heads = config["linear_num_key_heads"]
    rows = np.arange(tensor.shape[0]).reshape(heads, 2, -1)
    return {f"linear_attn.in_proj_{part}": Change(rows=rows[:, i].reshape(-1)) for i, part in enumerate("ba")}


QWEN3NEXT_PARTS = MappingProxyType({WRITTEN_AND_DECAYS: _taken_apart})


def delta_net(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of gated delta nets and of the attention among them; tensors tell which layers have which."""
    keys.integer("full_attention_interval", 4)
    keys.value("rope.dimension_sections", 0)  # for images: all sections of a text position are equal
    value_heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % value_heads:
        keys.fail("ssm.inner_size", f"is {inner}, not a multiple of ssm.time_step_rank = {value_heads}")
    if value_heads % (key_heads := keys.integer("ssm.group_count")):
        keys.fail("ssm.time_step_rank", f"is {value_heads}, not a multiple of ssm.group_count = {key_heads}")
    kinds = _kinds(gguf, config, recurrent="linear_attention", other="full_attention")
    if (said := "attention.recurrent_layers") in keys:
        recurrent = np.atleast_1d(keys.value(said))[: len(kinds)]  # further ones guess tokens
        if recurrent.tolist() != [kind == "linear_attention" for kind in kinds]:
            keys.fail(said, "names other layers than those that have recurrent tensors")
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def qwen3next(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Qwen3-Next; the first files have one fused tensor, like the original, where newer files have several."""
    fused = has_any(gguf.tensors, "ssm_in.weight")
    return delta_net(keys, config, gguf) | qwen_experts(keys, config, gguf) | {"linear_in_turn": not fused}


def qwen35moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Qwen3.5 with experts."""
    return delta_net(keys, config, gguf) | qwen_experts(keys, config, gguf)


def mamba2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Mamba 2 mixers, under the names of hybrid families."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        keys.value(key, 0)  # of layers beside them; 0 where there are none
    found, inner = _state_space(keys, gguf), keys.integer("ssm.inner_size")
    if inner % config["hidden_size"]:
        keys.fail("ssm.inner_size", f"is {inner}, not a multiple of embedding_length = {config['hidden_size']}")
    return found | {"mamba_expand": inner // config["hidden_size"]}


def _state_space(keys: ArchitectureKeys, gguf: GGUFFile) -> dict[str, Any]:
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        keys.fail("ssm.inner_size", f"is {inner}, not a multiple of ssm.time_step_rank = {heads}")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.integer("ssm.group_count", 1),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": has_any(gguf.tensors, f"{CONVOLUTION}.bias"),
        "mamba_proj_bias": has_any(gguf.tensors, "ssm_in.bias"),
    }


def mamba(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Mamba; with norms inside the mixers it is Falcon Mamba, which shares the architecture's name."""
    for key in ("attention.head_count", "feed_forward_length"):
        keys.value(key, 0)
    found = _channels(keys, gguf) | {"intermediate_size": keys.integer("ssm.inner_size")}
    if not keys.flag("ssm.dt_b_c_rms", False):
        return found
    return found | {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}


def jamba(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Jamba; tensors tell which layers have what."""
    inner, size, count = keys.integer("ssm.inner_size"), config["hidden_size"], config["num_hidden_layers"]
    if inner % size:
        keys.fail("ssm.inner_size", f"is {inner}, not a multiple of embedding_length = {size}")
    attends = [kind == "attention" for kind in _kinds(gguf, config, recurrent="mamba", other="attention")]
    chooses = [has_experts(gguf, layer) for layer in range(count)]
    experts = {"num_experts": 1}
    if keys.integer("expert_count", 0, least=0) > 1:
        experts = {
            "num_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
        }
    return {
        **_channels(keys, gguf),
        "mamba_expand": inner // size,
        **experts,
        **_every(keys, "attn_layer", attends),
        **_every(keys, "expert_layer", chooses),
    }


def _every(keys: ArchitectureKeys, name: str, has: list[bool]) -> dict[str, int]:
    """The period of a kind of layer, and the index of the first one."""
    found = [layer for layer, one in enumerate(has) if one] or [len(has)]
    period = found[1] - found[0] if len(found) > 1 else len(has) + 1
    if found[0] >= period or has != [layer % period == found[0] for layer in range(len(has))]:
        keys.fail("block_count", f"layers of a kind ({name}) do not stand at equal distances: {found}")
    return {f"{name}_period": period, f"{name}_offset": found[0]}


def _channels(keys: ArchitectureKeys, gguf: GGUFFile) -> dict[str, Any]:
    return {
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_dt_rank": keys.integer("ssm.time_step_rank"),
        "mamba_conv_bias": has_any(gguf.tensors, f"{CONVOLUTION}.bias"),
        "mamba_proj_bias": has_any(gguf.tensors, "ssm_in.bias"),
    }


def falcon_h1(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Falcon-H1, whose factors the converter has multiplied into the weights."""
    return _state_space(keys, gguf) | {
        "mamba_d_ssm": keys.integer("ssm.inner_size"),
        "mamba_rms_norm": has_any(gguf.tensors, f"{HEADS_NORM}.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_any(gguf.tensors, f"{RECURRENT_OUT}.bias"),
    }


def granite_hybrid(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Granite 4; with rope it is Bamba, which shares the architecture's name."""
    found = mamba2(keys, config, gguf)
    kinds = _kinds(gguf, config, recurrent="mamba", other="attention")
    if keys.flag("rope.scaling.finetuned", False):
        if config.get("partial_rotary_factor") != 0.5:
            keys.fail("rope.dimension_count", "is not half of a head, which Bamba rotates")
        full = [i for i, kind in enumerate(kinds) if kind == "attention"]
        return found | {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": full}
    found |= granite_factors(keys, config) | {"layer_types": kinds, "position_embedding_type": "nope"}
    shared = keys.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    found |= {"shared_intermediate_size": shared, "num_local_experts": 0}
    return found | (same_experts(keys, config, gguf) if has_experts(gguf, 0) else {})


def granite_factors(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Factors of embeddings, attention, the output of each sublayer, and logits."""
    return {
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 1.0) or 1.0,
    }


def nemotron_h(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Nemotron-H; the kind of a block follows from keys that are 0 for all other kinds."""
    count = config["num_hidden_layers"]
    attends, fed = keys.concerned("attention.head_count_kv", count), keys.concerned("feed_forward_length", count)
    letters = ["*" if attends[i] else "-" if fed[i] else "M" for i in range(count)]
    return mamba2(keys, config, gguf) | {"hybrid_override_pattern": "".join(letters)}


def nemotron_h_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Nemotron-H with experts in place of MLPs."""
    found, experts = nemotron_h(keys, config, gguf), deepseek_experts(keys, config, gguf, gating=2, normalize=True)
    shared = keys.integer("expert_shared_feed_forward_length", 0, least=0)
    if shared and experts["n_shared_experts"]:
        experts["moe_shared_expert_intermediate_size"] = shared
    return found | {
        **experts,
        "n_shared_experts": experts["n_shared_experts"] or 0,
        "moe_latent_size": keys.integer("moe_latent_size", 0, least=0) or None,
        "hybrid_override_pattern": found["hybrid_override_pattern"].replace("-", "E"),
    }


def lfm2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of LFM2; layers without heads have short convolutions."""
    full = keys.concerned("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if one else "conv" for one in full],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": has_any(gguf.tensors, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """LFM2 with experts after the first layers."""
    experts = deepseek_experts(keys, config, gguf, gating=2, normalize=True)
    return lfm2(keys, config, gguf) | {
        "num_dense_layers": experts["first_k_dense_replace"],
        "num_experts": experts["n_routed_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "norm_topk_prob": experts["norm_topk_prob"],
        "routed_scaling_factor": experts["routed_scaling_factor"],
        "use_expert_bias": has_any(gguf.tensors, f"{CORRECTION}.bias", f"{CORRECTION}.weight"),
    }


def _kinds(gguf: GGUFFile, config: Config, *, recurrent: str, other: str) -> list[str]:
    layers = range(config["num_hidden_layers"])
    return [recurrent if f"blk.{i}.{RECURRENT_OUT}.weight" in gguf.tensors else other for i in layers]


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
        "falcon-h1": Architecture(
            hf_class="FalconH1ForCausalLM",
            model_type="falcon_h1",
            layer_tensors=LLAMA_LAYER | STATE_SPACE,
            changes=STATE_SPACE_CHANGES,
            specialize=falcon_h1,
        ),
        "mamba": Architecture(
            hf_class="MambaForCausalLM",
            model_type="mamba",
            layer_tensors={"attn_norm": "input_layernorm"} | STATE_SPACE_OF_CHANNELS,
            bias_keys=False,
            attends=False,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            changes=CHANNEL_CHANGES,
            specialize=mamba,
        ),
        "jamba": Architecture(
            hf_class="JambaForCausalLM",
            model_type="jamba",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | STATE_SPACE_OF_CHANNELS,
            bias_keys=False,
            mixed=True,
            changes=CHANNEL_CHANGES,
            specialize=jamba,
        ),
        "mamba2": Architecture(
            hf_class="Mamba2ForCausalLM",
            model_type="mamba2",
            layer_tensors={"attn_norm": "input_layernorm"} | STATE_SPACE,
            bias_keys=False,
            attends=False,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            changes=STATE_SPACE_CHANGES,
            specialize=mamba2,
        ),
        "granitehybrid": Architecture(
            hf_class="GraniteMoeHybridForCausalLM",
            model_type="granitemoehybrid",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_MLP_TENSORS | STATE_SPACE,
            permuted_qk=True,
            mixed=True,
            changes=STATE_SPACE_CHANGES,
            specialize=granite_hybrid,
        ),
        "nemotron_h": Architecture(
            hf_class="NemotronHForCausalLM",
            model_type="nemotron_h",
            layer_tensors=_NEMOTRON_H_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            activation=("mlp_hidden_act", "relu2"),
            mixed=True,
            family_names=True,
            changes=STATE_SPACE_CHANGES,
            specialize=nemotron_h,
        ),
        "nemotron_h_moe": Architecture(
            hf_class="NemotronHForCausalLM",
            model_type="nemotron_h",
            layer_tensors=_NEMOTRON_H_MOE_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            activation=("mlp_hidden_act", "relu2"),
            mixed=True,
            family_names=True,
            changes=STATE_SPACE_CHANGES,
            specialize=nemotron_h_moe,
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
            changes=DELTA_NET_CHANGES,
            parts=QWEN3NEXT_PARTS,
            specialize=qwen3next,
        ),
        "qwen35": Architecture(
            hf_class="Qwen3_5ForCausalLM",
            model_type="qwen3_5_text",
            layer_tensors=_HYBRID_LAYER,
            norm_offset=1.0,
            mixed=True,
            changes=QWEN35_CHANGES,
            specialize=delta_net,
        ),
        "qwen35moe": Architecture(
            hf_class="Qwen3_5MoeForCausalLM",
            model_type="qwen3_5_moe_text",
            layer_tensors=_HYBRID_LAYER | EXPERT_TENSORS | SHARED_EXPERT_TENSORS,
            norm_offset=1.0,
            mixed=True,
            changes=QWEN35_CHANGES,
            specialize=qwen35moe,
        ),
        "lfm2": Architecture(
            hf_class="Lfm2ForCausalLM",
            model_type="lfm2",
            layer_tensors=_LFM2_LAYER,
            eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
            mixed=True,
            changes=SHORT_CONVOLUTION_CHANGES,
            specialize=lfm2,
        ),
        "lfm2moe": Architecture(
            hf_class="Lfm2MoeForCausalLM",
            model_type="lfm2_moe",
            layer_tensors=_LFM2_LAYER | EXPERT_TENSORS | CORRECTION_TENSORS,
            eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
            mixed=True,
            changes=SHORT_CONVOLUTION_CHANGES,
            specialize=lfm2moe,
        ),
    }
)
