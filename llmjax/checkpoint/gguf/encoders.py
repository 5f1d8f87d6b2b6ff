"""Embedding models in GGUF files: config.json's keys for encoders, and how hidden states become vectors.

Source: llama.cpp's converters of BERT, RoBERTa, nomic-bert, ModernBERT and Qwen3-Reranker, and what it makes of
rerankers' hidden states (``build_pooling``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.gguf.architecture import LAYER_NORM, Architecture
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import EXPERT_TENSORS, FUSED_QKV, LLAMA_LAYER
from llmjax.checkpoint.sentence_transformers import SentenceModules
from llmjax.errors import CheckpointError
from llmjax.models.layers.pooling import PoolingKind

POOLING = "pooling_type"
KINDS: Mapping[int, PoolingKind] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
UNSAID, RANK = 0, 4
LABELS = "classifier.output_labels"
HEAD, YES_AND_NO = "cls.weight", "cls.output.weight"
CLASSIFIER_HEAD = MappingProxyType(
    {"cls": "head.0.dense", "cls.norm": "head.0.norm", "cls.output": "head.1.dense"},
)
BERT_LAYER = MappingProxyType(
    {
        **{stem: module for stem, module in LLAMA_LAYER.items() if stem not in ("attn_norm", "ffn_norm")},
        "attn_output_norm": "input_layernorm",
        "layer_output_norm": "post_attention_layernorm",
    }
)
"""Norms come after the residual sums."""


def bert(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """BERT, and RoBERTa without the rows of positions that it does not use."""
    labels = _labels(keys, gguf, "BertForSequenceClassification")
    positions = gguf.tensors.get("position_embd.weight")
    if positions is None:
        raise CheckpointError(f"{gguf.path}: tensor 'position_embd.weight' is missing")
    return {"max_position_embeddings": positions.shape[0], **_segments(gguf), **labels}


def nomic_bert(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """nomic-bert, with rotary positions and a gate."""
    if _labels(keys, gguf, ""):
        keys.fail(POOLING, "is that of a reranker, which nomic-bert is not")
    if f"blk.0.{FUSED_QKV}.bias" in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: tensor 'blk.0.{FUSED_QKV}.bias' is not supported with 'nomic-bert'")
    return {"rotary_emb_base": config["rope_theta"], **_segments(gguf)}


def nomic_bert_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """nomic-bert with experts in every other layer, biases, and no gate; the experts' own bias is left out by the
    converter."""
    if _labels(keys, gguf, ""):
        keys.fail(POOLING, "is that of a reranker, which nomic-bert is not")
    return {
        "rotary_emb_base": config["rope_theta"],
        "activation_function": "gelu",
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        "moe_every_n_layers": keys.integer("moe_every_n_layers"),
        "num_experts": keys.integer("expert_count"),
        "moe_top_k": keys.integer("expert_used_count"),
        "moe_bias": False,
        **_segments(gguf),
    }


def modern_bert(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """ModernBERT, with windows in most layers; rerankers look at the mean of all tokens, as llama.cpp does."""
    labels = _labels(keys, gguf, "ModernBertForSequenceClassification")
    return {
        **({**labels, "classifier_pooling": "mean"} if labels else {}),
        "local_attention": keys.integer("attention.sliding_window"),
        "global_attn_every_n_layers": keys.integer("attention.sliding_window_pattern", 3),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
    }


def qwen3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Qwen3-Reranker, whose rows for yes and no are those of the embedding."""
    if keys.integer(POOLING, UNSAID, least=UNSAID) != RANK or YES_AND_NO not in gguf.tensors:
        return {}
    keys.value(LABELS, ["yes", "no"])
    return {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}


def sentence_modules(gguf: GGUFFile) -> SentenceModules | None:
    """The modules by which a file turns hidden states into vectors; None: it names none.

    Raises:
        CheckpointError: a kind of pooling that is not supported.
    """
    keys = ArchitectureKeys(gguf)
    value = keys.integer(POOLING, UNSAID, least=UNSAID)
    if value in (UNSAID, RANK):
        return None
    if value not in KINDS:
        keys.fail(POOLING, f"is {value!r}; supported are {', '.join(map(str, KINDS))}")
    return SentenceModules(kind=KINDS[value], normalize=True)


def _labels(keys: ArchitectureKeys, gguf: GGUFFile, architecture: str) -> dict[str, Any]:
    """Keys of an encoder that gives texts labels; empty where it makes embeddings.

    Args:
        architecture: architecture of an encoder with labels.

    Raises:
        CheckpointError: the model is not an encoder, or a matrix of its head is missing. Converters leave out that of
            BERT (``pooler.dense``), without which the scores are not the model's.
    """
    if keys.value("attention.causal", False) is not False:
        keys.fail("attention.causal", "is not false")
    if keys.integer(POOLING, UNSAID, least=UNSAID) != RANK:
        return {}
    for name in (HEAD, YES_AND_NO):
        if name not in gguf.tensors:
            raise CheckpointError(
                f"{gguf.path}: tensor {name!r} is missing, without which a reranker's scores would be others; "
                "take the model's safetensors"
            )
    count = gguf.tensors[YES_AND_NO].shape[0]
    names = keys.value(LABELS, [f"LABEL_{number}" for number in range(count)])
    if len(names) != count:
        keys.fail(LABELS, f"has {len(names)} names for {count} labels")
    return {"architectures": [architecture], "id2label": {str(i): str(name) for i, name in enumerate(names)}}


def _segments(gguf: GGUFFile) -> dict[str, Any]:
    types = gguf.tensors.get("token_types.weight")
    return {"type_vocab_size": 0 if types is None else types.shape[0]}


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "bert": Architecture(
            hf_class="BertModel",
            model_type="bert",
            layer_tensors=BERT_LAYER | CLASSIFIER_HEAD,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu"),
            specialize=bert,
        ),
        "nomic-bert": Architecture(
            hf_class="NomicBertModel",
            model_type="nomic_bert",
            layer_tensors=BERT_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=nomic_bert,
        ),
        "nomic-bert-moe": Architecture(
            hf_class="NomicBertModel",
            model_type="nomic_bert",
            layer_tensors=BERT_LAYER | EXPERT_TENSORS,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=nomic_bert_moe,
        ),
        "modern-bert": Architecture(
            hf_class="ModernBertModel",
            model_type="modernbert",
            layer_tensors=LLAMA_LAYER | CLASSIFIER_HEAD,
            fused_gate=True,
            eps=(LAYER_NORM, "norm_eps"),
            activation=("hidden_activation", "gelu"),
            specialize=modern_bert,
        ),
    }
)
