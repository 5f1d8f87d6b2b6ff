"""Models of embeddings written as GGUF the way llama.cpp's converters do, with the names that the gguf package has for
their architectures, are the same models; and what they make is what Hugging Face's make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax import LLM, PoolingParams
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.gguf.encoders import BERT_LAYER, CLASSIFIER_HEAD
from llmjax.checkpoint.gguf.names import EXPERT_TENSORS, GLOBAL_TENSORS, HEAD_NORMS, LLAMA_LAYER
from llmjax.errors import CheckpointError
from tests.checkpoint.gguf.test_families import comparable, like_llama
from tests.checkpoint.gguf.test_model import write
from tests.checkpoints import POOLED
from tests.levels import at_levels

F32 = np.dtype(np.float32)
MEAN, CLS, LAST, RANK = 1, 2, 3, 4
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """Attributes: `fused`: by stem, the stems whose rows are stored together; `layer`: model's modules by stem."""

    arch: gguf.MODEL_ARCH
    keys: Callable[[Config], dict[str, Any]]
    pooling: int
    layer: Mapping[str, str] = field(default_factory=lambda: BERT_LAYER)
    fused: Mapping[str, tuple[str, ...]] | None = None
    instead: Mapping[str, Any] = field(default_factory=dict)  # what files mean by keys of config.json
    left_out: tuple[str, ...] = ()  # ends of tensors that no file has

    @property
    def name(self) -> str:
        return gguf.MODEL_ARCH_NAMES[self.arch]


def bert(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("norm_eps", 1e-12)),
        "attention.causal": False,
    }


def nomic_bert(config: Config) -> dict[str, Any]:
    return bert(config) | {"rope.freq_base": 1000.0}


def nomic_bert_moe(config: Config) -> dict[str, Any]:
    own = {
        "num_hidden_layers": config["n_layer"],
        "max_position_embeddings": config["n_positions"],
        "hidden_size": config["n_embd"],
        "intermediate_size": config["n_inner"],
        "num_attention_heads": config["n_head"],
        "layer_norm_eps": config["layer_norm_epsilon"],
    }
    return bert(own) | {
        "rope.freq_base": float(config["rotary_emb_base"]),
        "moe_every_n_layers": config["moe_every_n_layers"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["moe_top_k"],
    }


def modern_bert(config: Config) -> dict[str, Any]:
    return bert(config) | {
        "attention.sliding_window": config["local_attention"],
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 160_000.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.scaling.type": "none",
        "vocab_size": config["vocab_size"],
    }


def qwen3(config: Config) -> dict[str, Any]:
    return like_llama({"rms_norm_eps": 1e-6, **config, "rope_theta": 1e6})


QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
CONVERSIONS = {
    "bert": Conversion(gguf.MODEL_ARCH.BERT, bert, MEAN),
    "nomic-bert": Conversion(gguf.MODEL_ARCH.NOMIC_BERT, nomic_bert, MEAN, fused=QKV),
    "nomic-bert-moe": Conversion(
        gguf.MODEL_ARCH.NOMIC_BERT_MOE,
        nomic_bert_moe,
        MEAN,
        BERT_LAYER | EXPERT_TENSORS,
        QKV,
        {"moe_bias": False},
        ("mlp.experts.bias",),
    ),
    "modernbert": Conversion(
        gguf.MODEL_ARCH.MODERN_BERT, modern_bert, CLS, LLAMA_LAYER, {**QKV, "ffn_up": ("ffn_gate", "ffn_up")}
    ),
    "qwen3-embedding": Conversion(gguf.MODEL_ARCH.QWEN3, qwen3, LAST, LLAMA_LAYER | HEAD_NORMS),
    "qwen3-reranker": Conversion(gguf.MODEL_ARCH.QWEN3, qwen3, RANK, LLAMA_LAYER | HEAD_NORMS),
}

# Encoders that give texts labels.
CLASSIFIERS = {
    "xlm-roberta-labels": CONVERSIONS["bert"],
    "roberta-labels": CONVERSIONS["bert"],
    "bert-reranker": CONVERSIONS["bert"],
    "modernbert-labels": CONVERSIONS["modernbert"],
}

# RoBERTa, whose first rows of positions, as many as come up to the padding token, no file has.
ROBERTA = {
    "xlm-roberta": Conversion(gguf.MODEL_ARCH.BERT, bert, CLS),
    "roberta": Conversion(gguf.MODEL_ARCH.BERT, bert, MEAN),
}
CUT = 2
# Those with heads of their training.
MASKED = {
    "bert-masked": CONVERSIONS["bert"],
    "roberta-masked": ROBERTA["roberta"],
    "xlm-roberta-masked": ROBERTA["xlm-roberta"],
    "modernbert-masked": replace(
        CONVERSIONS["modernbert"], pooling=MEAN, left_out=("head.0.dense.weight", "head.0.norm.weight")
    ),
}


def without_pretraining(checkpoint: Checkpoint, conversion: Conversion) -> Checkpoint:
    """Without what follows the first token for sentence pairs of the training, and buffers, which no file has,
    nor what a converter leaves out."""
    left_out = ("pooler.dense", "embeddings.position_ids", "cls.", "lm_head.", "decoder.")
    tensors = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(left_out)}
    tensors = {n: t for n, t in tensors.items() if not n.endswith(conversion.left_out)}
    return replace(checkpoint, config={**checkpoint.config, **conversion.instead}, tensors=tensors)


def word_pieces(folder: Path) -> dict[str, Any]:
    """Keys of a tokenizer as the converter has them: words begin with ▁, and what continues them has no ##."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = [token.startswith("[") and token.endswith("]") for token in tokens]
    prefix = "tokenizer.ggml."
    return {
        f"{prefix}model": "bert",
        f"{prefix}pre": "default",
        f"{prefix}tokens": [
            token if own else token[2:] if token.startswith("##") else f"\u2581{token}"
            for token, own in zip(tokens, special, strict=True)
        ],
        f"{prefix}token_type": [3 if own else 1 for own in special],
        f"{prefix}token_type_count": 2,
        f"{prefix}bos_token_id": vocabulary["[CLS]"],
        f"{prefix}seperator_token_id": vocabulary["[SEP]"],
        f"{prefix}unknown_token_id": vocabulary["[UNK]"],
        f"{prefix}padding_token_id": vocabulary["[PAD]"],
    }


def converted(
    name: str,
    folder: Path,
    conversion: Conversion,
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    cut: int = 0,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """Args: `name`: of a golden model, or a folder's path; `cut`: rows of positions that the converter leaves out."""
    source = without_pretraining(open_checkpoint(POOLED / name), conversion)
    stems = {module: stem for stem, module in {**GLOBAL_TENSORS, **conversion.layer}.items()}
    tensors: dict[str, np.ndarray] = dict(extra or {})
    for own, tensor in source.tensors.items():
        module, _, suffix = own.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        block = "" if layer is None else f"blk.{layer[1]}."
        values = tensor.read(F32)
        stem = stems[module if layer is None else layer[2]]
        tensors[f"{block}{stem}.{suffix}"] = values[cut:] if stem == "position_embd" else values
    for whole, parts in (conversion.fused or {}).items():
        for own in [found for found in tensors if f".{parts[0]}." in found]:
            names = [own.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            rows = [tensors.pop(each) for each in names]
            tensors[own.replace(f".{parts[0]}.", f".{whole}.")] = np.concatenate(rows)
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[conversion.arch]} | {"cls.output"}
    assert {re.sub(r"^blk\.\d+", "blk.{bid}", own.rpartition(".")[0]) for own in tensors} <= known
    arch = gguf.MODEL_ARCH_NAMES[conversion.arch]
    keys = conversion.keys(source.config) | {"pooling_type": conversion.pooling}
    return write(folder / f"{Path(name).name}.gguf", arch, keys, tensors, tokenizer)


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "nomic-bert-moe", "modernbert", "qwen3-embedding"])
def test_gguf_of_a_model_of_embeddings(name: str, tmp_path: Path) -> None:
    source, found = (
        without_pretraining(open_checkpoint(POOLED / name), CONVERSIONS[name]),
        open_checkpoint(converted(name, tmp_path, CONVERSIONS[name])),
    )
    expected, got = comparable(source.model_config()), comparable(found.model_config())
    assert got == replace(expected, tie_word_embeddings=got.tie_word_embeddings)
    assert found.modules is not None and found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32), err_msg=key)


def vectors(model: Path, cache: str, prompts: list[list[int]], **settings: Any) -> list[np.ndarray]:
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        compilation_cache_dir=cache,
        compile_threads=1,
        **settings,
    )
    made = llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    llm.close()
    return [output.outputs.data for output in made]


@pytest.mark.parametrize(
    "name", ["xlm-roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roberta", *MASKED))]
)
def test_vectors(name: str, tmp_path: Path, compile_cache_dir: str) -> None:
    """RoBERTa, and models that still have the heads of their training."""
    golden = np.load(POOLED / name / "golden.npz")
    path = converted(name, tmp_path, (ROBERTA | MASKED)[name], cut=CUT if "roberta" in name else 0)
    cases = ("long", "short")
    made = vectors(path, compile_cache_dir, [golden[f"{case}/tokens"].tolist() for case in cases])
    for case, vector in zip(cases, made, strict=True):
        assert vector @ golden[f"{case}/vector"] >= 0.99999


@pytest.mark.parametrize(
    "name",
    at_levels(CLASSIFIERS, fast=("bert-reranker", "modernbert-labels"), slow=("xlm-roberta-labels", "roberta-labels")),
)
def test_scores_of_classifiers(name: str, tmp_path: Path, compile_cache_dir: str) -> None:
    """Names as in transformers; BERT's pooler is kept here, which llama.cpp's converter drops."""
    golden, conversion = np.load(POOLED / name / "golden.npz"), CLASSIFIERS[name]
    labels = list(json.loads((POOLED / name / "config.json").read_text())["id2label"].values())
    named = {"classifier.output_labels": labels} if len(labels) > 1 else {}
    conversion = replace(
        conversion,
        keys=lambda config: CLASSIFIERS[name].keys(config) | named,
        pooling=RANK,
        layer={**conversion.layer, **CLASSIFIER_HEAD},
    )
    path = converted(name, tmp_path, conversion, cut=CUT if "roberta" in name else 0)
    assert open_checkpoint(path).model_config().pooler == open_checkpoint(POOLED / name).model_config().pooler
    cases = [case for case in ("long", "short", "least", "one") if not golden[f"{case}/types"].any()]
    assert len(cases) > 1
    made = vectors(path, compile_cache_dir, [golden[f"{case}/tokens"].tolist() for case in cases])
    for case, vector in zip(cases, made, strict=True):
        np.testing.assert_allclose(vector, golden[f"{case}/vector"], atol=1e-4)


@pytest.mark.slow
def test_scores_of_qwen3_reranker(tmp_path: Path, compile_cache_dir: str) -> None:
    golden = np.load(POOLED / "qwen3-reranker" / "golden.npz")
    embedding = open_checkpoint(POOLED / "qwen3-reranker").tensors["model.embed_tokens.weight"].read(F32)
    yes_and_no = {"cls.output.weight": embedding[[9, 7]]}
    path = converted("qwen3-reranker", tmp_path, CONVERSIONS["qwen3-reranker"], extra=yes_and_no)
    overrides = {"classifier_from_token": [7, 9]}  # "no" and "yes", of which this tiny vocabulary has no texts
    (score,) = vectors(path, compile_cache_dir, [golden["long/tokens"].tolist()], hf_overrides=overrides)
    np.testing.assert_allclose(score, golden["long/vector"], atol=1e-4)


@pytest.mark.real_model
@pytest.mark.slow
def test_vectors_of_fifty_texts(minilm_path: Path, tmp_path: Path, compile_cache_dir: str) -> None:
    golden = np.load(Path(__file__).parents[2] / "engine" / "golden" / "minilm.npz")
    path = converted(str(minilm_path), tmp_path, CONVERSIONS["bert"], tokenizer=word_pieces(minilm_path))
    llm = LLM(str(path), dtype="float32", max_num_seqs=32, max_model_len=256, compilation_cache_dir=compile_cache_dir)
    params = PoolingParams(truncate_prompt_tokens=-1)
    made = llm.embed(golden["texts"].tolist(), pooling_params=params, use_tqdm=False)
    llm.close()
    cosines = (np.array([output.outputs.embedding for output in made]) * golden["vectors"]).sum(1)
    assert len(cosines) == 50 and cosines.min() >= 0.99999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling_type": 7}, "'bert.pooling_type' is 7; supported are 1, 2, 3"),
        ({"pooling_type": ["mean"]}, r"'bert.pooling_type' is \['mean'\], not a whole number"),
        ({"pooling_type": [1, 2]}, "'bert.pooling_type' differs from layer to layer"),
        ({"pooling_type": RANK}, "tensor 'cls.weight' is missing, without which a reranker's scores"),
        ({"attention.causal": True}, "'bert.attention.causal' is not false"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    conversion = replace(CONVERSIONS["bert"], keys=lambda config: bert(config) | changes)
    conversion = replace(conversion, pooling=changes.get("pooling_type", MEAN))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(converted("bert", tmp_path, conversion))
