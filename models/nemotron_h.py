"""Nemotron-H: blocks of one sublayer each: Mamba 2 mixers, attention without positions, and MLPs or experts.

A mixer and the MLP or experts after it, if there are any, make one layer of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmjax.models import llama, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.deepseek_v2 import expert_groups
from llmjax.models.deepseek_v3 import GROUP_BEST
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    experts_per_token,
    full_attention,
    mlp,
)
from llmjax.models.layers.layer import FeedForward, LayerSpec, Mixer
from llmjax.models.layers.moe import AS_GATE, Experts, SharedExpert
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import MixerAlone, PreNorm
from llmjax.models.names import Names

# What Hugging Face's NemotronHConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    **mamba2.MAMBA_DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "time_step_min": 0.001,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts": None,  # only used with experts, whose files have another name for it
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
ALIASES = {
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
    "time_step_min": ("mamba_dt_min",),
    "head_dim": ("head_dim", "attention_head_dim"),  # Hugging Face's class reads the first one
    "layers_block_type": ("layer_types",),
}
MAMBA, ATTENTION, FEED_FORWARD, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": FEED_FORWARD, "E": EXPERTS}
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
PARTS = {
    MAMBA: ("mamba", ("", ".in_proj", ".conv1d", ".norm", ".out_proj")),
    ATTENTION: ("self_attn", (".q_proj", ".k_proj", ".v_proj", ".o_proj")),
    FEED_FORWARD: ("mlp", (".up_proj", ".down_proj")),
    EXPERTS: (
        "mlp",
        (
            ".gate",
            ".shared_experts.up_proj",
            ".shared_experts.down_proj",
            ".fc1_latent_proj",
            ".fc2_latent_proj",
        ),
    ),
}
SECOND_HALVES = (FEED_FORWARD, EXPERTS)


@dataclass(frozen=True)
class Place:
    """The place in the model of a block of a file."""

    layer: int
    kind: str


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    places, norm = _places(fields), RMS(fields.number("layer_norm_epsilon"))
    if "num_hidden_layers" in fields.values and fields.integer("num_hidden_layers") != len(places):
        raise fields.error("num_hidden_layers", f"is not the number of blocks that {_key(fields)} says, {len(places)}")
    fields.require("attention_bias", False)
    fields.require("sliding_window")
    heads = fields.integer("mamba_n_heads") * fields.integer("mamba_d_head")
    mixers: dict[str, Mixer] = {ATTENTION: full_attention(fields, rotary=False)}
    mixers[MAMBA] = mamba2.state_space(
        replace(fields, values={"inner": heads, **fields.values}),
        norm=norm,
        inner="inner",
        activation="mamba_hidden_act",
        steps=(fields.number("time_step_min"), float("inf")),
    )
    feed_forwards: dict[str, FeedForward] = {}
    if any(place.kind == FEED_FORWARD for place in places):
        feed_forwards[FEED_FORWARD] = mlp(fields, activation="mlp_hidden_act", bias=fields.flag("mlp_bias"))
    if any(place.kind == EXPERTS for place in places):
        feed_forwards[EXPERTS] = _experts(fields)
    fed = {place.layer: feed_forwards[place.kind] for place in places if place.kind in feed_forwards}
    layers = [
        LayerSpec(
            mixer=mixers[place.kind],
            feed_forward=fed.get(place.layer),
            norm=norm,
            residual=PreNorm() if place.layer in fed else MixerAlone(),
        )
        for place in places
        if place.kind in mixers
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _experts(fields: Fields) -> Experts:
    fields.require("mlp_bias", False)
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("n_shared_experts", minimum=0)
    groups, count = fields.integer("n_group"), fields.integer("n_routed_experts")
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count // groups * fields.integer("topk_group")),
        inner=inner,
        activation=fields.choice("mlp_hidden_act", AS_GATE),
        normalize=fields.flag("norm_topk_prob"),
        score="sigmoid",
        corrected=True,
        scaling=fields.number("routed_scaling_factor"),
        groups=expert_groups(fields, best=GROUP_BEST) if groups > 1 else None,
        shared=SharedExpert(
            inner=fields.integer("moe_shared_expert_intermediate_size"), name="shared_experts", gated=False
        )
        if shared
        else None,
        gated=False,
        latent=fields.optional_integer("moe_latent_size"),
    )


def names(config: Mapping[str, Any]) -> Names:
    """Names of tensors in files, whose blocks are sublayers of the model's layers."""
    modules = {"embeddings": "model.embed_tokens", "norm_f": "model.norm"}
    for block, place in enumerate(_places(Fields(config, DEFAULTS, aliases=ALIASES))):
        (part, ends), layer = PARTS[place.kind], f"model.layers.{place.layer}"
        norm = "post_attention_layernorm" if place.kind in SECOND_HALVES else "input_layernorm"
        modules[f"layers.{block}.norm"] = f"{layer}.{norm}"
        if place.kind == EXPERTS:  # stacked by now
            stacks = (f"mlp.experts.{projection}_proj" for projection in ("up", "down"))
            modules |= {f"layers.{block}.{stack}": f"{layer}.{stack}" for stack in stacks}
        modules |= {f"layers.{block}.mixer{end}": f"{layer}.{part}{end}" for end in ends}
    return Names(prefix="backbone.", modules=modules)


def _places(fields: Fields) -> list[Place]:
    places: list[Place] = []
    for kind in _blocks(fields):
        if kind not in SECOND_HALVES:
            places.append(Place(places[-1].layer + 1 if places else 0, kind))
        elif places and places[-1].kind not in SECOND_HALVES:
            places.append(Place(places[-1].layer, kind))
        else:
            raise fields.error(_key(fields), "has an MLP or experts that do not follow a mixer, which is not supported")
    return places


def _blocks(fields: Fields) -> Sequence[str]:
    key = _key(fields)
    blocks = fields.get(key)
    if not isinstance(blocks, str | list | tuple) or not 0 < len(blocks) <= MAX_LAYERS:
        raise fields.error(key, "must say what each block is")
    kinds = [LETTERS.get(one, one) if isinstance(blocks, str) else OLDER.get(one, one) for one in map(str, blocks)]
    for kind in kinds:
        if kind not in PARTS:
            raise fields.error(key, f"has blocks of an unknown kind, {kind!r}")
    return kinds


def _key(fields: Fields) -> str:
    return "hybrid_override_pattern" if fields.get("layers_block_type") is None else "layers_block_type"


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("NemotronHForCausalLM",),
        model_types=("nemotron_h",),
        aliases=ALIASES,
        names=names,
    ),
)
