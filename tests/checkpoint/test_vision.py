"""The tensors of encoders, by whatever names files have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.checkpoint.vision import vision_tensors, with_tokens_apart
from llmjax.errors import CheckpointError
from llmjax.models.vision.registry import vision_family
from tests.checkpoints import SEEING

F32 = np.dtype(np.float32)
NAMES = sorted(path.name for path in SEEING.iterdir())


def since_transformers_5(name: str) -> str:
    """The names that models have in memory, which some files have too."""
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.vision_model.", "model.connector.")):
        return name
    return name if name.startswith("model.") else f"model.{name}"


def before(name: str) -> str:
    """The names in most files on the Hub."""
    name = name.removeprefix("model.") if name.startswith(("model.visual.", "model.connector.")) else name
    return re.sub(
        r"^vision_tower\.(?!transformer|patch_conv|ln_pre|encoder\.layer\.)", "vision_tower.vision_model.", name
    )


@pytest.mark.parametrize("renamed", [since_transformers_5, before])
@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_give_the_same_tensors(name: str, renamed: Callable[[str], str]) -> None:
    known = open_checkpoint(SEEING / name)
    family = vision_family(known.whole_config)
    assert family is not None and known.vision is not None and len(known.vision_tensors) > 20
    stored = stored_tensors(SEEING / name)
    if name in ("internvl", "kimi-vl", "kimi-k2_5") and renamed is before:
        pytest.skip("its files have had one layout")
    changed = {renamed(key): tensor for key, tensor in stored.items()}
    assert (
        changed.keys() != stored.keys()
        or renamed is before
        or all(key.startswith(("model.", "lm_head.")) for key in stored)
    )
    apart = with_tokens_apart(changed, known.vision)
    found, others = vision_tensors(apart, known.vision, family.tensors, SEEING / name)
    assert found.keys() == known.vision_tensors.keys()
    for key, tensor in found.items():
        assert tensor.shape == known.vision_tensors[key].shape
        np.testing.assert_array_equal(tensor.read(F32), known.vision_tensors[key].read(F32))
    assert not any(re.search(r"\bvis|connector|projector", key) for key in others)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_is_read_beside_it(name: str) -> None:
    checkpoint = open_checkpoint(SEEING / name)
    model = checkpoint.model_config()
    assert checkpoint.vision is not None and (model.looks_up or model.hidden_size == checkpoint.vision.out)
    assert "model.embed_tokens.weight" in checkpoint.tensors
    assert not any("vis" in key for key in checkpoint.tensors if ".audio_embed." not in key)


def test_patches_have_both_frames_of_a_video() -> None:
    checkpoint = open_checkpoint(SEEING / "qwen2_5-vl")
    stored = stored_tensors(SEEING / "qwen2_5-vl")["visual.patch_embed.proj.weight"].read(F32)
    found = checkpoint.vision_tensors["patch_embed.weight"]
    assert found.shape == (60, 216)
    np.testing.assert_array_equal(found.read(F32).reshape(stored.shape), stored)


def test_a_checkpoint_without_its_encoder_is_a_text_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = SEEING / "qwen2_5-vl"
    kept = {key: tensor.read(F32) for key, tensor in stored_tensors(folder).items() if not key.startswith("visual.")}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.vision is None and not checkpoint.vision_tensors
    assert "its encoder of images is missing" in caplog.text


def test_one_tensor_under_two_names_is_refused() -> None:
    folder = SEEING / "qwen2_5-vl"
    known, stored = open_checkpoint(folder), stored_tensors(folder)
    family = vision_family(known.whole_config)
    assert family is not None and known.vision is not None
    twice = {**stored, "model.visual.patch_embed.proj.weight": stored["visual.patch_embed.proj.weight"]}
    with pytest.raises(CheckpointError, match=r"'patch_embed.weight' is there twice"):
        vision_tensors(twice, known.vision, family.tensors, folder)
