"""Which family reads which config.json."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

from llmjax.models import (
    apertus,
    arcee,
    baichuan,
    bamba,
    bert,
    bitnet,
    bloom,
    chatglm,
    cohere,
    dbrx,
    deepseek,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_moe,
    gte,
    hunyuan,
    internlm,
    jamba,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba,
    mamba2,
    minicpm,
    minimax,
    minimax_m2,
    mistral,
    mixtral,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    nomic_bert,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from llmjax.models.classifiers import TokenLabels, classifier_pooler, reward_pooler
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel
from llmjax.models.fields import Fields
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Pooler
from llmjax.models.names import Names


class Family(Protocol):
    """Reads the config.json of one family; see ``model_config``."""

    def __call__(self, config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig: ...


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ApertusForCausalLM": apertus.from_hf,
        "ArceeForCausalLM": arcee.from_hf,
        "BaiChuanForCausalLM": baichuan.from_hf,
        "BaichuanForCausalLM": baichuan.by_size_from_hf,
        "BambaForCausalLM": bamba.from_hf,
        "BertForMaskedLM": bert.from_hf,
        "BertForSequenceClassification": bert.classifier_from_hf,
        "BertModel": bert.from_hf,
        "BitNetForCausalLM": bitnet.from_hf,
        "BloomForCausalLM": bloom.from_hf,
        "ChatGLMForConditionalGeneration": chatglm.from_hf,
        "ChatGLMModel": chatglm.from_hf,
        "Cohere2ForCausalLM": cohere.cohere2_from_hf,
        "CohereForCausalLM": cohere.from_hf,
        "DbrxForCausalLM": dbrx.from_hf,
        "DeepseekForCausalLM": deepseek.from_hf,
        "DeepseekV2ForCausalLM": deepseek_v2.from_hf,
        "DeepseekV32ForCausalLM": deepseek_v3.v32_from_hf,
        "DeepseekV3ForCausalLM": deepseek_v3.from_hf,
        "Dots1ForCausalLM": dots1.from_hf,
        "Ernie4_5ForCausalLM": ernie4_5.from_hf,
        "Ernie4_5_MoeForCausalLM": ernie4_5_moe.from_hf,
        "Exaone4ForCausalLM": exaone.exaone4_from_hf,
        "ExaoneForCausalLM": exaone.from_hf,
        "FalconForCausalLM": falcon.from_hf,
        "FalconH1ForCausalLM": falcon_h1.from_hf,
        "FalconMambaForCausalLM": mamba.falcon_from_hf,
        "GPT2LMHeadModel": gpt2.from_hf,
        "GPTBigCodeForCausalLM": gpt_bigcode.from_hf,
        "GPTJForCausalLM": gptj.from_hf,
        "GPTNeoXForCausalLM": gpt_neox.from_hf,
        "Gemma2ForCausalLM": gemma2.from_hf,
        "Gemma3ForCausalLM": gemma3.from_hf,
        "Gemma3nForCausalLM": gemma3n.from_hf,
        "Gemma4ForCausalLM": gemma4.from_hf,
        "GemmaForCausalLM": gemma.from_hf,
        "Glm4ForCausalLM": glm.glm4_from_hf,
        "Glm4MoeForCausalLM": glm4_moe.from_hf,
        "Glm4MoeLiteForCausalLM": deepseek_v3.lite_from_hf,
        "GlmForCausalLM": glm.from_hf,
        "GlmMoeDsaForCausalLM": deepseek_v3.dsa_from_hf,
        "GptOssForCausalLM": gpt_oss.from_hf,
        "GraniteForCausalLM": granite.from_hf,
        "GraniteMoeForCausalLM": granite_moe.from_hf,
        "GraniteMoeHybridForCausalLM": granite_moe.hybrid_from_hf,
        "GraniteMoeSharedForCausalLM": granite_moe.shared_from_hf,
        "GteModel": gte.from_hf,
        "HunYuanDenseV1ForCausalLM": hunyuan.from_hf,
        "HunYuanMoEV1ForCausalLM": hunyuan.moe_from_hf,
        "InternLM2ForCausalLM": internlm.from_hf,
        "InternLM3ForCausalLM": internlm.internlm3_from_hf,
        "JambaForCausalLM": jamba.from_hf,
        "KimiLinearForCausalLM": kimi_linear.from_hf,
        "Lfm2ForCausalLM": lfm2.from_hf,
        "Lfm2MoeForCausalLM": lfm2.moe_from_hf,
        "Llama4ForCausalLM": llama4.from_hf,
        "LlamaForCausalLM": llama.from_hf,
        "MPTForCausalLM": mpt.from_hf,
        "Mamba2ForCausalLM": mamba2.from_hf,
        "MambaForCausalLM": mamba.from_hf,
        "MiniCPM3ForCausalLM": minicpm.minicpm3_from_hf,
        "MiniCPMForCausalLM": minicpm.from_hf,
        "MiniMaxForCausalLM": minimax.from_hf,
        "MiniMaxM1ForCausalLM": minimax.from_hf,
        "MiniMaxM2ForCausalLM": minimax_m2.from_hf,
        "MiniMaxText01ForCausalLM": minimax.from_hf,
        "Ministral3ForCausalLM": mistral.ministral3_from_hf,
        "MinistralForCausalLM": mistral.from_hf,
        "MistralForCausalLM": mistral.from_hf,
        "MixtralForCausalLM": mixtral.from_hf,
        "ModernBertForMaskedLM": modernbert.from_hf,
        "ModernBertForSequenceClassification": modernbert.classifier_from_hf,
        "ModernBertModel": modernbert.from_hf,
        "MptForCausalLM": mpt.from_hf,
        "NemotronForCausalLM": nemotron.from_hf,
        "NemotronHForCausalLM": nemotron_h.from_hf,
        "NewForSequenceClassification": gte.new_classifier_from_hf,
        "NewForTokenClassification": gte.new_from_hf,
        "NewModel": gte.new_from_hf,
        "NomicBertModel": nomic_bert.from_hf,
        "OPTForCausalLM": opt.from_hf,
        "Olmo2ForCausalLM": olmo2.from_hf,
        "Olmo3ForCausalLM": olmo2.olmo3_from_hf,
        "OlmoForCausalLM": olmo.from_hf,
        "OlmoeForCausalLM": olmoe.from_hf,
        "Phi3ForCausalLM": phi3.from_hf,
        "PhiForCausalLM": phi.from_hf,
        "PhiMoEForCausalLM": phimoe.from_hf,
        "PhimoeForCausalLM": phimoe.from_hf,
        "Qwen2ForCausalLM": qwen2.from_hf,
        "Qwen2MoeForCausalLM": qwen2_moe.from_hf,
        "Qwen3ForCausalLM": qwen3.from_hf,
        "Qwen3MoeForCausalLM": qwen3_moe.from_hf,
        "Qwen3NextForCausalLM": qwen3_next.from_hf,
        "Qwen3_5ForCausalLM": qwen3_5.from_hf,
        "Qwen3_5MoeForCausalLM": qwen3_5.moe_from_hf,
        "RobertaForMaskedLM": bert.roberta_from_hf,
        "RobertaForSequenceClassification": bert.roberta_classifier_from_hf,
        "RobertaModel": bert.roberta_from_hf,
        "SeedOssForCausalLM": seed_oss.from_hf,
        "SmolLM3ForCausalLM": smollm3.from_hf,
        "StableLMEpochForCausalLM": stablelm.from_hf,
        "StableLmForCausalLM": stablelm.from_hf,
        "Starcoder2ForCausalLM": starcoder2.from_hf,
        "XLMRobertaForMaskedLM": bert.xlm_roberta_from_hf,
        "XLMRobertaForSequenceClassification": bert.xlm_roberta_classifier_from_hf,
        "XLMRobertaModel": bert.xlm_roberta_from_hf,
        "YiForCausalLM": llama.from_hf,
    }
)

# Of families whose checkpoints do not have the model's own names.
NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "ApertusForCausalLM": apertus.NAMES,
        "BaiChuanForCausalLM": baichuan.NAMES,
        "BaichuanForCausalLM": baichuan.NAMES,
        "BambaForCausalLM": bamba.NAMES,
        "BertForMaskedLM": bert.NAMES,
        "BertForSequenceClassification": bert.CLASSIFIER_NAMES,
        "BertModel": bert.NAMES,
        "BitNetForCausalLM": bitnet.NAMES,
        "BloomForCausalLM": bloom.NAMES,
        "ChatGLMForConditionalGeneration": chatglm.NAMES,
        "ChatGLMModel": chatglm.NAMES,
        "DbrxForCausalLM": dbrx.NAMES,
        "DeepseekV32ForCausalLM": deepseek_v3.V32_NAMES,
        "Ernie4_5_MoeForCausalLM": ernie4_5_moe.NAMES,
        "ExaoneForCausalLM": exaone.NAMES,
        "FalconForCausalLM": falcon.NAMES,
        "FalconH1ForCausalLM": falcon_h1.NAMES,
        "FalconMambaForCausalLM": mamba.NAMES,
        "GPT2LMHeadModel": gpt2.NAMES,
        "GPTBigCodeForCausalLM": gpt_bigcode.NAMES,
        "GPTJForCausalLM": gptj.NAMES,
        "GPTNeoXForCausalLM": gpt_neox.NAMES,
        "Gemma3nForCausalLM": gemma3n.NAMES,
        "Glm4ForCausalLM": glm.NAMES,
        "GlmForCausalLM": glm.NAMES,
        "GlmMoeDsaForCausalLM": deepseek_v3.V32_NAMES,
        "GptOssForCausalLM": gpt_oss.NAMES,
        "GraniteMoeSharedForCausalLM": granite_moe.SHARED_NAMES,
        "GteModel": gte.NAMES,
        "HunYuanDenseV1ForCausalLM": hunyuan.NAMES,
        "HunYuanMoEV1ForCausalLM": hunyuan.NAMES,
        "InternLM2ForCausalLM": internlm.NAMES,
        "JambaForCausalLM": jamba.NAMES,
        "KimiLinearForCausalLM": kimi_linear.NAMES,
        "Lfm2ForCausalLM": lfm2.NAMES,
        "Lfm2MoeForCausalLM": lfm2.NAMES,
        "Llama4ForCausalLM": llama4.NAMES,
        "MPTForCausalLM": mpt.NAMES,
        "Mamba2ForCausalLM": mamba2.NAMES,
        "MambaForCausalLM": mamba.NAMES,
        "ModernBertForMaskedLM": modernbert.NAMES,
        "ModernBertForSequenceClassification": modernbert.NAMES,
        "ModernBertModel": modernbert.NAMES,
        "MptForCausalLM": mpt.NAMES,
        "NewForSequenceClassification": gte.NEW_CLASSIFIER_NAMES,
        "NewForTokenClassification": gte.NEW_NAMES,
        "NewModel": gte.NEW_NAMES,
        "NomicBertModel": nomic_bert.NAMES,
        "OPTForCausalLM": opt.NAMES,
        "Phi3ForCausalLM": phi3.NAMES,
        "PhiForCausalLM": phi.NAMES,
        "RobertaForMaskedLM": bert.ROBERTA_NAMES,
        "RobertaForSequenceClassification": bert.ROBERTA_NAMES,
        "RobertaModel": bert.ROBERTA_NAMES,
        "StableLMEpochForCausalLM": stablelm.NAMES,
        "StableLmForCausalLM": stablelm.NAMES,
        "Starcoder2ForCausalLM": starcoder2.NAMES,
        "XLMRobertaForMaskedLM": bert.ROBERTA_NAMES,
        "XLMRobertaForSequenceClassification": bert.ROBERTA_NAMES,
        "XLMRobertaModel": bert.ROBERTA_NAMES,
        "YiForCausalLM": llama.YI_NAMES,
    }
)

# Of families whose names depend on the config.
NAMES_BY_CONFIG: Mapping[str, Callable[[Mapping[str, Any]], Names]] = MappingProxyType(
    {
        "Gemma4ForCausalLM": gemma4.names,
        "GraniteMoeHybridForCausalLM": granite_moe.hybrid_names,
        "NemotronHForCausalLM": nemotron_h.names,
    }
)

# Of families in which the head of a model with this vocabulary has rows that are to be made one long.
UNIT_HEADS: Mapping[str, int] = MappingProxyType({"BaichuanForCausalLM": baichuan.UNIT_HEAD_VOCABULARY})

# For a config.json that names no architecture.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "Yi": "YiForCausalLM",
        "apertus": "ApertusForCausalLM",
        "arcee": "ArceeForCausalLM",
        "baichuan": "BaichuanForCausalLM",
        "bamba": "BambaForCausalLM",
        "bert": "BertModel",
        "bitnet": "BitNetForCausalLM",
        "bloom": "BloomForCausalLM",
        "chatglm": "ChatGLMModel",
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "dbrx": "DbrxForCausalLM",
        "deepseek": "DeepseekForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "dots1": "Dots1ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
        "exaone": "ExaoneForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "falcon": "FalconForCausalLM",
        "falcon_h1": "FalconH1ForCausalLM",
        "falcon_mamba": "FalconMambaForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3n_text": "Gemma3nForCausalLM",
        "gemma4_text": "Gemma4ForCausalLM",
        "glm": "GlmForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gpt_bigcode": "GPTBigCodeForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "gptj": "GPTJForCausalLM",
        "granite": "GraniteForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "granitemoeshared": "GraniteMoeSharedForCausalLM",
        "gte": "GteModel",
        "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
        "internlm2": "InternLM2ForCausalLM",
        "internlm3": "InternLM3ForCausalLM",
        "jamba": "JambaForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "mamba": "MambaForCausalLM",
        "mamba2": "Mamba2ForCausalLM",
        "minicpm": "MiniCPMForCausalLM",
        "minicpm3": "MiniCPM3ForCausalLM",
        "minimax": "MiniMaxForCausalLM",
        "minimax_m1": "MiniMaxM1ForCausalLM",
        "minimax_m2": "MiniMaxM2ForCausalLM",
        "minimax_text_01": "MiniMaxText01ForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "modernbert": "ModernBertModel",
        "mpt": "MptForCausalLM",
        "nemotron": "NemotronForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "new": "NewModel",
        "nomic_bert": "NomicBertModel",
        "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "opt": "OPTForCausalLM",
        "phi": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "phimoe": "PhimoeForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "roberta": "RobertaModel",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "stablelm_epoch": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "xlm-roberta": "XLMRobertaModel",
    }
)


# Transformers from 5.24 on has no class for these, but Llama's, which it writes; tensors keep their names.
RUN_AS_LLAMA: Mapping[str, str] = MappingProxyType({"exaone": "ExaoneForCausalLM"})
CLASSIFIER = "ForSequenceClassification"
# Decoders whose labels are rewards, of a text or of each of its steps.
REWARDS = ("ForRewardModel", "ForProcessRewardModel")
# What ends the name of a decoder without a head, and of one with.
_BARE, _WITH_HEAD = ("TextModel", "Model"), ("ForCausalLM", "LMHeadModel")
_ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")

Conversion = Literal["embed", "classify"]


def model_config(
    config: Mapping[str, Any], *, max_model_len: int | None = None, convert: Conversion | None = None
) -> ModelConfig:
    """The configuration of a model from its config.json.

    Args:
        config: the parsed file; ``architectures[0]`` decides on the family, else ``model_type``.
        max_model_len: longest sequence that will be served, in tokens; dynamic rope scaling reaches as far. None means
            ``max_position_embeddings``.
        convert: what is made of a model that generates; None: what its architecture says, which is an embedding where
            its tokens see those behind them.

    Raises:
        UnsupportedModel: an unknown architecture, or a key whose value is wrong or not supported.
    """
    if max_model_len is not None and max_model_len < 1:
        raise UnsupportedModel(f"max_model_len = {max_model_len} must be at least 1")
    family, made = _architecture(config)
    model = FAMILIES[family](config, max_model_len=max_model_len)
    if config.get("is_causal") is False and model.causal:
        model = replace(model, layers=tuple(_bidirectional(layer, family) for layer in model.layers))
    labels = TokenLabels.of(config)
    convert = convert or made or ("classify" if labels is not None else None) or ("embed" if not model.causal else None)
    if model.pooler is not None or convert is None:
        return model
    if convert == "classify" and labels is not None and (model.head_bias or model.final_softcap is not None):
        raise UnsupportedModel(
            f"config.json: classifier_from_token is not supported for {family}, whose logits are more than a product"
        )
    fields = Fields(config)
    if convert == "embed":
        pooler = Pooler(kind="last")
    elif _named(config).endswith(REWARDS):
        pooler = reward_pooler(fields, size=model.hidden_size, one_matrix=family == "InternLM2ForCausalLM")
    else:
        pooler = classifier_pooler(fields, kind="last", bias=False)
    return replace(model, pooler=pooler)


def _bidirectional(layer: LayerSpec, family: str) -> LayerSpec:
    if not isinstance(layer.mixer, Attention):
        raise UnsupportedModel(f"config.json: is_causal = False is not supported for {family}")
    return replace(layer, mixer=replace(layer.mixer, causal=False))


def tensor_names(config: Mapping[str, Any]) -> Names | None:
    """What checkpoints of a model's family call its tensors; None: what the model does, or the family is unknown."""
    try:
        architecture, _ = _architecture(config)
        by_config = NAMES_BY_CONFIG.get(architecture)
        return NAMES.get(architecture) if by_config is None else by_config(config)
    except UnsupportedModel:
        return None


def makes_vectors(config: Mapping[str, Any], *, convert: Conversion | None = None) -> bool:
    """Whether the model makes vectors of texts; not if it is not known."""
    try:
        return model_config(config, convert=convert).pooler is not None
    except UnsupportedModel:
        return False


def token_labels(config: Mapping[str, Any]) -> TokenLabels | None:
    """Labels that are made of tokens; None: there are none, or they are wrong."""
    try:
        return TokenLabels.of(config)
    except UnsupportedModel:
        return None


def has_unit_head(config: Mapping[str, Any]) -> bool:
    """Whether the rows of the head's matrix are divided by their lengths before anything is multiplied with it."""
    try:
        vocabulary = UNIT_HEADS.get(_architecture(config)[0])
    except UnsupportedModel:
        return False
    return vocabulary is not None and config.get("vocab_size") == vocabulary


def _architecture(config: Mapping[str, Any]) -> tuple[str, Conversion | None]:
    """The key in FAMILIES, and what is made of a model that generates; None: nothing else."""
    named, model_type = config.get("architectures"), config.get("model_type")
    if named:
        architecture = named[0] if isinstance(named, list | tuple) else named
    else:
        architecture = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            known = ", ".join(sorted(MODEL_TYPES))
            raise UnsupportedModel(f"config.json: model_type {model_type!r} is not supported; supported are {known}")
    if not isinstance(architecture, str):
        raise UnsupportedModel(_unknown(architecture))
    if architecture == "LlamaForCausalLM" and isinstance(model_type, str):
        architecture = RUN_AS_LLAMA.get(model_type, architecture)
    if architecture in FAMILIES:
        return architecture, None
    ends: list[tuple[str, Conversion]] = [(end, "classify") for end in (f"Text{CLASSIFIER}", CLASSIFIER, *REWARDS)]
    ends += [(end, "embed") for end in _BARE]
    for end, made in ends:
        if (stem := architecture.removesuffix(end)) != architecture:
            for head in _WITH_HEAD:
                if stem + head in FAMILIES:
                    return stem + head, made
    raise UnsupportedModel(_unknown(architecture))


def _named(config: Mapping[str, Any]) -> str:
    """The architecture as a config.json names it."""
    named = config.get("architectures") or [""]
    return str(named[0] if isinstance(named, list | tuple) else named)


def _unknown(architecture: Any) -> str:
    """What to say about one that is not known."""
    known = sorted(FAMILIES)
    near = _near(str(architecture)[:100], known)
    override = json.dumps({"architectures": near or ["NAME"]})
    return (
        f"config.json: architecture {architecture!r} is not supported; if it is {(near or ['one of these'])[0]} under "
        f"another name, set hf_overrides to {override}; supported are {', '.join(known)}"
    )


def _near(architecture: str, known: Sequence[str]) -> list[str]:
    """The known name that is most like another one, if any is: what all names end with says nothing."""
    stems = {_ENDING.sub("", name): name for name in known}
    return [stems[stem] for stem in difflib.get_close_matches(_ENDING.sub("", architecture), stems, n=1)]
