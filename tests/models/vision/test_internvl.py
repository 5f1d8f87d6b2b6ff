"""InternVL's checkpoints that came with code of their own are read as transformers' are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError
from llmjax.media.loading import image_processor_of
from tests.checkpoints import SEEING

F32 = np.dtype(np.float32)
FOLDER = SEEING / "internvl"
RENAMED = (
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer", ".attn.proj"),
    (r"\.lambda_", ".ls"),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)


def published(folder: Path) -> None:
    """Writes the golden checkpoint as OpenGVLab publishes its own."""
    found: dict[str, np.ndarray] = {}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in stored_tensors(FOLDER).items():
        for old, new in RENAMED:
            name = re.sub(old, new, name)
        if fused := re.match(r"(.*)\.attention\.([qkv])_proj\.(\w+)$", name):
            parts.setdefault(f"{fused[1]}.attn.qkv.{fused[3]}", {})[fused[2]] = tensor.read(F32)
        else:
            found[name] = tensor.read(F32)
    found |= {name: np.concatenate([each[part] for part in "qkv"]) for name, each in parts.items()}
    save_file(found, folder / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    vision = config["vision_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps")
    written = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": config["text_config"] | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        "vision_config": {
            **{key: vision[key] for key in kept},
            "image_size": 24,
            "patch_size": 6,
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
            "hidden_act": "gelu",
        },
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "force_image_size": 24,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
    }
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3})
    )


def test_they_are_read_as_the_others(tmp_path: Path) -> None:
    published(tmp_path)
    found, known = open_checkpoint(tmp_path), open_checkpoint(FOLDER)
    assert found.vision == known.vision
    assert found.vision_tensors.keys() == known.vision_tensors.keys()
    for name, tensor in found.vision_tensors.items():
        np.testing.assert_array_equal(tensor.read(F32), known.vision_tensors[name].read(F32))
    assert found.model_config().layers == known.model_config().layers
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    processors = [
        image_processor_of(folder, each.whole_config, ids) for folder, each in ((tmp_path, found), (FOLDER, known))
    ]
    assert processors[0] is not None and processors[1] is not None
    assert processors[0].row_token_id == processors[1].row_token_id == 261
    assert processors[0].preparation.layout == processors[1].preparation.layout
    assert processors[0].preparation.mean == processors[1].preparation.mean
    assert processors[0].ids == processors[1].ids


def test_a_tokenizer_without_the_token_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    config = open_checkpoint(tmp_path).whole_config
    with pytest.raises(CheckpointError, match="no token '<IMG_CONTEXT>'"):
        image_processor_of(tmp_path, config, lambda text: list(text.encode()))
