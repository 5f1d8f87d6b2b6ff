"""The kinds of encoders that llama.cpp's ``mmproj`` files have: how their keys and tensors are called in the original.

Names and keys: gguf's ``MODEL_ARCH.MMPROJ`` and llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.errors import CheckpointError

BLOCK = "v.blk.*."
NAMES = {
    "v.patch_embd.weight": "patch_embed.weight",
    "v.patch_embd.bias": "patch_embed.bias",
    "v.position_embd.weight": "positions",
    "v.class_embd": "class_embed",
    "v.pre_ln": "norm_before",
    "v.post_ln": "norm_after",
    f"{BLOCK}ln1": "layers.*.norm1",
    f"{BLOCK}ln2": "layers.*.norm2",
    f"{BLOCK}attn_qkv": "layers.*.attn.qkv_proj",
    f"{BLOCK}attn_out": "layers.*.attn.o_proj",
    **{f"{BLOCK}attn_{part}": f"layers.*.attn.{part}_proj" for part in "qkv"},
    **{f"{BLOCK}attn_{part}_norm": f"layers.*.attn.{part}_norm" for part in "qk"},
    **{f"{BLOCK}ffn_{part}": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"{BLOCK}ls{part}.weight": f"layers.*.scale{part}" for part in (1, 2)},
}
"""Names of an encoder's tensors by those that most files have."""
_QWEN = {"v.post_ln": "projector.step0", "mm.0": "projector.step2", "mm.2": "projector.step3"}


@dataclass(frozen=True)
class Projector:
    """A kind of encoder in these files.

    Attributes:
        architecture: the class that the whole model has in Hugging Face's config.json.
        placeholder: the token at which feature rows stand, and the key of its id.
        names: names of tensors that are not as in most files.
        vision: keys of ``vision_config`` that differ from what the files say under the usual names.
        halves: queries and keys are stored with a head's halves interleaved.
        axes: the same with the pairs that turn by the column before those that turn by the row.
        unused: tensors that are made anew.
        plus_one: endings of the names of norms that are stored with one added.
        text: keys of the text model's config.json that its own file does not have.
    """

    architecture: str
    placeholder: tuple[str, str]
    names: Mapping[str, str]
    vision: Callable[[Keys], dict[str, Any]]
    whole: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    processor: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    halves: bool = False
    axes: bool = False
    plus_one: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    text: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda text: {}


@dataclass(frozen=True)
class Keys:
    """The keys of a file, and the size of the text model's vectors."""

    file: GGUFFile
    hidden_size: int

    def get(self, key: str, default: Any = None) -> Any:
        found = self.file.metadata.get(f"clip.vision.{key}", default)
        return found.tolist() if isinstance(found, np.ndarray) else found

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.file.path}: clip.vision.{key} = {str(value)[:40]} must be a positive integer")
        return value

    @property
    def activation(self) -> str:
        """The activation of a layer's feed-forward part; llama.cpp's is the form with tanh where it says gelu."""
        if self.file.metadata.get("clip.use_silu"):
            return "silu"
        return "gelu_pytorch_tanh" if self.file.metadata.get("clip.use_gelu") else "quick_gelu"

    @property
    def eps(self) -> float:
        """What norms add to the variance."""
        return shortest(self.get("attention.layer_norm_epsilon", 1e-6))

    def any_of(self, *names: str) -> bool:
        """Whether there is one of these tensors."""
        return any(name in self.file.tensors for name in names)

    def rows(self, name: str) -> int:
        """Rows of a tensor."""
        return self.shape(name)[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        if name not in self.file.tensors:
            raise CheckpointError(f"{self.file.path}: tensor {name!r} is missing")
        return self.file.tensors[name].shape


def shortest(value: Any) -> float:
    """An f32 as the number that its config.json had: the one with fewest digits that rounds to it."""
    return float(str(np.float32(value)))


def _qwen2_vl(keys: Keys) -> dict[str, Any]:
    size = keys.integer("embedding_length")
    # The key feed_forward_length has the size of the text model's vectors in these files.
    values = math.prod(keys.shape("v.blk.0.ffn_up.weight"))
    return {
        "depth": keys.integer("block_count"),
        "embed_dim": size,
        "hidden_size": keys.hidden_size,
        "mlp_ratio": values // size**2,
        "num_heads": keys.integer("attention.head_count"),
        "hidden_act": keys.activation,
    }


def _qwen2_5_vl(keys: Keys) -> dict[str, Any]:
    depth = keys.integer("block_count")
    full = keys.get("wa_layer_indexes")
    if full is None:
        pattern = keys.integer("n_wa_pattern", depth)
        full = list(range(pattern - 1, depth, pattern))
    return {
        "depth": depth,
        "num_heads": keys.integer("attention.head_count"),
        "out_hidden_size": keys.hidden_size,
        "window_size": keys.integer("window_size", 112),
        "fullatt_block_indexes": full,
        "hidden_act": "silu",
    }


def _qwen3_vl(keys: Keys) -> dict[str, Any]:
    taps = keys.get("is_deepstack_layers") or []
    return {
        "depth": keys.integer("block_count"),
        "num_heads": keys.integer("attention.head_count"),
        "out_hidden_size": keys.hidden_size,
        "num_position_embeddings": keys.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": [number for number, tapped in enumerate(taps) if tapped],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _pixels(keys: Keys, frames: int = 1) -> dict[str, Any]:
    """Limits of a picture's pixels, which are llama.cpp's where the file has none.

    Args:
        frames: how often the model's processor counts a pixel.
    """
    row = (keys.integer("patch_size") * merge(keys, 2)) ** 2
    least, most = keys.integer("image_min_pixels", LEAST_ROWS * row), keys.integer("image_max_pixels", MOST_ROWS * row)
    return {"min_pixels": frames * least, "max_pixels": frames * most}


def merge(keys: Keys, default: int) -> int:
    return keys.integer("spatial_merge_size", default)


def _gemma3_rows(keys: Keys) -> dict[str, Any]:
    along = keys.integer("image_size") // keys.integer("patch_size") // keys.integer("projector.scale_factor", 4)
    return {"mm_tokens_per_image": along**2}


def _square(keys: Keys) -> dict[str, Any]:
    along = keys.integer("image_size")
    return {"size": {"height": along, "width": along}}


def _tiles(keys: Keys) -> dict[str, Any]:
    least, most = keys.integer("preproc_min_tiles", 1), keys.integer("preproc_max_tiles", 12)
    return {**_square(keys), "crop_to_patches": True, "min_patches": least, "max_patches": most}


def _split(keys: Keys) -> dict[str, Any]:
    tile = keys.integer("image_size")
    longest = keys.integer("preproc_image_size", 4 * tile)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}


def _rounded(keys: Keys) -> dict[str, Any]:
    unit = keys.integer("patch_size") * merge(keys, 1)
    return {"size": {"longest_edge": keys.integer("image_size")}, "patch_size": {"height": unit, "width": unit}}


def _pixtral(keys: Keys) -> dict[str, Any]:
    activation = "silu" if keys.file.metadata.get("clip.use_silu") else "gelu"
    return {"model_type": "pixtral", "hidden_act": activation}


def _internvl(keys: Keys) -> dict[str, Any]:
    named = keys.file.tensors
    return {
        "attention_bias": "v.blk.0.attn_q.bias" in named,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in named,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in named else "rms_norm",
        "hidden_act": "gelu",
    }


def _llava(keys: Keys) -> dict[str, Any]:
    return {"model_type": "clip_vision_model", "hidden_act": keys.activation}


def _llava_layer(keys: Keys) -> dict[str, Any]:
    """The layer whose output is projected: the last one that is in the file, unless it says another."""
    depth = keys.integer("block_count")
    layers = keys.get("feature_layer", [depth])
    if not isinstance(layers, list) or len(layers) != 1 or layers[0] not in range(1, depth + 1):
        raise CheckpointError(
            f"{keys.file.path}: clip.vision.feature_layer = {str(layers)[:40]} is not supported; supported is one "
            f"layer from 1 to {depth}"
        )
    return {"vision_feature_layer": layers[0] - depth - 1}


def _llava_crop(keys: Keys) -> dict[str, Any]:
    along = keys.integer("image_size")
    return {"size": {"shortest_edge": along}, "crop_size": {"height": along, "width": along}}


def _llava_sizes(keys: Keys) -> dict[str, Any]:
    sizes = keys.get(PINPOINTS)
    pairs = [list(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)] if len(sizes) % 2 == 0 else sizes
    return {**_llava_layer(keys), "image_grid_pinpoints": pairs}


def _minicpmv(keys: Keys) -> dict[str, Any]:
    along = math.isqrt(keys.rows("v.position_embd.weight"))
    return {"hidden_act": "gelu_pytorch_tanh", "image_size": along * keys.integer("patch_size")}


def _minicpmv_rows(keys: Keys) -> dict[str, Any]:
    return {
        "query_num": keys.rows("resampler.query"),
        "image_size": keys.integer("image_size"),
        "drop_vision_last_layer": False,
    }


def _minicpmv_slices(keys: Keys) -> dict[str, Any]:
    version, patch = keys.file.metadata.get(MINICPMV_VERSION), keys.integer("patch_size")
    if version not in MINICPMV_VERSIONS:
        known = ", ".join(map(str, MINICPMV_VERSIONS))
        raise CheckpointError(
            f"{keys.file.path}: {MINICPMV_VERSION} = {version} is not supported; supported are {known}"
        )
    return {
        "scale_resolution": keys.integer("image_size"),
        "patch_size": patch,
        "image_feature_size": keys.rows("resampler.query"),
        "use_image_id": True,
        "max_slice_nums": keys.integer("preproc_max_tiles", 9),
    }


def _glm4v(keys: Keys) -> dict[str, Any]:
    return {
        "depth": keys.integer("block_count"),
        "num_heads": keys.integer("attention.head_count"),
        "out_hidden_size": keys.hidden_size,
        "rms_norm_eps": keys.eps,
        "attention_bias": keys.any_of("v.blk.0.attn_qkv.bias", "v.blk.0.attn_q.bias"),
        "hidden_act": "silu",
    }


def _gemma4(keys: Keys) -> dict[str, Any]:
    return {
        "num_key_value_heads": keys.integer("attention.head_count"),
        "head_dim": keys.rows("v.blk.0.attn_q.weight") // keys.integer("attention.head_count"),
        "position_embedding_size": keys.shape("v.position_embd.weight")[1],
        "rms_norm_eps": keys.eps,
        "use_clipped_linears": keys.any_of("v.blk.0.attn_q.input_min"),
        "standardize": keys.any_of("v.std_bias"),
    }


def _gemma4_pixels(keys: Keys) -> dict[str, Any]:
    patch, pixels = keys.integer("patch_size"), keys.get("image_max_pixels")
    limit = {} if pixels is None else {"max_soft_tokens": pixels // (patch * GEMMA4_SIDE) ** 2}
    return {"patch_size": patch, "pooling_kernel_size": GEMMA4_SIDE, "do_normalize": False, **limit}


def _gemma4_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Models with embeddings for each layer are the causal ones, which files do not say."""
    return {} if text.get("hidden_size_per_layer_input") else {"use_bidirectional_attention": "vision"}


def _llama4(keys: Keys) -> dict[str, Any]:
    inner, out = (keys.rows(f"mm.model.mlp.{number}.weight") for number in (1, 2))
    return {
        "hidden_act": "gelu",
        "pixel_shuffle_ratio": 1 / keys.integer("projector.scale_factor", 2),
        "projector_input_dim": inner,
        "projector_output_dim": out,
        "vision_output_dim": out,
    }


def _llama4_tiles(keys: Keys) -> dict[str, Any]:
    return {**_square(keys), "max_patches": keys.integer("preproc_max_tiles", 16)}


def _kimi_vl(keys: Keys) -> dict[str, Any]:
    along, side = math.isqrt(keys.rows("v.position_embd.weight")), keys.integer("projector.scale_factor", 2)
    return {"init_pos_emb_height": along, "init_pos_emb_width": along, "merge_kernel_size": [side, side]}


def _kimi_vl_pixels(keys: Keys) -> dict[str, Any]:
    pixels = keys.get("image_max_pixels")
    limit = {} if pixels is None else {"in_token_limit": pixels // keys.integer("patch_size") ** 2}
    return {"pad_input": True, **limit}


def _kimi_k25(keys: Keys) -> dict[str, Any]:
    height, width, _ = (1, *keys.shape("v.position_embd.weight"))[-3:]
    side = keys.integer("projector.scale_factor", 2)
    return {"pos_emb_height": height, "pos_emb_width": width, "merge_kernel_size": [side, side]}


def _kimi_k25_pixels(keys: Keys) -> dict[str, Any]:
    pixels = keys.get("image_max_pixels")
    return {} if pixels is None else {"in_patch_limit": pixels // keys.integer("patch_size") ** 2}


def _janus(keys: Keys) -> dict[str, Any]:
    # Half a value more, so that no rounding makes it one less.
    ratio = (keys.integer("feed_forward_length") + 0.5) / keys.integer("embedding_length")
    return {"hidden_act": "gelu", "mlp_ratio": ratio, "projection_dim": keys.hidden_size}


LEAST_ROWS, MOST_ROWS = 8, 4096  # of a picture in llama.cpp where sizes vary
GEMMA4_SIDE = 3  # patches along each side of a square that becomes one row
PINPOINTS = "image_grid_pinpoints"
LLAVA_NEXT = "mlp with image_grid_pinpoints"
"""What files call mlp too."""
_LLAVA_NAMES = {"mm.0": "projector.step0", "mm.2": "projector.step1", "image_newline": "learned.0"}
MINICPMV_VERSION, MINICPMV_VERSIONS = "clip.minicpmv_version", (3, 5, 6)  # MiniCPM-V 2.6, 4 and 4.5
MERGED_PIXTRAL = "pixtral with patch_merger"
"""What files call pixtral too."""
_QWEN_TOKEN = ("<|image_pad|>", "image_token_id")
PROJECTOR_TYPES: Mapping[str, Projector] = MappingProxyType(
    {
        "qwen2vl_merger": Projector(
            "Qwen2VLForConditionalGeneration", _QWEN_TOKEN, _QWEN, _qwen2_vl, processor=_pixels
        ),
        "qwen2.5vl_merger": Projector(
            "Qwen2_5_VLForConditionalGeneration", _QWEN_TOKEN, _QWEN, _qwen2_5_vl, processor=_pixels
        ),
        "qwen3vl_merger": Projector(
            "Qwen3VLForConditionalGeneration", _QWEN_TOKEN, _QWEN, _qwen3_vl, processor=_pixels
        ),
        "gemma3": Projector(
            "Gemma3ForConditionalGeneration",
            ("<image_soft_token>", "image_token_index"),
            {"mm.soft_emb_norm": "projector.step1", "mm.input_projection.weight": "projector.step2.weight.T"},
            lambda keys: {"hidden_act": "gelu_pytorch_tanh"},
            _gemma3_rows,
            _square,
            plus_one=("projector.step1.weight",),
        ),
        "idefics3": Projector(
            "Idefics3ForConditionalGeneration",
            ("<image>", "image_token_id"),
            {"mm.model.fc": "projector.step1"},
            lambda keys: {"hidden_act": "gelu_pytorch_tanh"},
            lambda keys: {"scale_factor": keys.integer("projector.scale_factor", 2)},
            _split,
        ),
        "pixtral": Projector(
            "LlavaForConditionalGeneration",
            ("[IMG]", "image_token_index"),
            {"mm.1": "projector.step0", "mm.2": "projector.step1"},
            _pixtral,
            lambda keys: {"multimodal_projector_bias": "mm.1.bias" in keys.file.tensors},
            _rounded,
            halves=True,
            unused=("v.token_embd.img_break",),
        ),
        MERGED_PIXTRAL: Projector(
            "Mistral3ForConditionalGeneration",
            ("[IMG]", "image_token_index"),
            {
                "mm.input_norm": "projector.step0",
                "mm.patch_merger": "projector.step2",
                "mm.1": "projector.step3",
                "mm.2": "projector.step4",
            },
            _pixtral,
            lambda keys: {
                "spatial_merge_size": merge(keys, 2),
                "multimodal_projector_bias": "mm.1.bias" in keys.file.tensors,
            },
            _rounded,
            halves=True,
            unused=("v.token_embd.img_break",),
        ),
        "internvl": Projector(
            "InternVLForConditionalGeneration",
            ("<IMG_CONTEXT>", "image_token_id"),
            {
                "mm.model.mlp.0": "projector.step1",
                "mm.model.mlp.1": "projector.step2",
                "mm.model.mlp.3": "projector.step3",
            },
            _internvl,
            lambda keys: {"downsample_ratio": 1 / keys.integer("projector.scale_factor", 2)},
            _tiles,
        ),
        "mlp": Projector(
            "LlavaForConditionalGeneration",
            ("<image>", "image_token_index"),
            _LLAVA_NAMES,
            _llava,
            _llava_layer,
            _llava_crop,
        ),
        LLAVA_NEXT: Projector(
            "LlavaNextForConditionalGeneration",
            ("<image>", "image_token_index"),
            _LLAVA_NAMES,
            _llava,
            _llava_sizes,
            _llava_crop,
        ),
        "resampler": Projector(
            "MiniCPMV",
            ("<unk>", "image_token_id"),
            {
                "resampler.query": "resampler.query",
                "resampler.kv": "resampler.kv_proj",
                "resampler.proj": "resampler.proj",
                **{f"resampler.attn.{part}": f"resampler.{part}_proj" for part in "qkv"},
                "resampler.attn.out": "resampler.o_proj",
                **{f"resampler.ln_{part}": f"resampler.ln_{part}" for part in ("q", "kv", "post")},
            },
            _minicpmv,
            _minicpmv_rows,
            _minicpmv_slices,
            unused=("resampler.pos_embed_k",),
        ),
        "glm4v": Projector(
            "Glm4vForConditionalGeneration",
            ("<|image|>", "image_token_id"),
            {
                "v.norm_embd": "norm_patches",
                "mm.patch_merger": "projector.step1",
                "mm.model.fc": "projector.step2",
                "mm.post_norm": "projector.step3",
                **{f"mm.{part}": f"projector.step4.{part}_proj" for part in ("gate", "up", "down")},
            },
            _glm4v,
            processor=lambda keys: _pixels(keys, frames=2),
        ),
        "gemma4v": Projector(
            "Gemma4ForConditionalGeneration",
            ("<|image|>", "image_token_id"),
            {
                f"{BLOCK}attn_post_norm": "layers.*.after1",
                f"{BLOCK}ffn_post_norm": "layers.*.after2",
                "v.std_bias": "projector.step1.bias",
                "v.std_scale": "projector.step1.scale",
                "mm.input_projection": "projector.step3",
            },
            lambda keys: {"model_type": "gemma4_vision", **_gemma4(keys)},
            processor=_gemma4_pixels,
            text=_gemma4_text,
        ),
        "llama4": Projector(
            "Llama4ForConditionalGeneration",
            ("<|patch|>", "image_token_index"),
            {
                "v.position_embd.weight": "positions.LAST",
                f"{BLOCK}attn_post_norm": "layers.*.norm2",  # which some converters call ln2
                "mm.model.mlp.1": "projector.step1",
                "mm.model.mlp.2": "projector.step2",
                "mm.model.fc": "projector.step3",
            },
            _llama4,
            processor=_llama4_tiles,
        ),
        "kimivl": Projector(
            "KimiVLForConditionalGeneration",
            ("<|media_pad|>", "media_placeholder_token_id"),
            {"mm.input_norm": "projector.step0", "mm.1": "projector.step2", "mm.2": "projector.step3"},
            _kimi_vl,
            processor=_kimi_vl_pixels,
        ),
        "kimik25": Projector(
            "KimiK25ForConditionalGeneration",
            ("<|media_pad|>", "media_placeholder_token_id"),
            {"mm.input_norm": "projector.step0", "mm.1": "projector.step2", "mm.2": "projector.step3"},
            _kimi_k25,
            processor=_kimi_k25_pixels,
            axes=True,
        ),
        "janus_pro": Projector(
            "JanusForConditionalGeneration",
            ("<image_placeholder>", "image_token_id"),
            {"mm.0": "projector.step0", "mm.1": "projector.step1"},
            _janus,
            processor=_square,
        ),
    }
)
"""By the name that files have in PROJECTORS."""
