"""Gemma 3n and 4 in GGUF files: their keys of config.json.

Source: llama.cpp's converters ``Gemma3NModel`` and ``Gemma4Model``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.architecture import Architecture, in_first_layer, layer_kinds
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    CORRECTION_SCALE,
    EXPERT_TENSORS,
    GATE,
    GEMMA_NORMS,
    HEAD_NORMS,
    LLAMA_LAYER,
    OUTPUT_SCALE,
    PER_LAYER_TENSORS,
    ROUTER,
    UP,
)
from llmjax.checkpoint.gguf.rope import DIVISORS
from llmjax.errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"
UNTURNED = 1e30  # divisor of the frequencies of entries that are not rotated
EMBEDDINGS = "per_layer_token_embd.weight"
LOW_RANK = "laurel_l.weight"
_LAYER = LLAMA_LAYER | HEAD_NORMS | GEMMA_NORMS | PER_LAYER_TENSORS
_DENSE = {GATE: "mlp.dense.gate_proj", UP: "mlp.dense.up_proj", "ffn_down": "mlp.dense.down_proj"}
_EXPERTS = {
    **_DENSE,
    "ffn_norm": "mlp.before_shared",
    "post_ffw_norm_1": "mlp.after_shared",
    "pre_ffw_norm_2": "mlp.before_experts",
    "post_ffw_norm_2": "mlp.after_experts",
}
"""Tensors of layers with experts, whose MLP is a shared expert."""


def gemma3n(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Gemma 3n; two of them have the values that all published models have."""
    layers, low_rank = config["num_hidden_layers"], gguf.tensors.get(f"blk.0.{LOW_RANK}")
    if low_rank is None:
        raise CheckpointError(f"{gguf.path}: tensor 'blk.0.{LOW_RANK}' is missing")
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.only(key, config["head_dim"])
    cutoffs = keys.value("activation_sparsity_scale", np.full(layers, -np.inf))
    if not isinstance(cutoffs, np.ndarray) or cutoffs.shape != (layers,) or np.isnan(cutoffs).any():
        keys.fail("activation_sparsity_scale", f"is not a number for each of {layers} layers")
    return {
        **_common(keys, gguf, layers, period=5),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "altup_num_inputs": keys.integer("altup.num_inputs"),
        "altup_active_idx": keys.integer("altup.active_idx", least=0),
        "laurel_rank": low_rank.shape[0],
        # config.json has the part of gates that is 0, the file standard deviations, which are -infinity for none.
        "activation_sparsity_pattern": [round(NormalDist().cdf(float(cutoff)), 6) for cutoff in cutoffs],
    }


def gemma4(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Gemma 4, whose kinds of layers have heads of different sizes."""
    layers = config["num_hidden_layers"]
    common = _common(keys, gguf, layers, period=6)
    kinds, shared = common["layer_types"], common["num_kv_shared_layers"]
    size, own = keys.integer("attention.key_length"), keys.integer("attention.key_length_swa")
    for key, expected in {
        "attention.value_length": size,
        "attention.value_length_swa": own,
        "rope.dimension_count": size,
        "rope.dimension_count_swa": own,
    }.items():
        keys.only(key, expected)
    inner, wide = _by_group(keys, "feed_forward_length", [i >= layers - shared for i in range(layers)])
    if wide not in (inner, 2 * inner):
        keys.fail("feed_forward_length", f"is {wide} in layers without keys, neither {inner} nor twice that")
    heads, of_full = _by_group(keys, "attention.head_count_kv", [kind == FULL for kind in kinds])
    found = {
        **common,
        "head_dim": own,
        "global_head_dim": size,
        "intermediate_size": inner,
        "use_double_wide_mlp": wide != inner,
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": heads,
        "num_global_key_value_heads": of_full,
        "attention_k_eq_v": _has_keys_for_values(gguf, kinds[: layers - shared]),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _turned(gguf, size),
                "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
            },
        },
    }
    if not in_first_layer(gguf, f"{ROUTER}.weight"):
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            keys.value(key, 0)
        return found
    return found | {
        "enable_moe_block": True,
        "num_experts": keys.integer("expert_count"),
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _common(keys: ArchitectureKeys, gguf: GGUFFile, layers: int, *, period: int) -> dict[str, Any]:
    """Keys about windows, per-layer embeddings, and layers without keys of their own."""
    embeddings = gguf.tensors.get(EMBEDDINGS)
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_kinds(keys, layers, period),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, least=0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        **({} if embeddings is None else {"vocab_size_per_layer_input": embeddings.shape[0]}),
    }


def _by_group(keys: ArchitectureKeys, key: str, second: Sequence[bool]) -> tuple[int, int]:
    """The number for layers that are not ``second``, and for those that are; both are equal if one kind is missing."""
    value = keys.by_layer(key)
    every = value.tolist() if isinstance(value, np.ndarray) else [value] * len(second)
    if len(every) != len(second):
        keys.fail(key, f"has {len(every)} elements for {len(second)} layers")
    groups = [{each for each, is_second in zip(every, second, strict=True) if is_second == wanted} for wanted in (0, 1)]
    groups = [group or other for group, other in (groups, groups[::-1])]
    if any(len(group) > 1 or any(type(each) is not int or each < 1 for each in group) for group in groups):
        keys.fail(key, "is not one whole number of at least 1 for all layers of a kind")
    first, last = (next(iter(group)) for group in groups)
    return first, last


def _has_keys_for_values(gguf: GGUFFile, kinds: Sequence[str]) -> bool:
    """Whether the values of full layers are their keys, judged by layers that have keys."""
    return any(kind == FULL and f"blk.{i}.attn_v.weight" not in gguf.tensors for i, kind in enumerate(kinds))


def _turned(gguf: GGUFFile, size: int) -> float:
    """The rotated part of the full layers' heads: the file divides the other frequencies by a very large number."""
    divisors = gguf.tensors.get(DIVISORS)
    if divisors is None or divisors.shape != (size // 2,):
        raise CheckpointError(f"{gguf.path}: tensor {DIVISORS!r} with {size // 2} elements is missing")
    values = divisors.read(np.dtype(np.float32))
    turned = int((values == 1).sum())
    if not (np.all(values[:turned] == 1) and np.all(values[turned:] >= UNTURNED / 2)):
        raise CheckpointError(f"{gguf.path}: tensor {DIVISORS!r} is not ones, and then numbers of about {UNTURNED:g}")
    return turned / len(values)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "gemma3n": Architecture(
            hf_class="Gemma3nForCausalLM",
            model_type="gemma3n_text",
            layer_tensors=_LAYER
            | {
                "altup_correct_coef": "altup.correction_coefs",
                "altup_predict_coef": "altup.prediction_coefs",
                "altup_router": "altup.modality_router",
                "altup_router_norm": "altup.router_norm",
                CORRECTION_SCALE: "altup.correct_output_scale",
                "laurel_l": "laurel.linear_left",
                "laurel_r": "laurel.linear_right",
                "laurel_post_norm": "laurel.post_laurel_norm",
            },
            stacks={"altup_proj": "model.altup.projections", "altup_unembd_proj": "model.altup.unembed_projections"},
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            specialize=gemma3n,
        ),
        "gemma4": Architecture(
            hf_class="Gemma4ForCausalLM",
            model_type="gemma4_text",
            layer_tensors=_LAYER | EXPERT_TENSORS | {OUTPUT_SCALE: "layer_scalar"},
            variants={ROUTER: _EXPERTS},
            scales={ROUTER: "mlp.gate.scale", "ffn_down_exps": "mlp.gate.per_expert_scale"},
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            attends=False,  # as all layers do alike
            specialize=gemma4,
        ),
    }
)
