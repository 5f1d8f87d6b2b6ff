"""DeepSeek V3, R1, V3.1 and Kimi K2: latent attention, and experts chosen by sigmoid scores with correction biases;
V3.2, whose tokens see only the keys that an indexer chooses; and GLM-4.7-Flash and GLM-5."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import deepseek_v2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, layer_types, rms
from llmjax.models.layers.latent import Indexer, LatentAttention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.norm import Layer
from llmjax.models.names import Names

# What Hugging Face's DeepseekV3Config means by a missing key.
DEFAULTS = {
    **deepseek_v2.DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# What Hugging Face's DeepseekV32Config means by a missing key.
V32_DEFAULTS = {
    **DEFAULTS,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
# What Hugging Face's Glm4MoeLiteConfig means by a missing key.
LITE_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}
# What Hugging Face's GlmMoeDsaConfig means by a missing key.
DSA_DEFAULTS = {
    **LITE_DEFAULTS,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 2048,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
INDEX_EPS = 1e-6  # of the norm of the indexer's keys; no key of config.json says it
V32_NAMES = Names(
    modules={
        f"model.layers.*.self_attn.indexer.{part}": f"model.layers.*.indexer.{part}"
        for part in ("wq_b", "wk", "k_norm", "weights_proj")
    }
)
INDEXED = "indexed_attention"
CHOOSES, FOLLOWS = "full", "shared"  # with an indexer of its own; with the choice of the last indexer before it
GROUP_BEST = 2  # a group's score is the sum over this many of its best experts


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    layer_types(fields, kinds=("full_attention",))
    attention = deepseek_v2.latent_attention(fields, interleaved=fields.flag("rope_interleave"))
    norm, feed_forwards = rms(fields), deepseek_v2.feed_forwards(fields, sigmoid_experts)
    layers = [LayerSpec(mixer=attention, feed_forward=each, norm=norm) for each in feed_forwards]
    return decoder_config(fields, layers=layers, norm=norm)


def v32_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for V3.2, in which a token sees the ``index_topk`` tokens before it that an indexer has chosen.

    No indexer is needed if no sequence may have more tokens than that, since it would choose all of them.
    """
    chosen = fields.integer("index_topk")
    kinds = layer_types(fields, kinds=(INDEXED, "full_attention"))
    check_dense_first(fields, len(kinds))
    without_types = {key: value for key, value in fields.values.items() if key != "layer_types"}
    longest = {"max_position_embeddings": V32_DEFAULTS["max_position_embeddings"]}
    model = from_hf(replace(fields, values=longest | without_types, defaults=DEFAULTS))
    if (fields.max_model_len or model.max_position) > chosen:
        model = replace(model, layers=tuple(_indexed(layer, fields, interleaved=False) for layer in model.layers))
    return model


def dsa_from_hf(fields: Fields) -> ModelConfig:
    """`v32_from_hf` for GLM-5, whose indexers rotate neighboring entries together, as its attention does; and GLM-5.2,
    in which layers share indexers."""
    fields.require("indexer_rope_interleave", True)
    kinds = _indexer_types(fields)
    no_head_dim = {key: value for key, value in fields.values.items() if key != "head_dim"}  # the rotated part alone
    model = v32_from_hf(replace(fields, values={**DSA_DEFAULTS, **no_head_dim}, defaults=V32_DEFAULTS))
    layers = [
        layer
        if layer.indexer is None
        else _indexed(layer, fields, interleaved=True)
        if kind == CHOOSES
        else replace(layer, indexer=None, chosen_before=True)
        for kind, layer in zip(kinds, model.layers, strict=True)
    ]
    return replace(model, layers=tuple(layers))


def _indexer_types(fields: Fields) -> list[str]:
    """CHOOSES or FOLLOWS for each layer: from a list, from letters, or at equal distances after the first few layers.

    Formula: Hugging Face's ``GlmMoeDsaConfig``.
    """
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    key = next((key for key in ("indexer_types", "index_topk_pattern") if fields.get(key) is not None), None)
    if key is None:
        every = max(1, fields.integer("index_topk_freq", minimum=0))
        last = fields.integer("index_skip_topk_offset", minimum=0) - 1  # the last of the first layers, which all choose
        return [FOLLOWS if max(0, layer - last) % every else CHOOSES for layer in range(count)]
    types = fields.get(key)
    letters = {"F": CHOOSES, "S": FOLLOWS} if isinstance(types, str) else {CHOOSES: CHOOSES, FOLLOWS: FOLLOWS}
    if not isinstance(types, str | list | tuple) or len(types) != count or not all(one in letters for one in types):
        raise fields.error(key, f"must be {CHOOSES!r} or {FOLLOWS!r} for each of num_hidden_layers = {count}")
    if letters[types[0]] != CHOOSES:
        raise fields.error(key, "has no indexer before the first layer that shares one")
    return [letters[one] for one in types]


def lite_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for GLM-4.7-Flash, which has V3's layers."""
    check_dense_first(fields, fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    no_head_dim = {key: value for key, value in fields.values.items() if key != "head_dim"}  # the rotated part alone
    return from_hf(replace(fields, values={**LITE_DEFAULTS, **no_head_dim}, defaults=DEFAULTS))


def check_dense_first(fields: Fields, layers: int) -> None:
    """Raises if ``mlp_layer_types`` and ``first_k_dense_replace`` do not agree."""
    dense = min(layers, fields.integer("first_k_dense_replace", minimum=0))
    if fields.get("mlp_layer_types") not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
        problem = f"is not first_k_dense_replace = {dense} dense layers with experts after them"
        raise fields.error("mlp_layer_types", problem)


def _indexed(layer: LayerSpec, fields: Fields, *, interleaved: bool) -> LayerSpec:
    """The layer with an indexer beside its attention; ``interleaved``: whether that rotates neighbors together."""
    mixer = layer.mixer
    assert isinstance(mixer, LatentAttention) and mixer.rope is not None
    if mixer.q_rank is None:
        raise fields.error("q_lora_rank", "is not there, of which the indexer's queries are made")
    size = fields.integer("index_head_dim")
    if size < mixer.rope_dim:
        raise fields.error("index_head_dim", f"is less than qk_rope_head_dim = {mixer.rope_dim}")
    indexer = Indexer(
        heads=fields.integer("index_n_heads"),
        size=size,
        q_rank=mixer.q_rank,
        count=fields.integer("index_topk"),
        rope=replace(mixer.rope, interleaved=interleaved),
        norm=Layer(INDEX_EPS),
    )
    return replace(layer, indexer=indexer)


def sigmoid_experts(fields: Fields) -> Experts:
    """Experts from DeepSeek V3's keys."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    fields.require("moe_layer_freq", 1)
    groups = fields.integer("n_group")
    return deepseek_v2.routed_experts(
        fields,
        groups=deepseek_v2.expert_groups(fields, best=GROUP_BEST) if groups > 1 else None,
        normalize=fields.flag("norm_topk_prob"),
        score="sigmoid",
        corrected=True,
    )


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("DeepseekV3ForCausalLM",),
        model_types=("deepseek_v3", "kimi_k2"),
    ),
    Family(
        v32_from_hf,
        V32_DEFAULTS,
        architectures=("DeepseekV32ForCausalLM",),
        model_types=("deepseek_v32",),
        names=V32_NAMES,
    ),
    Family(
        dsa_from_hf,
        DSA_DEFAULTS,
        architectures=("GlmMoeDsaForCausalLM",),
        model_types=("glm_moe_dsa",),
        names=V32_NAMES,
    ),
    Family(
        lite_from_hf,
        LITE_DEFAULTS,
        architectures=("Glm4MoeLiteForCausalLM",),
        model_types=("glm4_moe_lite",),
    ),
)
