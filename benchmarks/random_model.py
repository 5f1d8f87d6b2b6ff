"""Models of a given shape with random weights, as Hugging Face folders: for speed, where no real model is at hand."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 1 << 20  # random weights that every tensor repeats: each still has memory of its own


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama with tied embeddings; names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def share_of_experts(self) -> float:
        """The fraction of the experts that a token goes through."""
        return 1.0

    @property
    def active_numbers(self) -> int:
        """Numbers of the matrices that a token is multiplied with; the embedding is tied, so it is one of them."""
        sizes = {name: int(np.prod(shape)) for name, shape in self.tensors().items()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        return int(sum(sizes.values()) - experts + self.share_of_experts * experts)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors under Hugging Face's names."""
        d = self.hidden_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            **self.feed_forward(),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        layers = {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        return {"model.embed_tokens.weight": (self.vocab_size, d), **layers, "model.norm.weight": (d,)}

    def feed_forward(self) -> dict[str, tuple[int, ...]]:
        """The part of a layer's tensors that differs."""
        d, f = self.hidden_size, self.intermediate_size
        return {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}

    def config(self) -> dict[str, Any]:
        """Keys of config.json that name the architecture."""
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@dataclass(frozen=True, kw_only=True)
class MoEShape(Shape):
    """The sizes of a Qwen 3 with experts; ``intermediate_size`` is that of an expert."""

    experts: int
    experts_per_token: int
    size_of_head: int

    @property
    def head_dim(self) -> int:
        return self.size_of_head

    @property
    def share_of_experts(self) -> float:
        return self.experts_per_token / self.experts

    def feed_forward(self) -> dict[str, tuple[int, ...]]:
        e, d, f = self.experts, self.hidden_size, self.intermediate_size
        h = self.head_dim
        return {
            "mlp.gate": (e, d),
            "mlp.experts.gate_proj": (e, f, d),
            "mlp.experts.up_proj": (e, f, d),
            "mlp.experts.down_proj": (e, d, f),
            "self_attn.q_norm": (h,),
            "self_attn.k_norm": (h,),
        }

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
        }


# The sizes of SmolLM2-135M and -360M, Qwen2.5-0.5B and -1.5B and Llama-3.2-3B, all in the Llama architecture.
SHAPES = {
    "least": Shape(64, 64, 1, 1, 1, 512),
    "tiny": Shape(64, 128, 2, 4, 2, 512),
    "tiny-moe": MoEShape(64, 32, 2, 4, 2, 512, experts=8, experts_per_token=2, size_of_head=16),
    "0.2b-moe": MoEShape(1024, 512, 4, 16, 4, 32000, experts=32, experts_per_token=4, size_of_head=64),
    "135m": Shape(576, 1536, 30, 9, 3, 49152),
    "360m": Shape(960, 2560, 32, 15, 5, 49152),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
}


def write_random_model(folder: Path, shape: Shape, *, max_position_embeddings: int) -> None:
    """Writes config.json and model.safetensors with bfloat16 weights; nothing if they are there already."""
    write_config(folder, shape, max_position_embeddings=max_position_embeddings)
    weights = folder / "model.safetensors"
    if not weights.exists():
        part = weights.with_suffix(".part")
        _write_weights(part, shape.tensors(), scale=shape.hidden_size**-0.5)
        part.rename(weights)


def write_config(folder: Path, shape: Shape, *, max_position_embeddings: int) -> None:
    """Writes config.json alone, which is what ``--load-format dummy`` needs."""
    config = {
        **shape.config(),
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocab_size,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_weights(path: Path, tensors: dict[str, tuple[int, ...]], *, scale: float) -> None:
    """Normal weights; those of norms are 1. Experts are many, so they are stored in 8 bits: a model reads
    them as whatever it runs in."""
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * scale
    ones = _bfloat16(np.ones(BLOCK, np.float32))
    blocks = {"BF16": _bfloat16(block), "F8_E4M3": block.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        dtype = "F8_E4M3" if ".experts." in name else "BF16"
        size = blocks[dtype].itemsize * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(start + end)
    data = np.memmap(path, np.uint8, "r+", offset=start, shape=(end,))

    def fill(name: str) -> None:
        begin, stop = header[name]["data_offsets"]
        values = (ones if len(tensors[name]) == 1 else blocks[header[name]["dtype"]]).view(np.uint8)
        for at in range(begin, stop, values.size):
            part = data[at : min(at + values.size, stop)]
            part[:] = values[: part.size]

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, tensors))
    data.flush()


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)
