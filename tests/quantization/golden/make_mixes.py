"""Writes mixes.json: the types that llama.cpp gives to the tensors of models of several shapes.

Usage: python make_mixes.py, with llama-cpp-python installed (made with 0.3.36).
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer

HEAD = 32
FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13,
    "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "tq1_0": 36,
    "tq2_0": 37,
}  # fmt: skip
BASE = {"hidden": 256, "ff": 256, "experts": 0, "tied": False}
MODELS: dict[str, dict[str, Any]] = {
    "two-share": BASE | {"layers": 20, "heads": 8, "kv_heads": 4},
    "four-share-tied": BASE | {"layers": 33, "heads": 8, "kv_heads": 2, "tied": True},
    "eight-experts": BASE | {"layers": 9, "heads": 8, "kv_heads": 2, "experts": 8},
    "four-experts": BASE | {"layers": 16, "heads": 8, "kv_heads": 8, "experts": 4},
    "odd-rows-tied": BASE | {"layers": 9, "heads": 9, "kv_heads": 3, "tied": True, "hidden": 96},
    "eighty-layers": BASE | {"layers": 80, "heads": 8, "kv_heads": 1},
}


def tensors(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ff, experts = model["hidden"], model["ff"], model["experts"]
    queries, keys = model["heads"] * HEAD, model["kv_heads"] * HEAD
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_norm": (hidden,),
    }  # fmt: skip
    if experts:
        layer |= {
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, ff, hidden),
            "ffn_up_exps": (experts, ff, hidden),
            "ffn_down_exps": (experts, hidden, ff),
        }
    else:
        layer |= {"ffn_gate": (ff, hidden), "ffn_up": (ff, hidden), "ffn_down": (hidden, ff)}
    found = {"token_embd.weight": (32, hidden), "output_norm.weight": (hidden,)}
    found |= {} if model["tied"] else {"output.weight": (32, hidden)}
    return found | {f"blk.{i}.{stem}.weight": shape for i in range(model["layers"]) for stem, shape in layer.items()}


def write(path: Path, model: dict[str, Any]) -> None:
    keys = {
        "block_count": model["layers"], "context_length": 64, "embedding_length": model["hidden"],
        "feed_forward_length": model["ff"], "attention.head_count": model["heads"],
        "attention.head_count_kv": model["kv_heads"], "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD, "attention.key_length": HEAD, "attention.value_length": HEAD, "vocab_size": 32,
    }  # fmt: skip
    if model["experts"]:
        keys |= {"expert_count": model["experts"], "expert_used_count": 2}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()}
    infos = [TensorInfo(name, shape, "F32") for name, shape in tensors(model).items()]
    rng = np.random.default_rng(0)
    with open_gguf_writer(path, metadata, infos) as writer:
        for info in infos:
            writer.write(info.name, [rng.standard_normal(info.shape).astype(np.float32)])


def types(source: Path, target: Path, file_type: int) -> dict[str, list[str]]:
    """Types by stem: of every layer in order, or the one that all share."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = file_type, 2
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp refuses {source}")
    stored = GGUFFile.open(target).tensors
    found: dict[str, list[str]] = {}
    for name in sorted(stored, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        stem = name.split(".")[-2]
        if len(stored[name].shape) > 1:
            found.setdefault(stem, []).append(stored[name].type_name.lower())
    return {stem: one if len(set(one)) > 1 else one[:1] for stem, one in found.items()}


if __name__ == "__main__":
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.gguf", Path(folder) / "target.gguf"
        for name, model in MODELS.items():
            write(source, model)
            by_mix = {mix: types(source, target, number) for mix, number in FILE_TYPES.items()}
            golden[name] = {"model": model, "types": by_mix}
    lines = json.dumps(golden, separators=(",", ":")).replace('},"', '},\n"')
    Path(__file__).with_name("mixes.json").write_text(lines + "\n")
