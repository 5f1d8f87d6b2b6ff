"""Encoders in files of their own: written as llama.cpp's converter writes them, and read as the originals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.checkpoint.gguf import mmproj
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.vision import vision_tensors
from llmjax.errors import CheckpointError
from llmjax.models.vision.registry import preparation_of, vision_family
from tests.checkpoints import SEEING

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Conversion:
    """What llama.cpp's converter makes of a golden checkpoint.

    Attributes:
        projector: the name of the encoder's kind.
        names: the file's names of the encoder's tensors, by prefixes, where they are not as in most files.
        keys: keys beside those of all files.
        token: where feature rows stand, and its id.
        exchanged: whether the matrices of feed-forward parts have each other's names, as in older files.
        changed: what is done to tensors of the encoder, by the ends of their names.
        lost: keys of preprocessor_config.json that no key of the file is for, with what they are taken for.
    """

    projector: str
    names: Mapping[str, str]
    keys: Mapping[str, Any]
    token: tuple[str, int]
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    exchanged: bool = False
    lost: Mapping[str, Any] = field(default_factory=dict)


def interleaved(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """A head's halves take turns, as the converter's ``permute`` has them."""
    return lambda x: x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def axes_apart(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Pairs of one axis before those of the other, as Kimi K2.5's converter puts them."""
    return lambda x: x.reshape(heads, -1, 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


USUAL = {
    "patch_embed": "v.patch_embd",
    "positions": "v.position_embd.weight",
    "class_embed": "v.class_embd",
    "norm_before": "v.pre_ln",
    "norm_after": "v.post_ln",
    "norm_patches": "v.norm_embd",
}
LAYER = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "after1": "attn_post_norm",
    "after2": "ffn_post_norm",
    "scale1": "ls1.weight",
    "scale2": "ls2.weight",
}
QWEN = {"projector.step0": "v.post_ln", "projector.step2": "mm.0", "projector.step3": "mm.2"}
LLAVA = {"projector.step0": "mm.0", "projector.step1": "mm.2"}
QWEN_TOKEN = ("<|image_pad|>", 261)
V = "clip.vision."
CONVERSIONS = {
    "qwen2-vl": Conversion(
        "qwen2vl_merger", QWEN, {f"{V}image_min_pixels": 576, f"{V}image_max_pixels": 7000}, QWEN_TOKEN
    ),
    "qwen2_5-vl": Conversion(
        "qwen2.5vl_merger",
        QWEN,
        {
            f"{V}n_wa_pattern": 2,
            f"{V}window_size": 24,
            "clip.use_silu": True,
            f"{V}image_min_pixels": 576,
            f"{V}image_max_pixels": 7000,
        },
        QWEN_TOKEN,
    ),
    "qwen3-vl": Conversion(
        "qwen3vl_merger",
        {
            **QWEN,
            **{
                f"taps.{k}.step{n}": f"v.deepstack.{2 * k}.{part}"
                for k in (0, 1)
                for n, part in enumerate(("norm", "fc1", "fc2"), 1)
            },
        },
        {
            f"{V}is_deepstack_layers": [True, False, True, False],
            "clip.use_gelu": True,
            f"{V}image_min_pixels": 576,
            f"{V}image_max_pixels": 7000,
        },
        QWEN_TOKEN,
    ),
    "gemma3": Conversion(
        "gemma3",
        {"projector.step1": "mm.soft_emb_norm", "projector.step2": "mm.input_projection"},
        {f"{V}projector.scale_factor": 2, "clip.use_gelu": True},
        ("<image_soft_token>", 261),
        {"step1.weight": lambda x: x + 1, "step2.weight": np.transpose},
    ),
    "idefics3": Conversion(
        "idefics3",
        {"projector.step1": "mm.model.fc"},
        {f"{V}projector.scale_factor": 2, f"{V}preproc_image_size": 60, "clip.use_gelu": True},
        ("<image>", 259),
    ),
    "internvl": Conversion(
        "internvl",
        {"projector.step1": "mm.model.mlp.0", "projector.step2": "mm.model.mlp.1", "projector.step3": "mm.model.mlp.3"},
        {f"{V}projector.scale_factor": 2, f"{V}preproc_max_tiles": 6, "clip.use_gelu": True},
        ("<IMG_CONTEXT>", 261),
    ),
    "pixtral": Conversion(
        "pixtral",
        {"projector.step0": "mm.1", "projector.step1": "mm.2"},
        {"clip.use_gelu": True},
        ("[IMG]", 259),
        {"q_proj.weight": interleaved(5), "k_proj.weight": interleaved(5)},
    ),
    "llava": Conversion("mlp", LLAVA, {}, ("<image>", 259)),
    "llava-next": Conversion(
        "mlp",
        {**LLAVA, "learned.0": "model.image_newline"},
        {f"{V}image_grid_pinpoints": [18, 36, 36, 18, 36, 36, 54, 18, 18, 54]},
        ("<image>", 259),
        exchanged=True,
    ),
    "minicpmv": Conversion(
        "resampler",
        {
            "resampler.query": "resampler.query",
            "resampler.kv_proj": "resampler.kv",
            "resampler.proj": "resampler.proj",
            **{f"resampler.{part}_proj": f"resampler.attn.{part}" for part in "qkv"},
            "resampler.o_proj": "resampler.attn.out",
            **{f"resampler.ln_{part}": f"resampler.ln_{part}" for part in ("q", "kv", "post")},
        },
        {"clip.minicpmv_version": 3, f"{V}preproc_max_tiles": 4, "clip.use_gelu": True},
        ("<unk>", 259),
        exchanged=True,
    ),
    "mistral3": Conversion(
        "pixtral",
        {
            "projector.step0": "mm.input_norm",
            "projector.step2": "mm.patch_merger",
            "projector.step3": "mm.1",
            "projector.step4": "mm.2",
        },
        {"clip.use_silu": True, f"{V}spatial_merge_size": 2},
        ("[IMG]", 259),
        {"q_proj.weight": interleaved(5), "k_proj.weight": interleaved(5)},
    ),
    **{
        name: Conversion(
            "glm4v",
            {
                "projector.step1": "mm.patch_merger",
                "projector.step2": "mm.model.fc",
                "projector.step3": "mm.post_norm",
                **{f"projector.step4.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
            },
            {"clip.use_silu": True, f"{V}image_min_pixels": 1152, f"{V}image_max_pixels": 14001},
            ("<|image|>", 263),
            {"projector.step1.weight": lambda x: x.reshape(len(x), -1, 2, 2)},
        )
        for name in ("glm4v", "glm4v-moe")
    },
    **{
        name: Conversion(
            "gemma4v",
            {
                "projector.step1.bias": "v.std_bias",
                "projector.step1.scale": "v.std_scale",
                "projector.step3": "mm.input_projection",
            },
            {f"{V}image_max_pixels": 9 * 18**2},
            ("<|image|>", 261),
            {"positions": lambda x: x.reshape(2, -1, x.shape[-1])},
        )
        for name in ("gemma4", "gemma4-layered")
    },
    "llama4": Conversion(
        "llama4",
        {"projector.step1": "mm.model.mlp.1", "projector.step2": "mm.model.mlp.2", "projector.step3": "mm.model.fc"},
        {"clip.use_gelu": True, f"{V}projector.scale_factor": 2, f"{V}preproc_max_tiles": 6},
        ("<|patch|>", 262),
        {"positions": lambda x: np.roll(x, -1, axis=0)},
    ),
    "kimi-vl": Conversion(
        "kimivl",
        {"projector.step0": "mm.input_norm", "projector.step2": "mm.1", "projector.step3": "mm.2"},
        {
            f"{V}image_size": 30,
            f"{V}projector.scale_factor": 2,
            "clip.use_gelu": True,
            f"{V}image_max_pixels": 50 * 6**2,
        },
        ("<|media_pad|>", 261),
    ),
    "kimi-k2_5": Conversion(
        "kimik25",
        {"projector.step0": "mm.input_norm", "projector.step2": "mm.1", "projector.step3": "mm.2"},
        {f"{V}projector.scale_factor": 2, "clip.use_gelu": True, f"{V}image_max_pixels": 50 * 6**2},
        ("<|media_pad|>", 261),
        {
            **{f"attn.{part}_proj.{kind}": axes_apart(5) for part in "qk" for kind in ("weight", "bias")},
            "positions": lambda x: x.reshape(5, -1, x.shape[-1]),
        },
        lost={"size": {"max_height": 512, "max_width": 512}},
    ),
    "janus": Conversion(
        "janus_pro",
        {"projector.step0": "mm.0", "projector.step1": "mm.1"},
        {"clip.use_gelu": True},
        ("<image_placeholder>", 261),
        lost={"min_size": 14},
    ),
}


def file_name(name: str, names: Mapping[str, str]) -> str:
    """The name in the file of a tensor of the encoder."""
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        stem = next(own for own in LAYER if rest.startswith(own))
        return f"v.blk.{number}.{LAYER[stem]}{rest.removeprefix(stem)}"
    known = {**USUAL, **names}
    stem = next(own for own in known if name == own or name.startswith(own + "."))
    return known[stem] + name.removeprefix(stem)


def written(name: str, path: Path) -> Checkpoint:
    """Writes a golden checkpoint's encoder."""
    checkpoint, conversion = open_checkpoint(SEEING / name), CONVERSIONS[name]
    vision = checkpoint.whole_config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", conversion.projector)
    writer.add_bool("clip.has_vision_encoder", True)
    processor = preparation_of(checkpoint.whole_config, processor_config(name))
    assert processor is not None and checkpoint.vision is not None
    size = checkpoint.whole_config.get("image_size", vision.get("image_size"))
    sizes = {
        "embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "feed_forward_length": vision.get("intermediate_size", checkpoint.vision.layers[0].feed_forward.inner),
        "block_count": len(checkpoint.vision.layers),
        "attention.head_count": 5,
        "patch_size": 6,
        "image_size": size if isinstance(size, int) else 24,
    }
    for key, value in sizes.items():
        if V + key not in conversion.keys:
            writer.add_uint32(V + key, value)
    writer.add_float32(f"{V}attention.layer_norm_epsilon", checkpoint.vision.layers[0].norm.eps)
    writer.add_array(f"{V}image_mean", list(processor.mean))
    writer.add_array(f"{V}image_std", list(processor.std))
    for key, value in conversion.keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for own, tensor in checkpoint.vision_tensors.items():
        values = tensor.read(F32)
        for end, change in conversion.changed.items():
            values = change(values) if own.endswith(end) else values
        if own == "patch_embed.weight":
            values = values.reshape(len(values), 3, -1, 6, 6)
            if values.shape[2] == 2:
                writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1]))
            values = values[:, :, 0]
        called = file_name(own, conversion.names)
        if conversion.exchanged and ".ffn_" in called:
            called = called.replace("ffn_up", "ffn_?").replace("ffn_down", "ffn_up").replace("ffn_?", "ffn_down")
        writer.add_tensor(called, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return checkpoint


def processor_config(name: str) -> dict[str, Any]:
    return dict(json.loads((SEEING / name / "preprocessor_config.json").read_text()))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_files_are_read_as_the_original(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj-f32.gguf"
    original = written(name, path)
    file, projector = mmproj.opened(path)
    token, number = CONVERSIONS[name].token
    whole, processor = mmproj.whole_config(
        file, projector, text={**original.config}, token_id=lambda text: number if text == token else None
    )
    family = vision_family(whole)
    assert family is not None and original.vision is not None
    spec = family.encoder(family.sight(whole))
    assert spec == original.vision
    found, others = vision_tensors(*_arguments(file, projector, spec, path))
    assert not others and found.keys() == original.vision_tensors.keys()
    for key, tensor in found.items():
        np.testing.assert_allclose(tensor.read(F32), original.vision_tensors[key].read(F32), atol=1e-6)
    made, expected = (
        preparation_of(whole, processor),
        preparation_of(original.whole_config, {**processor_config(name), **CONVERSIONS[name].lost}),
    )
    assert made is not None and expected is not None
    np.testing.assert_allclose(made.mean + made.std, expected.mean + expected.std, rtol=1e-7)
    assert (made.layout, made.text, made.row_token, made.side) == (
        expected.layout,
        expected.text,
        expected.row_token,
        expected.side,
    )


def _arguments(file: Any, projector: mmproj.Projector, spec: Any, path: Path) -> tuple[Any, ...]:
    tensors, names = mmproj.tensors(file, projector)
    return tensors, spec, names, path


def test_queries_keys_and_values_may_be_in_one(tmp_path: Path) -> None:
    """Kimi K2.5's converter moves rows of queries and keys alone."""
    projector, whole = mmproj.PROJECTOR_TYPES["kimik25"], np.arange(60, dtype=np.float32)
    stored = np.concatenate([*(axes_apart(5)(part) for part in np.split(whole, 3)[:2]), whole[40:]])
    files = []
    for name, values in (("attn_qkv", stored), ("attn_q", whole[:18])):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "clip")
        for key in ("embedding_length", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"{V}{key}", 5)
        writer.add_tensor(f"v.blk.0.{name}.bias", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(GGUFFile.open(tmp_path / f"{name}.gguf"))
    found, _ = mmproj.tensors(files[0], projector)
    np.testing.assert_array_equal(found["v.blk.0.attn_qkv.bias"].read(F32), whole)
    with pytest.raises(CheckpointError, match="has 18 rows, not 5 heads of pairs of two axes"):
        mmproj.tensors(files[1], projector)


def test_the_file_beside_a_model_is_found_if_there_is_one(tmp_path: Path) -> None:
    model = tmp_path / "model-Q4_K_M.gguf"
    assert mmproj.beside(model) is None
    for name in ("mmproj-model-f16.gguf", "model-mmproj-q8.gguf"):
        (tmp_path / name).touch()
    assert mmproj.beside(model) is None
    (tmp_path / "model-mmproj-q8.gguf").unlink()
    assert mmproj.beside(model) == tmp_path / "mmproj-model-f16.gguf"


def test_other_files_and_kinds_are_refused(tmp_path: Path) -> None:
    for architecture, kind, words in (("llama", "gemma3", "is not an encoder"), ("clip", "ldp", "'ldp' is not supp")):
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_string("clip.projector_type", kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=words):
            mmproj.opened(path)


def test_a_text_model_without_the_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    written("gemma3", path)
    with pytest.raises(CheckpointError, match="has no token '<image_soft_token>'"):
        mmproj.whole_config(*mmproj.opened(path), text={"hidden_size": 56}, token_id=lambda text: None)


def test_the_encoder_of_a_text_model_is_read_with_its_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    original = written("idefics3", path)
    tokens = [f"<{number}>" for number in range(259)]
    model = GGUFFile(tmp_path / "model.gguf", 3, {"tokenizer.ggml.tokens": [*tokens, "<image>"]}, {})
    found = mmproj.encoder_of(model, original.config)
    assert found is not None and found.whole["image_token_id"] == 259
    assert found.processor["max_image_size"] == {"longest_edge": 24}
    assert len(found.tensors) == len(original.vision_tensors)


def test_an_encoder_beside_that_does_not_fit_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mmproj.gguf"
    original = written("idefics3", path)
    model = GGUFFile(tmp_path / "model.gguf", 3, {"tokenizer.ggml.tokens": ["a"]}, {})
    assert mmproj.encoder_of(model, original.config) is None
    assert "the text model alone is read; " in caplog.text and "has no token '<image>'" in caplog.text
    with pytest.raises(CheckpointError, match="has no token '<image>'"):
        mmproj.encoder_of(model, original.config, path)
