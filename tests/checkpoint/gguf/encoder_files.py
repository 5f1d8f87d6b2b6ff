"""The encoders of golden checkpoints in files of their own, as llama.cpp's converter writes them.

The keys are the converter's, see ``golden/make_mtmd.py``; the tensors are made of the checkpoints' by what it does to
each kind of encoder. That the files have the names, shapes and numbers of the converter's is a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llmjax.checkpoint import open_checkpoint
from llmjax.models.vision.preparation import Preparation
from llmjax.models.vision.registry import preparation_of, vision_family
from llmjax.models.vision.spec import VisionSpec
from tests.checkpoint.gguf.golden.mtmd_cases import CASES, HERE
from tests.checkpoints import SEEING

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Conversion:
    """What llama.cpp's converter makes of a golden checkpoint's tensors.

    Attributes:
        names: the file's names of the encoder's tensors, by prefixes, where they are not as in most files.
        token: where feature rows stand, and its id.
        exchanged: whether the matrices of feed-forward parts have each other's names, as in older files.
        changed: what is done to tensors of the encoder, by the ends of their names.
        keys: keys of files that older converters wrote, beside those of all; None: llama.cpp's converter writes these.
        fused: whether queries, keys and values of a layer are one tensor.
        embedded: a tensor that is the text model's embedding of a token: its name, and the token's id.
        unread: a tensor that readers make anew: its name and its shape.
        lost: keys of preprocessor_config.json that no key of the file is for, with what they are taken for.
    """

    names: Mapping[str, str]
    token: tuple[str, int]
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    exchanged: bool = False
    keys: Mapping[str, Any] | None = None
    fused: bool = False
    embedded: tuple[str, int] | None = None
    unread: tuple[str, tuple[int, ...]] | None = None
    lost: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Original:
    """A golden checkpoint's encoder, with what a case of ``mtmd_cases`` changes in it.

    Attributes:
        whole: the content of config.json.
        files: the content of preprocessor_config.json, with what the encoder's file loses of it.
        text: the text model's config.json.
        spec: the encoder.
        tensors: f32, by our names.
    """

    whole: dict[str, Any]
    files: dict[str, Any]
    text: dict[str, Any]
    spec: VisionSpec
    tensors: dict[str, np.ndarray]

    @property
    def preparation(self) -> Preparation:
        found = preparation_of(self.whole, self.files)
        assert found is not None
        return found


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
    "attn.qkv_proj": "attn_qkv",
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
# The files have no limits of pixels, whose place llama.cpp's own take: 8 to 4096 rows of 12 x 12 pixels.
QWEN_PIXELS = {"size": None, "min_pixels": 8 * 144, "max_pixels": 4096 * 144}
GLM_PIXELS = {"size": {"shortest_edge": 2 * 8 * 144, "longest_edge": 2 * 4096 * 144}}  # counted for each frame
PIXTRAL_TURNS = {"q_proj.weight": interleaved(5), "k_proj.weight": interleaved(5)}
BREAK = ("v.token_embd.img_break", 260)
CONVERSIONS = {
    "qwen2-vl": Conversion(QWEN, QWEN_TOKEN, lost=QWEN_PIXELS),
    "qwen2_5-vl": Conversion(QWEN, QWEN_TOKEN, lost=QWEN_PIXELS),
    "qwen3-vl": Conversion(
        {
            **QWEN,
            **{
                f"taps.{k}.step{n}": f"v.deepstack.{2 * k}.{part}"
                for k in (0, 1)
                for n, part in enumerate(("norm", "fc1", "fc2"), 1)
            },
        },
        QWEN_TOKEN,
        fused=True,
        lost=QWEN_PIXELS,
    ),
    "qwen3_5": Conversion(QWEN, QWEN_TOKEN, fused=True, lost=QWEN_PIXELS),
    "gemma3": Conversion(
        {"projector.step1": "mm.soft_emb_norm", "projector.step2": "mm.input_projection"},
        ("<image_soft_token>", 261),
        {"step1.weight": lambda x: x + 1, "step2.weight": lambda x: x.T.astype(np.float16)},
    ),
    "idefics3": Conversion({"projector.step1": "mm.model.fc"}, ("<image>", 259)),
    "internvl": Conversion(
        {"projector.step1": "mm.model.mlp.0", "projector.step2": "mm.model.mlp.1", "projector.step3": "mm.model.mlp.3"},
        ("<IMG_CONTEXT>", 261),
        {"positions": lambda x: x[None], "class_embed": lambda x: x.reshape(1, 1, -1)},
    ),
    "pixtral": Conversion(
        {"projector.step0": "mm.1", "projector.step1": "mm.2"}, ("[IMG]", 259), PIXTRAL_TURNS, embedded=BREAK
    ),
    "llava": Conversion(
        LLAVA, ("<image>", 259), exchanged=True, keys={"clip.projector_type": "mlp", f"{V}feature_layer": [3]}
    ),
    "llava-next": Conversion(
        {**LLAVA, "learned.0": "model.image_newline"},
        ("<image>", 259),
        exchanged=True,
        keys={"clip.projector_type": "mlp", f"{V}image_grid_pinpoints": [18, 36, 36, 18, 36, 36, 54, 18, 18, 54]},
    ),
    "minicpmv": Conversion(
        {
            "resampler.query": "resampler.query",
            "resampler.kv_proj": "resampler.kv",
            "resampler.proj": "resampler.proj",
            **{f"resampler.{part}_proj": f"resampler.attn.{part}" for part in "qkv"},
            "resampler.o_proj": "resampler.attn.out",
            **{f"resampler.ln_{part}": f"resampler.ln_{part}" for part in ("q", "kv", "post")},
        },
        ("<unk>", 259),
        exchanged=True,
        keys={
            "clip.projector_type": "resampler",
            "clip.minicpmv_version": 3,
            "clip.minicpmv_query_num": 5,
            f"{V}preproc_max_tiles": 4,
            "clip.use_gelu": True,
        },
        unread=("resampler.pos_embed_k", (4900, 128)),
    ),
    "mistral3": Conversion(
        {
            "projector.step0": "mm.input_norm",
            "projector.step2": "mm.patch_merger",
            "projector.step3": "mm.1",
            "projector.step4": "mm.2",
        },
        ("[IMG]", 259),
        PIXTRAL_TURNS,
        embedded=BREAK,
    ),
    **{
        name: Conversion(
            {
                "projector.step1": "mm.patch_merger",
                "projector.step2": "mm.model.fc",
                "projector.step3": "mm.post_norm",
                **{f"projector.step4.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
            },
            ("<|image|>", 263),
            {"projector.step1.weight": lambda x: x.reshape(len(x), -1, 2, 2)},
            fused=True,
            lost=GLM_PIXELS,
        )
        for name in ("glm4v", "glm4v-moe")
    },
    **{
        name: Conversion(
            {
                "projector.step1.bias": "v.std_bias",
                "projector.step1.scale": "v.std_scale",
                "projector.step3": "mm.input_projection",
            },
            ("<|image|>", 261),
            {"positions": lambda x: x.reshape(2, -1, x.shape[-1])},
            lost={"max_soft_tokens": 280},
        )
        for name in ("gemma4", "gemma4-layered")
    },
    "llama4": Conversion(
        {"projector.step1": "mm.model.mlp.1", "projector.step2": "mm.model.mlp.2", "projector.step3": "mm.model.fc"},
        ("<|patch|>", 262),
        {"positions": lambda x: np.roll(x, -1, axis=0), "patch_embed.weight": lambda x: x.reshape(len(x), -1)},
        lost={"max_patches": 16},
    ),
    "kimi-vl": Conversion(
        {"projector.step0": "mm.input_norm", "projector.step2": "mm.1", "projector.step3": "mm.2"},
        ("<|media_pad|>", 261),
        lost={"in_token_limit": 4096},
    ),
    "kimi-k2_5": Conversion(
        {"projector.step0": "mm.input_norm", "projector.step2": "mm.1", "projector.step3": "mm.2"},
        ("<|media_pad|>", 261),
        {
            **{f"attn.{part}_proj.{kind}": axes_apart(5) for part in "qk" for kind in ("weight", "bias")},
            "positions": lambda x: x.reshape(5, -1, x.shape[-1]),
        },
        keys={
            "clip.projector_type": "kimik25",
            f"{V}projector.scale_factor": 2,
            "clip.use_gelu": True,
            f"{V}image_max_pixels": 50 * 6**2,
        },
        lost={"size": {"max_height": 512, "max_width": 512}},
    ),
    "janus": Conversion(
        {"projector.step0": "mm.0", "projector.step1": "mm.1"}, ("<image_placeholder>", 261), lost={"min_size": 14}
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


@cache
def original(name: str) -> Original:
    checkpoint, case = open_checkpoint(SEEING / name), CASES.get(name)
    whole, files = dict(checkpoint.whole_config), json.loads((SEEING / name / "preprocessor_config.json").read_text())
    tensors = {own: tensor.read(F32) for own, tensor in checkpoint.vision_tensors.items()}
    if case is not None:
        whole |= {**case.whole, "vision_config": {**whole["vision_config"], **case.vision}}
        if case.table is not None:
            tensors["positions"] = case.table.changed(tensors["positions"]).reshape(-1, tensors["positions"].shape[-1])
    family = vision_family(whole)
    assert family is not None
    spec = family.encoder(family.sight(whole))
    return Original(whole, {**files, **CONVERSIONS[name].lost}, checkpoint.config, spec, tensors)


def embedding(name: str, token: int) -> np.ndarray:
    """A token's vector in the text model, f32 [D]."""
    table = open_checkpoint(SEEING / name).tensors["model.embed_tokens.weight"].read(F32)
    return np.ascontiguousarray(table[token])


def with_fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with a layer's queries, keys and values one below the other in one."""
    found = {}
    for own, values in tensors.items():
        if ".q_proj" in own:
            rest = [tensors[own.replace(".q_proj", f".{part}_proj")] for part in "kv"]
            found[own.replace(".q_proj", ".qkv_proj")] = np.concatenate([values, *rest])
        elif ".k_proj" not in own and ".v_proj" not in own:
            found[own] = values
    return found


def converted_keys(name: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter wrote."""
    with np.load(HERE / f"{name}.npz") as golden:
        return dict(json.loads(golden["keys"].tobytes()))


def older_keys(name: str) -> dict[str, Any]:
    """The keys that older converters wrote."""
    found, layer = original(name), original(name).spec.layers[0]
    vision, preparation = found.whole["vision_config"], found.preparation
    return {
        "clip.has_vision_encoder": True,
        f"{V}embedding_length": found.spec.size,
        f"{V}feed_forward_length": vision["intermediate_size"],
        f"{V}block_count": len(found.spec.layers),
        f"{V}attention.head_count": vision["num_attention_heads"],
        f"{V}attention.layer_norm_epsilon": layer.norm.eps,
        f"{V}patch_size": vision["patch_size"],
        f"{V}projection_dim": 0,
        f"{V}image_size": found.whole.get("image_size", vision.get("image_size", 24)),
        f"{V}image_mean": list(preparation.mean),
        f"{V}image_std": list(preparation.std),
        **(CONVERSIONS[name].keys or {}),
    }


def written(name: str, path: Path) -> Original:
    """Writes a golden checkpoint's encoder, and returns what it is made of."""
    found, conversion = original(name), CONVERSIONS[name]
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (older_keys(name) if conversion.keys is not None else converted_keys(name)).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key == "clip.minicpmv_version":
            writer.add_int32(key, value)
        else:
            writer.add_uint32(key, value)
    for own, values in (with_fused(found.tensors) if conversion.fused else found.tensors).items():
        for end, change in conversion.changed.items():
            values = change(values) if own.endswith(end) else values
        if own == "patch_embed.weight" and name != "llama4":
            values = values.reshape(len(values), 3, -1, 6, 6)
            if values.shape[2] == 2:
                writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1]))
            values = values[:, :, 0]
        called = file_name(own, conversion.names)
        if conversion.exchanged and ".ffn_" in called:
            called = called.replace("ffn_up", "ffn_?").replace("ffn_down", "ffn_up").replace("ffn_?", "ffn_down")
        writer.add_tensor(called, np.ascontiguousarray(values))
    if conversion.embedded is not None:
        called, token = conversion.embedded
        writer.add_tensor(called, embedding(name, token))
    if conversion.unread is not None:
        called, shape = conversion.unread
        writer.add_tensor(called, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
