"""Tiny adapters of random numbers for checkpoints that tests write or unpack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_adapter(
    folder: Path, model: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, hidden: int | None = None, **config: Any
) -> Path:
    """Writes a PEFT folder for the queries and the outputs of attention of a Llama; returns it.

    Args:
        model: the model's folder.
        seed: another one makes another adapter.
        hidden: another hidden size than the model's.
        config: further keys of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = json.loads((model / "config.json").read_text())
    width, layers = hidden or sizes["hidden_size"], sizes["num_hidden_layers"]
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(layers):
        for name in ("q_proj", "o_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = rng.standard_normal((rank, width)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = rng.standard_normal((width, rank)).astype(np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    targets = {"target_modules": ["q_proj", "o_proj"], "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM"}
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
