"""Names in GGUF files and in Hugging Face's checkpoints: one table for both directions.

Sources: ggml's docs/gguf.md and llama.cpp's converter (gguf-py's tensor_mapping.py), llama.h for file types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

GLOBAL_TENSORS = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embed_norm",
        "position_embd": "model.embed_positions",
        "token_types": "model.embed_types",
        "output_norm": "model.norm",
        "output": "lm_head",
    },
)
"""Modules outside of layers."""

FUSED_QKV = "attn_qkv"
GATE, UP = "ffn_gate", "ffn_up"
LLAMA_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        GATE: "mlp.gate_proj",
        UP: "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        FUSED_QKV: "self_attn.qkv_proj",
    }
)
"""Stems of ``blk.N.<stem>``, each with the module below ``model.layers.N``; so are those that follow."""

HEAD_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
GEMMA_NORMS = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GLM4_NORMS = MappingProxyType(
    {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)
NORMS_BEHIND = MappingProxyType(
    {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
)
NORM_BEFORE_MLP = MappingProxyType({"post_attention_norm": "post_attention_layernorm"})
PER_LAYER_TENSORS = MappingProxyType(
    {
        "per_layer_token_embd": "model.per_layer.embed_tokens",
        "per_layer_model_proj": "model.per_layer.projection",
        "per_layer_proj_norm": "model.per_layer.norm",
        "inp_gate": "per_layer.gate",
        "proj": "per_layer.projection",
        "post_norm": "per_layer.norm",
    }
)
OUTPUT_SCALE, CORRECTION_SCALE = "layer_output_scale", "altup_correct_scale"
SINKS = "attn_sinks"
SINK_TENSORS = MappingProxyType({SINKS: "self_attn.sinks"})
ROUTER = "ffn_gate_inp"
SHARED_GATE = "ffn_gate_inp_shexp"
EXPERT_TENSORS = MappingProxyType(
    {
        ROUTER: "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
SHARED_EXPERT_TENSORS = MappingProxyType(
    {
        SHARED_GATE: "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
CORRECTION = "exp_probs_b"
SHARED_EXPERTS_TENSORS, SHARED_MLP_TENSORS = (
    MappingProxyType({f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")})
    for module in ("shared_experts", "shared_mlp")
)
"""Shared experts without a gate."""
CORRECTION_TENSORS = MappingProxyType({CORRECTION: "mlp.gate.e_score_correction_bias"})
KEYS_UP, VALUES_UP, BOTH_UP = "attn_k_b", "attn_v_b", "attn_kv_b"
LATENT_LAYER = MappingProxyType(
    {
        **LLAMA_LAYER,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        BOTH_UP: "self_attn.kv_b_proj",
    }
)
INDEXER_TENSORS = MappingProxyType(
    {
        "indexer.attn_q_b": "indexer.wq_b",
        "indexer.attn_k": "indexer.wk",
        "indexer.k_norm": "indexer.k_norm",
        "indexer.proj": "indexer.weights_proj",
    }
)
STEPS, DECAY, SKIP = "ssm_dt", "ssm_a", "ssm_d"
CONVOLUTION, HEADS_NORM, RECURRENT_OUT = "ssm_conv1d", "ssm_norm", "ssm_out"
STATE_SPACE = MappingProxyType(
    {
        "ssm_in": "mamba.in_proj",
        CONVOLUTION: "mamba.conv1d",
        STEPS: "mamba.dt_bias",
        DECAY: "mamba.A_log",
        SKIP: "mamba.D",
        HEADS_NORM: "mamba.norm",
        RECURRENT_OUT: "mamba.out_proj",
    }
)
STATE_SPACE_OF_CHANNELS = MappingProxyType(
    {
        "ssm_in": "mamba.in_proj",
        CONVOLUTION: "mamba.conv1d",
        "ssm_x": "mamba.x_proj",
        STEPS: "mamba.dt_proj",
        "ssm_dt_norm": "mamba.dt_layernorm",
        "ssm_b_norm": "mamba.b_layernorm",
        "ssm_c_norm": "mamba.c_layernorm",
        DECAY: "mamba.A_log",
        SKIP: "mamba.D",
        RECURRENT_OUT: "mamba.out_proj",
    }
)
WRITTEN_AND_DECAYS = "ssm_ba"
DELTA_NET = MappingProxyType(
    {
        FUSED_QKV: "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        CONVOLUTION: "linear_attn.conv1d",
        STEPS: "linear_attn.dt_bias",
        DECAY: "linear_attn.A_log",
        HEADS_NORM: "linear_attn.norm",
        RECURRENT_OUT: "linear_attn.out_proj",
    }
)
CONVOLUTIONS = tuple(f"{CONVOLUTION}_{part}" for part in "qkv")
CHANNEL_DELTA = MappingProxyType(
    {
        **{f"{CONVOLUTION}_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        STEPS: "self_attn.dt_bias",
        DECAY: "self_attn.A_log",
        HEADS_NORM: "self_attn.o_norm",
    }
)
NORMS_INSIDE = MappingProxyType({"attn_sub_norm": "self_attn.o_norm", "ffn_sub_norm": "mlp.down_norm"})
SHORT_CONVOLUTION = MappingProxyType(
    {
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    }
)
BARE = frozenset({OUTPUT_SCALE, CORRECTION_SCALE, SINKS, CORRECTION, STEPS, DECAY, SKIP})
"""Stems of tensors whose names in the model have no suffix."""
LAYER_TENSOR = re.compile(
    r"blk\.(?P<layer>[0-9]+)\.(?P<stem>\w+(?:\.(?!weight|bias|scale)[a-z]\w*)?)(?:\.(?P<expert>[0-9]+))?"
    r"(?:\.(?P<suffix>weight|bias))?"
)

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "context_length": "max_position_embeddings",
        "rope.freq_base": "rope_theta",
        "vocab_size": "vocab_size",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    }
)
"""Keys of every architecture below its name, with their names in config.json."""

SAMPLING_KEYS = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)
"""Keys below ``general.sampling``, with their names in generation_config.json."""

END_KEYS = ("eos", "eot", "eom")
"""Kinds of tokens that end a text: of the text, of a turn, of a message."""

FILE_TYPES: Mapping[int, str] = MappingProxyType(
    {
        **dict(enumerate(["F32", "F16", "Q4_0", "Q4_1"])),
        **dict(enumerate(["Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"], start=7)),
        **dict(enumerate(["Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS"], start=14)),
        **dict(enumerate(["Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M"], start=21)),
        **dict(enumerate(["IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"], start=28)),
        **dict(enumerate(["TQ1_0", "TQ2_0", "MXFP4_MOE"], start=36)),
    }
)
"""Names of ``general.file_type`` (llama.cpp's ``llama_ftype``), the mix that a file was quantized to."""


LAYER_NUMBER = re.compile(r"blk\.(?P<layer>[0-9]+)\.")


def layer_stem(name: str) -> str:
    """The stem of a layer's tensor, ``ffn_gate`` of ``blk.3.ffn_gate.weight``; empty for other tensors."""
    layer = LAYER_TENSOR.fullmatch(name)
    return layer["stem"] if layer else ""


def has_any(names: Iterable[str], *ends: str) -> bool:
    """Whether some layer has one of the tensors ``blk.N.<end>``.

    Args:
        names: names of all tensors.
    """
    wanted = re.compile(rf"blk\.\d+\.(?:{'|'.join(map(re.escape, ends))})")
    return any(wanted.fullmatch(name) for name in names)


def hf_name(name: str, modules: Mapping[str, str]) -> str:
    """Hugging Face's name of a GGUF tensor; its own if it has none.

    Args:
        name: name of the GGUF tensor.
        modules: the architecture's modules of a layer by stem, and those outside of layers that it calls otherwise.
    """
    if (layer := LAYER_TENSOR.fullmatch(name)) is None:
        top, _, suffix = name.rpartition(".")
        module = modules.get(top, GLOBAL_TENSORS.get(top))
        return name if module is None else f"{module}.{suffix}"
    module, suffix = modules.get(layer["stem"]), layer["suffix"]
    bare = layer["stem"] in BARE and not (module or "").endswith("_proj")
    if suffix is None and layer["stem"].endswith("_norm"):  # which Falcon-H1's converter leaves out
        suffix = "weight"
    if module is None or (suffix is None and not bare):
        return name
    if layer["expert"] is not None:  # stored one by one, as older files of Mixtral have them
        module = module.replace("mlp.", f"mlp.experts.{int(layer['expert'])}.")
    if not bare:
        module = f"{module}.{suffix}"
    return f"model.layers.{int(layer['layer'])}.{module}"


def gguf_names(modules: Mapping[str, str], *, layers: int) -> dict[str, str]:
    """Every tensor that a file may have, in file order, with its Hugging Face name.

    Args:
        modules: the architecture's modules of a layer by stem.
        layers: number of layers.
    """
    names = [f"{top}.weight" for top in GLOBAL_TENSORS]
    names += [
        f"blk.{layer}.{stem}.{suffix}" for layer in range(layers) for stem in modules for suffix in ("weight", "bias")
    ]
    return {name: hf_name(name, modules) for name in names}
