"""Encoders whose code came with them, under the names and keys of that code: the same models as Hugging Face's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from tests.checkpoints import POOLED

F32 = np.dtype(np.float32)

NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 48,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 3,
    "n_positions": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 96,
}
NOMIC_NAMES = {
    r"^embeddings\.LayerNorm\.": "emb_ln.",
    r"^layers\.": "encoder.layers.",
    r"\.self_attn\.o_proj\.": ".attn.out_proj.",
    r"\.self_attn\.qkv\.": ".attn.Wqkv.",
    r"\.post_attention_layernorm\.": ".norm1.",
    r"\.post_mlp_layernorm\.": ".norm2.",
    r"\.up_proj\.": ".fc11.",
    r"\.gate_proj\.": ".fc12.",
    r"\.down_proj\.": ".fc2.",
}
JINA_NAMES = {
    r"^roberta\.embeddings\.LayerNorm\.": "roberta.emb_ln.",
    r"\.attention\.output\.dense\.": ".mixer.out_proj.",
    r"\.attention\.self\.qkv\.": ".mixer.Wqkv.",
    r"\.attention\.output\.LayerNorm\.": ".norm1.",
    r"(layer\.\d+)\.output\.LayerNorm\.": r"\1.norm2.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"(layer\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    r"\.encoder\.layer\.": ".encoder.layers.",
}


def write(
    name: str, folder: Path, *, config: Mapping[str, Any], qkv: tuple[str, ...], names: Mapping[str, str]
) -> Path:
    """A golden model under other names, with queries, keys and values in one matrix."""
    tensors = load_file(POOLED / name / "model.safetensors")
    for first in [key for key in tensors if f".{qkv[0]}." in key]:
        parts = [tensors.pop(first.replace(qkv[0], part)) for part in qkv]
        tensors[first.replace(qkv[0], "qkv")] = np.concatenate(parts)
    renamed = {}
    for key, tensor in tensors.items():
        for pattern, replacement in names.items():
            key = re.sub(pattern, replacement, key)
        renamed[key] = tensor
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(name: str, folder: Path) -> None:
    expected, found = open_checkpoint(POOLED / name), open_checkpoint(folder)
    models = [replace(one.model_config(), dtype=None, pooler=None) for one in (expected, found)]
    assert models[0] == models[1]
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32), err_msg=key)


def test_nomic_bert(tmp_path: Path) -> None:
    qkv = ("q_proj", "k_proj", "v_proj")
    folder = write("nomic-bert", tmp_path / "nomic", config=NOMIC, qkv=qkv, names=NOMIC_NAMES)
    same("nomic-bert", folder)


def test_texts_longer_than_what_nomic_bert_was_trained_on_need_its_scaling(tmp_path: Path) -> None:
    config = {**NOMIC, "rotary_scaling_factor": 2}
    folder = write("nomic-bert", tmp_path / "nomic", config=config, qkv=("q_proj", "k_proj", "v_proj"), names={})
    assert open_checkpoint(folder).model_config().max_position == 48


@pytest.mark.parametrize("key", ["causal", "prenorm", "rotary_emb_interleaved", "use_rms_norm"])
def test_what_nomic_bert_s_code_could_do_besides_is_refused(tmp_path: Path, key: str) -> None:
    config = {**NOMIC, key: True}
    folder = write("nomic-bert", tmp_path / "nomic", config=config, qkv=("q_proj", "k_proj", "v_proj"), names={})
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(folder).model_config()


def test_jina_reranker(tmp_path: Path) -> None:
    config = json.loads((POOLED / "xlm-roberta-labels" / "config.json").read_text())
    folder = write(
        "xlm-roberta-labels", tmp_path / "jina", config=config, qkv=("query", "key", "value"), names=JINA_NAMES
    )
    same("xlm-roberta-labels", folder)
