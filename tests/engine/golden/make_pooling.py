"""Writes ``pooling/``: tiny random checkpoints of models that make vectors, and what Hugging Face's models make.

Needs ``torch`` (CPU), ``transformers`` and ``safetensors``, none of which the tests need:

    python -m tests.engine.golden.make_pooling [name ...]

An archive a checkpoint, ``<name>.zip``, of a folder in Hugging Face layout, with sentence-transformers' files where the
real ones have them, and ``golden.npz``: ``<case>/tokens`` [n], ``<case>/types`` [n] and ``<case>/vector`` f32, the
embedding after pooling, matrices and normalization, or the logits of the labels (of a model that generates: of token 9
less that of token 7).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion  # type: ignore[import-not-found,unused-ignore]

from tests.checkpoints import pack
from tests.engine.golden import nomic_moe

HERE = Path(__file__).parent / "pooling"
VOCAB = 96
NO, YES = 7, 9
LENGTHS = {"long": 40, "short": 17, "least": 2, "one": 1}

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "rope_theta": 1e6}
MODERN = {
    **SIZES,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_LAYERS = {**SIZES, "num_hidden_layers": 2}
ROBERTA = {**TWO_LAYERS, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
GTE = {**TWO_LAYERS, "type_vocab_size": 0}
THREE = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
GEMMA = {
    **DECODER,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# Class, config, and for embeddings how they are pooled and the matrices after pooling (size, bias, activation).
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str | None, list[tuple[int, bool, str]]]] = {
    "bert": ("BertModel", SIZES, "mean", []),
    "bert-cls": ("BertModel", {**SIZES, "hidden_act": "relu", "layer_norm_eps": 1e-5}, "cls", []),
    "bert-reranker": ("BertForSequenceClassification", {**SIZES, **ONE}, None, []),
    "xlm-roberta": (
        "XLMRobertaModel", {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}, "cls", []
    ),
    "xlm-roberta-labels": (
        "XLMRobertaForSequenceClassification",
        {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1, **THREE},
        None,
        [],
    ),
    "qwen3-embedding": ("Qwen3Model", DECODER, "last", []),
    "llama-mean": ("LlamaModel", DECODER, "mean", [(20, True, "Tanh")]),
    "qwen2-labels": ("Qwen2ForSequenceClassification", {**DECODER, "pad_token_id": 0, **THREE}, None, []),
    # Whose family has keys and tensors of other names.
    "gpt2-labels": (
        "GPT2ForSequenceClassification",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0, **THREE},
        None,
        [],
    ),
    "gemma-embedding": ("Gemma3TextModel", GEMMA, "mean", [(64, False, "Identity"), (32, False, "Identity")]),
    "qwen2-both-sides": ("Qwen2Model", {**DECODER, "is_causal": False}, "last", []),
    "modernbert": ("ModernBertModel", MODERN, "cls", []),
    "modernbert-labels": (
        "ModernBertForSequenceClassification", {**MODERN, **THREE, "classifier_pooling": "mean"}, None, []
    ),
    "qwen3-reranker": ("Qwen3ForCausalLM", {**DECODER, "tie_word_embeddings": True}, None, []),
    "nomic-bert": ("NomicBertModel", {**SIZES, "type_vocab_size": 2}, "mean", []),
    # With other feed-forward sublayers: see nomic_moe.py.
    "nomic-bert-moe": (
        "GteModel",
        {**SIZES, "num_hidden_layers": 2, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "mean",
        [],
    ),
    "gte": ("GteModel", GTE, "cls", []),
    "gte-labels": ("GteForSequenceClassification", {**TWO_LAYERS, **THREE}, None, []),
    "new": ("GteModel", GTE, "cls", []),
    "new-tokens": ("GteModel", GTE, "cls", []),
    "roberta": ("RobertaModel", ROBERTA, "mean", []),
    "roberta-labels": ("RobertaForSequenceClassification", {**ROBERTA, **ONE}, None, []),
    # With the heads that they were trained with, which no vector needs.
    "bert-masked": ("BertForMaskedLM", TWO_LAYERS, "mean", []),
    "roberta-masked": ("RobertaForMaskedLM", ROBERTA, "mean", []),
    "xlm-roberta-masked": ("XLMRobertaForMaskedLM", ROBERTA, "cls", []),
    "modernbert-masked": ("ModernBertForMaskedLM", {**MODERN, "num_hidden_layers": 2}, "mean", []),
}  # fmt: skip
# Those that are published with code of their own: the keys in which config.json differs. Tensors get their names.
NEW = {
    "model_type": "new",
    "rope_parameters": None,
    "rope_theta": 160000.0,
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "nomic-bert-moe": nomic_moe.CONFIG,
    "gte-labels": {**NEW, "architectures": ["NewForSequenceClassification"]},
    "new": {**NEW, "architectures": ["NewModel"]},
    "new-tokens": {**NEW, "architectures": ["NewForTokenClassification"]},
}


def main() -> None:
    for name in sys.argv[1:] or CHECKPOINTS:
        with TemporaryDirectory() as folder:
            make(name, Path(folder))
            pack(Path(folder), HERE / f"{name}.zip")


def make(name: str, folder: Path) -> None:
    class_name, keys, kind, dense = CHECKPOINTS[name]
    cls = getattr(transformers, class_name)
    config = cls.config_class(**{**keys, "architectures": [class_name]})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = cls(config).float().eval()
    if name == "nomic-bert-moe":
        nomic_moe.adapt(model)
    rng = np.random.default_rng(sum(map(ord, name)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            center = 0.0 if "gemma" in name or not key.lower().endswith("norm.weight") else 1.0
            scale = 0.25 if parameter.ndim > 1 else 0.2
            drawn = torch.from_numpy(rng.normal(center, scale, tuple(parameter.shape)).astype(np.float32))
            parameter.copy_(drawn.bfloat16().float())
    model.save_pretrained(folder)
    state = model.state_dict()
    if name in PUBLISHED:
        if name == "nomic-bert-moe":
            state = nomic_moe.published(state)
        else:
            state = {k.replace("gte.", "new.", 1): v for k, v in revert_weight_conversion(model, state).items()}
        if name == "new-tokens":
            state = {f"new.{k}": v for k, v in state.items()}
            state |= {"classifier.weight": torch.ones(1, 32), "classifier.bias": torch.zeros(1)}
        written = json.loads((folder / "config.json").read_text()) | PUBLISHED[name]
        written = {key: value for key, value in written.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(written, indent=2))
    tensors = {key: value.detach().bfloat16().contiguous() for key, value in state.items()}
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    matrices = modules(folder, kind, dense, rng) if kind is not None else []
    arrays: dict[str, np.ndarray] = {}
    for case, length in LENGTHS.items():
        tokens = rng.integers(3, VOCAB, length)
        types = np.zeros(length, np.int64)
        if class_name == "BertForSequenceClassification" and length > 3:
            # A pair as its tokenizer writes it, with 1 for [CLS] and 2 for [SEP].
            types[length // 3 + 1 :] = 1
            tokens[[0, length // 3, -1]] = 1, 2, 2
        ids = torch.from_numpy(tokens)[None]
        given: dict[str, Any] = {"token_type_ids": torch.from_numpy(types)[None]} if types.any() else {}
        with torch.no_grad():
            # Transformers' Qwen2 does not look at is_causal, but takes a mask as it is.
            mask = torch.zeros(1, 1, length, length) if keys.get("is_causal") is False else torch.ones_like(ids)
            encoder = model.base_model if class_name.endswith("ForMaskedLM") else model
            out = encoder(input_ids=ids, attention_mask=mask, **given)
        if class_name == "Qwen3ForCausalLM":  # the last token's logits of yes, less that of no
            out.logits = (out.logits[:, -1, YES] - out.logits[:, -1, NO])[:, None]
        vector = out.logits[0] if kind is None else pooled(out.last_hidden_state[0], kind, matrices)
        arrays |= {f"{case}/tokens": tokens.astype(np.int32), f"{case}/types": types.astype(np.int32)}
        arrays[f"{case}/vector"] = vector.float().numpy()
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(name, {key: value.shape for key, value in arrays.items() if key.endswith("vector")})


Matrices = list[tuple[torch.Tensor, torch.Tensor | None, str]]


def modules(folder: Path, kind: str, dense: list[tuple[int, bool, str]], rng: np.random.Generator) -> Matrices:
    """Writes sentence-transformers' files; returns the matrices after pooling."""
    prefix = "sentence_transformers.models"
    found = [
        {"idx": 0, "name": "0", "path": "", "type": f"{prefix}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}.Pooling"},
    ]
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    pooling = {"word_embedding_dimension": 32, **{f"pooling_mode_{m}": modes[kind] == m for m in modes.values()}}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))
    matrices: Matrices = []
    size = 32
    for out, bias, activation in dense:
        path = folder / f"{len(found)}_Dense"
        path.mkdir()
        weight = torch.from_numpy(rng.normal(0, 0.3, (out, size)).astype(np.float32))
        tensors = {"linear.weight": weight}
        if bias:
            tensors["linear.bias"] = torch.from_numpy(rng.normal(0, 0.3, out).astype(np.float32))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        function = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
        keys = {"in_features": size, "out_features": out, "bias": bias, "activation_function": function}
        (path / "config.json").write_text(json.dumps(keys, indent=2))
        found.append({"idx": len(found), "name": str(len(found)), "path": path.name, "type": f"{prefix}.Dense"})
        matrices.append((weight, tensors.get("linear.bias"), activation))
        size = out
    found.append({"idx": len(found), "name": str(len(found)), "path": f"{len(found)}_N", "type": f"{prefix}.Normalize"})
    (folder / "modules.json").write_text(json.dumps(found, indent=2))
    settings = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings, indent=2))
    return matrices


def pooled(hidden: torch.Tensor, kind: str, matrices: Matrices) -> torch.Tensor:
    vector = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[kind]
    for weight, bias, activation in matrices:
        vector = torch.nn.functional.linear(vector, weight, bias)
        vector = torch.tanh(vector) if activation == "Tanh" else vector
    return torch.nn.functional.normalize(vector, dim=0)


if __name__ == "__main__":
    main()
