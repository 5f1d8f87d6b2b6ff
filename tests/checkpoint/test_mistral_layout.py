"""Mistral's own layout: the same model as in Hugging Face's, whose rows of queries and keys stand otherwise."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.mistral_layout import NAMES, VISION_NAMES, config_in, is_native, processor_in
from llmjax.checkpoint.resolve import resolve
from llmjax.errors import CheckpointError
from llmjax.media.loading import source_in
from llmjax.models.vision.registry import preparation_of
from llmjax.tokenizer.tekken import tokenizer_from_tekken
from tests.checkpoints import GOLDEN, SEEING
from tests.engine.test_images import check, engine_of, prompt_of, scored

F32 = np.dtype(np.float32)
FOLDERS = {
    "pixtral": SEEING / "pixtral",
    "mistral3": SEEING / "mistral3",
    "mistral": GOLDEN / "mistral",
    "ministral3": GOLDEN / "ministral3",
}
SEES = ("pixtral", "mistral3")
# Mistral's encoders have this function, of which the golden Pixtral has another.
CHANGED = {"pixtral": {"hidden_act": "silu"}}


def in_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads as they are before transformers' converters put them in halves."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def params_of(config: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {"rope_theta": text.get("rope_theta")}
    found: dict[str, Any] = {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text.get("head_dim"),
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "norm_eps": text.get("rms_norm_eps", 1e-5 if text["model_type"] == "ministral3" else 1e-6),
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "sliding_window": None if text.get("sliding_window") is None else str(text["sliding_window"]),
        "tied_embeddings": text.get("tie_word_embeddings", False),
    }
    if "llama_4_scaling_beta" in rope:
        length = rope["original_max_position_embeddings"]
        found["yarn"] = {
            "factor": rope["factor"],
            "alpha": rope["beta_slow"],
            "beta": rope["beta_fast"],
            "original_max_position_embeddings": length,
            "apply_scale": False,
        }
        found["llama_4_scaling"] = {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": length}
    if "vision_config" in config:
        vision, keys = config["vision_config"], ("hidden_size", "num_channels", "patch_size", "intermediate_size")
        found["vision_encoder"] = {
            **{key: vision[key] for key in (*keys, "num_hidden_layers", "num_attention_heads", "image_size")},
            "rope_theta": vision["rope_parameters"]["rope_theta"],
            "max_image_size": files["size"]["longest_edge"],
            "adapter_bias": config["multimodal_projector_bias"],
            "image_token_id": config["image_token_index"],
        }
        if (side := config.get("spatial_merge_size", 1)) > 1:
            merging = {"mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
            found["vision_encoder"] |= {"spatial_merge_size": side, **merging}
    return found


def native(name: str, target: Path) -> Path:
    """A golden checkpoint in Mistral's own layout."""
    folder, target = FOLDERS[name], target / name
    others = ("*config.json", "*.safetensors*", "*.npz", "*.jinja")
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*others))
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    files = json.loads((folder / "preprocessor_config.json").read_text()) if name in SEES else {}
    (target / "params.json").write_text(json.dumps(params_of(config, files)))
    own = {after: before for before, after in {**NAMES, **VISION_NAMES}.items()}
    written = {}
    for stored, tensor in tensors.items():
        module, _, kind = stored.removeprefix("language_model.").rpartition(".")
        parts = module.split(".")
        new = own[".".join("*" if part.isdigit() else part for part in parts)]
        for number in filter(str.isdigit, parts):
            new = new.replace("*", number, 1)
        if new.endswith((".attention.wq", ".attention.wk")):
            part = config["vision_config"] if new.startswith("vision") else config.get("text_config", config)
            heads = part["num_attention_heads"]
            tensor = in_pairs(tensor, part.get("num_key_value_heads", heads) if new.endswith("k") else heads)
        written[f"{new}.{kind}"] = np.ascontiguousarray(tensor)
    save_file(written, target / "consolidated.safetensors")
    return target


@pytest.mark.parametrize("name", FOLDERS)
def test_both_layouts_are_one_model(name: str, tmp_path: Path) -> None:
    folder = native(name, tmp_path)
    assert is_native(folder) and not is_native(FOLDERS[name]) and resolve(folder) == folder
    known = tmp_path / "converted"
    shutil.copytree(FOLDERS[name], known)
    config = json.loads((known / "config.json").read_text())
    config |= {"vision_config": {**config["vision_config"], **CHANGED.get(name, {})}} if name in SEES else {}
    (known / "config.json").write_text(json.dumps(config))
    found, expected = open_checkpoint(folder), open_checkpoint(known)
    model, other = found.model_config(), expected.model_config()
    assert model.layers == other.layers and model.norm == other.norm
    assert (model.tie_word_embeddings, model.max_position) == (other.tie_word_embeddings, other.max_position)
    assert found.vision == expected.vision and (found.vision is not None) == (name in SEES)
    for ours, theirs in ((found.tensors, expected.tensors), (found.vision_tensors, expected.vision_tensors)):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert tensor.shape == theirs[key].shape
            np.testing.assert_array_equal(tensor.read(F32), theirs[key].read(F32))
    if name in SEES:
        files = json.loads((known / "preprocessor_config.json").read_text())
        assert preparation_of(config_in(folder), processor_in(folder)) == preparation_of(config, files)


@pytest.mark.slow
@pytest.mark.jax_api
def test_logits_are_those_of_the_converted_checkpoint(compile_cache_dir: str, tmp_path: Path) -> None:
    llm = engine_of("mistral3", compile_cache_dir, folder=native("mistral3", tmp_path))
    for case in ("none", "one", "two"):
        params = scored(max_tokens=2, prompt_logprobs=-1)
        (output,) = llm.generate([prompt_of("mistral3", case)], params, use_tqdm=False)
        check("mistral3", case, output, prompt=True)
    llm.close()


def test_tokens_of_pictures_are_those_of_tekken(tmp_path: Path) -> None:
    """A file of Pixtral's time names no special tokens."""
    folder = native("mistral3", tmp_path)
    params = json.loads((folder / "params.json").read_text())
    params["vision_encoder"].pop("image_token_id")
    (folder / "params.json").write_text(json.dumps(params))
    letters = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    config = {"pattern": ".", "default_vocab_size": 276, "default_num_special_tokens": 20, "version": "v3"}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": letters}))
    tokenizer = tokenizer_from_tekken(folder / "tekken.json")
    source = source_in(folder, config_in(folder), lambda text: tokenizer.encode(text, add_special_tokens=False))
    processor = source.processor()
    assert processor is not None
    assert (processor.placeholder, processor.row_token_id) == ((10,), 10)
    assert {text: found for text, found in processor.ids.items() if text} == {"[IMG_BREAK]": (12,), "[IMG_END]": (13,)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda keys: keys.pop("dim"), "params.json: dim is missing"),
        (lambda keys: keys.update(moe={"num_experts": 8}), "params.json: moe = .* is not supported"),
        (lambda keys: keys.update(quantization={"qformat_weight": "fp8_e4m3"}), "params.json: quantization = "),
        (lambda keys: keys.update(sliding_window=[4, None]), "params.json: sliding_window is"),
        (lambda keys: keys.update(yarn={"factor": 4}), "params.json: yarn must have"),
        (lambda keys: keys.update(vision_encoder=3), "params.json: vision_encoder must be an object"),
        (lambda keys: keys["vision_encoder"].update(new=1), "params.json: vision_encoder.new = 1 is not supported"),
        (
            lambda keys: keys["vision_encoder"].update(mm_projector_id="conv"),
            "mm_projector_id is 'conv'",
        ),
        (lambda keys: keys["vision_encoder"].update(spatial_merge_size=1), "mm_projector_id does not go with"),
        (lambda keys: keys.update(n_kv_heads=5), "rows, .* not 5 heads of pairs"),
    ],
)
def test_what_is_not_understood_is_named(change: Callable[[dict[str, Any]], Any], problem: str, tmp_path: Path) -> None:
    folder = native("mistral3", tmp_path)
    params = json.loads((folder / "params.json").read_text())
    change(params)
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(folder)


def test_a_tensor_that_is_not_known_is_named(tmp_path: Path) -> None:
    folder = native("mistral", tmp_path)
    tensors = load_file(folder / "consolidated.safetensors")
    save_file({**tensors, "layers.0.gate.weight": np.zeros(2, np.float32)}, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\.gate\.weight' is none of those"):
        open_checkpoint(folder)
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither consolidated\.safetensors nor "):
        open_checkpoint(folder)
