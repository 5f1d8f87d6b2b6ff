"""Text models inside multimodal ones: their keys are an object in config.json, and their tensors have a prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmjax.models.errors import UnsupportedModel
from llmjax.models.registry import architecture_of

MULTIMODAL = frozenset(
    {
        "AyaVisionForConditionalGeneration",
        "BlipForConditionalGeneration",
        "CLIPModel",
        "ColPaliForRetrieval",
        "ColQwen2ForRetrieval",
        "Cohere2VisionForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLV2ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLChatModel",
        "InternVLForConditionalGeneration",
        "JanusForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "LightOnOCRForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MetaClip2Model",
        "Mistral3ForConditionalGeneration",
        "Molmo2ForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "SiglipModel",
        "SmolVLMForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    }
)
"""Multimodal classes whose text model is served alone."""
# The keys of config.json under which the text model's are.
TEXT = ("text_config", "llm_config", "language_config")
# Models with rope positions on several axes, which are equal for text, so that the plain text models serve them.
OF_AXES = {
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",  # older files have the text model's keys at the top level
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# Models whose files have the text model's keys at the top level, with those of other parts beside them.
BESIDE = {
    "Phi3VForCausalLM": "Phi3ForCausalLM",
    "Phi4MMForCausalLM": "Phi3ForCausalLM",
    "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
}
# The same where files have the text model's keys, under its own names, in an object of their own.
WITHIN = {"HfMoondream": "MoondreamForCausalLM"}
OF_OTHERS = (
    "vision_config",
    "img_processor",
    "embd_layer",
    "audio_config",
    "audio_processor",
    "vision_lora",
    "speech_lora",
    "model_type",
    "version",
)
# The same where files say by ``version`` which text model it is.
OF_VERSIONS = {"MiniCPMV": {2.6: "Qwen2ForCausalLM", 4.0: "LlamaForCausalLM", 4.5: "Qwen3ForCausalLM"}}
RETRIEVAL = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")
"""Models of vectors of tokens, whose files have those of a multimodal one in an object, and a prefix, of their own."""
# Keys of the text model that say what its tokens see in prompts with pictures, which its vision half says as well.
OF_PICTURES = dict.fromkeys(
    ("PaliGemmaForConditionalGeneration", "ColPaliForRetrieval"), ("use_bidirectional_attention",)
)
# What holds for the text models of some, whatever their files say.
_SAID = {"ColPaliForRetrieval": {"is_causal": False}}
# Keys at the top level that text models need: what says how many rows a picture has, or the size of all vectors.
NEEDED = {
    "BlipForConditionalGeneration": "vision_config",
    "CLIPModel": "projection_dim",
    "MetaClip2Model": "projection_dim",
}
# What missing keys mean to these, where it is not what they mean to the plain text models.
_MISSING: Mapping[str, Mapping[str, Any]] = {
    "phi4_multimodal": {
        "vocab_size": 200064,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 199999,
        "eos_token_id": [199999, 200020],
    },
    "glm4v_text": {"rms_norm_eps": 1e-5, "head_dim": None, "max_position_embeddings": 32768},
    "glm_ocr_text": {
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    "glm4v_moe_text": {"attention_bias": True, "vocab_size": 151424, "max_position_embeddings": 65536},
}
# Keys at the top level that hold for the text model too, unless it has them itself.
SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
WRAPPER = "vlm."
"""The prefix of names of tensors in files of `RETRIEVAL`."""
# Prefixes in checkpoints from before and since Transformers 5.
PREFIX = re.compile(r"^(?:(?:language_model|language|llm)\.(?=model\.|lm_head\.)|(model\.)(?:language|text)_model\.)")


MATRICES = ("model.text.wte", "model.transformer.wte.embedding")
"""Moondream's and Molmo's names of their embeddings, which lack the ending that others have."""


def unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a multimodal model that is inside one of vectors of tokens; others as they are."""
    named, inner = config.get("architectures"), config.get("vlm_config")
    if not isinstance(named, list) or named[:1] not in [[name] for name in RETRIEVAL] or not isinstance(inner, Mapping):
        return {**config}
    outer = {key: value for key, value in config.items() if key in SHARED or key == "quantization_config"}
    return {**outer, **inner, "architectures": named}


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that the text model would have by itself; None: the model is not nested in another.

    Raises:
        UnsupportedModel: it is of a version that is not supported.
    """
    architectures, text = config.get("architectures"), next((config[key] for key in TEXT if key in config), None)
    outer_type = config.get("model_type")
    if text is None and isinstance(outer_type, str) and outer_type in OF_AXES:
        text = {key: value for key, value in config.items() if key != "vision_config"}
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(named, str) and named in BESIDE:
        return _without_others(config, BESIDE[named])
    if isinstance(named, str) and named in WITHIN:
        return _within(config, WITHIN[named])
    if isinstance(named, str) and named in OF_VERSIONS:
        return _of_version(config, OF_VERSIONS[named])
    if not isinstance(named, str) or named not in MULTIMODAL or not isinstance(text, Mapping):
        return None
    model_type = text.get("model_type")
    if not isinstance(model_type, str):
        return None
    architecture = OF_AXES.get(model_type) or _of_deepseek(text) or architecture_of(model_type)
    if architecture is None:
        return None
    if model_type in OF_AXES:
        text = _of_axes(text)
    text = {key: value for key, value in text.items() if key not in (*OF_PICTURES.get(named, ()), "use_mla")}
    outer = {key: value for key, value in config.items() if key in SHARED or key == "quantization_config"}
    # Which of the two objects decides changed with Transformers 5; either may tie, and then the tensors decide.
    tied = outer.get("tie_word_embeddings") is True or text.get("tie_word_embeddings") is True
    said: dict[str, Any] = {"tie_word_embeddings": True} if tied else {}
    if (needed := NEEDED.get(named)) is not None:
        said = {**said, needed: config.get(needed)}
    return {**outer, **text, **said, **_SAID.get(named, {}), "architectures": [architecture]}


def _of_deepseek(text: Mapping[str, Any]) -> str | None:
    """The architecture of a text model of DeepSeek-VL2, whose files call all of them DeepSeek V2; None: another."""
    if text.get("model_type") != "deepseek_v2" or "use_mla" not in text:
        return None
    if text.get("topk_method") == "noaux_tc":
        return "DeepseekV3ForCausalLM"
    return "DeepseekV2ForCausalLM" if text["use_mla"] else "DeepseekForCausalLM"


def _of_version(config: Mapping[str, Any], architectures: Mapping[float, str]) -> dict[str, Any]:
    """The keys of a text model that stand beside those of the other parts."""
    version = config.get("version")
    if not isinstance(version, int | float) or version not in architectures:
        known = ", ".join(map(str, architectures))
        raise UnsupportedModel(f"config.json: version = {str(version)[:40]} is not supported; supported are {known}")
    return _without_others(config, architectures[version])


def _without_others(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    text = {key: value for key, value in config.items() if key not in OF_OTHERS}
    model_type = config.get("model_type")
    missing = _MISSING.get(model_type, {}) if isinstance(model_type, str) else {}
    return {**missing, **text, "architectures": [architecture]}


def _within(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The keys of a text model in an object ``config``, with the ids of the tokens around texts (Moondream)."""
    held = config.get("config")
    text, tokens = ((held.get(key) if isinstance(held, Mapping) else None) or {} for key in ("text", "tokenizer"))
    if not isinstance(text, Mapping) or not isinstance(tokens, Mapping):
        raise UnsupportedModel("config.json: config.text and config.tokenizer must be objects")
    outer = {key: value for key, value in config.items() if key in SHARED or key == "quantization_config"}
    ids = {f"{key}_token_id": tokens[f"{key}_id"] for key in ("bos", "eos") if f"{key}_id" in tokens}
    return {**outer, **text, **ids, "architectures": [architecture]}


def _of_axes(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a text model whose frequencies are not scaled, under the name that others have for that."""
    plain = {**_MISSING.get(text["model_type"], {}), **text}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(key), Mapping):
            plain[key] = {
                name: value for name, value in rope.items() if name not in ("type", "rope_type") or value != "mrope"
            }
    return plain


def unwrapped_name(name: str) -> str:
    """A tensor's name in a multimodal model that is inside one of `RETRIEVAL`."""
    inner = name.removeprefix(WRAPPER)
    bare = inner != name and inner.startswith("language_model.") and PREFIX.match(inner) is None
    return f"model.{inner}" if bare else inner


def text_name(name: str) -> str:
    """A tensor's name in a text model by itself; tensors of other parts keep theirs."""
    if name in MATRICES:
        return f"{name}.weight"
    return PREFIX.sub(lambda found: found[1] or "", name)
