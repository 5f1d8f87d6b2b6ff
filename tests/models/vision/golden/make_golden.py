"""Writes the golden files beside it: tiny random checkpoints of models that see, and what transformers makes of them.

Needs ``torch`` (CPU), ``torchvision``, ``transformers`` and ``tokenizers``, of which the tests need the last alone:

    python -m tests.models.vision.golden.make_golden [name ...]

An archive a checkpoint, ``<name>.zip``, of a folder in Hugging Face layout: ``config.json``,
``preprocessor_config.json``, ``tokenizer.json``, ``tokenizer_config.json`` with a chat template, ``model.safetensors``
(bf16 values, which f32 holds exactly) and ``golden.npz``. The last holds pictures ``image<i>`` u8 [H, W, 3], what the
processor makes of each (``image<i>/pixels`` and, where there is one, ``image<i>/grid``), ``image<i>/rows`` f32 [N, D],
their feature rows, and ``image<i>/tapped`` f32 [K, N, D] where there is deepstack. A case is ``one``, ``two`` or
``none`` pictures: ``<case>/prompt`` its text before and ``<case>/tokens`` its ids after placeholders are replaced,
``<case>/images`` the pictures' numbers, ``<case>/logits`` f32 [n, V], and ``<case>/positions`` [3, n] where positions
have three axes. ``sizes`` i32 [m, 2] are heights and widths, and ``counts`` i32 [m] the tokens that the processor says
a picture of each size has, where it does.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from PIL import Image
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import pack
from tests.models.vision.golden import published

HERE = Path(__file__).parent
SIZES = [(37, 53), (64, 20), (50, 111)]
VOCAB = 320
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}
QWEN_PIXELS = {"patch_size": 6, "temporal_patch_size": 2, "merge_size": 2}


@dataclass(frozen=True)
class Checkpoint:
    """A model's class, its configuration, and the processor that goes with it.

    Attributes:
        tokens: special tokens after the first three, which have ids from 259 on.
        named: attributes of the tokenizer by which the processor finds some of them.
        picture: what stands for a picture in a prompt.
        processor: the processor's class.
        bos: the token that begins a text.
        late: those tokens come after the text model's vocabulary.
        ends: what the processor adds to prompts with pictures, which it is given without.
    """

    architecture: str
    config: dict[str, Any]
    image_processor: str
    pixels: dict[str, Any]
    tokens: list[str]
    picture: str
    processor: str
    bos: str = "<s>"
    late: bool = False
    ends: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


GLM_TOKENS = [
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
]
GLM_IDS = {
    "image_start_token_id": 259,
    "image_end_token_id": 260,
    "video_start_token_id": 261,
    "video_end_token_id": 262,
    "image_token_id": 263,
    "video_token_id": 264,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
GLM_VISION = {
    "depth": 3,
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_heads": 5,
    "patch_size": 6,
    "image_size": 30,
    "out_hidden_size": 84,
}
GLM = {
    "image_processor": "Glm4vImageProcessorPil",
    "pixels": {**QWEN_PIXELS, "size": {"shortest_edge": 1152, "longest_edge": 14001}},
    "tokens": GLM_TOKENS,
    "picture": "<|begin_of_image|><|image|><|end_of_image|>",
    "processor": "Glm4vProcessor",
}
GEMMA4_IDS = {"image_token_id": 261, "boi_token_id": 259, "eoi_token_id": 260, "tie_word_embeddings": True}
GEMMA4_TEXT = {
    **TEXT,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
}
GEMMA4_VISION = {
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 12,
    "patch_size": 6,
    "position_embedding_size": 40,
}
GEMMA4: dict[str, Any] = {
    "image_processor": "Gemma4ImageProcessorPil",
    "pixels": {"patch_size": 6, "max_soft_tokens": 9},
    "tokens": ["<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"],
    "picture": "<|image|>",
    "processor": "Gemma4Processor",
    "named": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
}
QWEN = {"picture": "<|vision_start|><|image_pad|><|vision_end|>", "tokens": QWEN_TOKENS}
PIXTRAL_VISION = {
    "model_type": "pixtral",
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "head_dim": 12,
    "patch_size": 6,
    "image_size": 60,
    "rope_theta": 1e4,
}
PALIGEMMA_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "patch_size": 6,
    "image_size": 18,
    "vision_use_head": False,
}
PALIGEMMA: dict[str, Any] = {
    "image_processor": "SiglipImageProcessorPil",
    "pixels": {"size": {"height": 18, "width": 18}, "image_seq_length": 9},
    "tokens": ["<image>"],
    "picture": "<image>",
    "processor": "PaliGemmaProcessor",
    "bos": "<bos>",
    "ends": "\n",
    "named": {"image_token": "<image>"},
}
KIMI_TEXT = {
    **TEXT,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 7,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
KIMI_VISION = {
    "patch_size": 6,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "hidden_size": 60,
    "intermediate_size": 44,
    "merge_kernel_size": [2, 2],
}
KIMI: dict[str, Any] = {
    "tokens": ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"],
    "picture": "<|media_pad|>",
}
COHERE2_TEXT = {
    **TEXT,
    "model_type": "cohere2",
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "logit_scale": 1.0,  # which transformers leaves out beside pictures
}
COHERE2_TOKENS = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"]
MOLMO2_IDS = {
    "image_start_token_id": 320,
    "image_end_token_id": 321,
    "image_patch_id": 322,
    "low_res_image_start_token_id": 324,
    "frame_start_token_id": 327,
    "frame_end_token_id": 328,
}
MOLMO2_VISION = {
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 10,
    "patch_size": 6,
    "image_size": [30, 30],
}
MOLMO2_ADAPTER = {
    "vision_feature_layer": [2, 0],
    "hidden_size": 60,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 14,
    "intermediate_size": 50,
    "text_hidden_size": 56,
}
MOLMO2: dict[str, Any] = {
    "image_processor": "Molmo2ImageProcessor",
    "pixels": {"size": {"height": 30, "width": 30}, "patch_size": 6, "max_crops": 4, "overlap_margins": [1, 1]},
    "tokens": [
        *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
        *("<frame_start>", "<frame_end>", "<|video|>"),
    ],
    "picture": "<|image|>",
    "processor": "Molmo2Processor",
    "settings": {"image_use_col_tokens": True, "use_single_crop_col_tokens": False},
    "late": True,
}
CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    "qwen2-vl": lambda: Checkpoint(
        "Qwen2VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 3,
                "embed_dim": 60,
                "hidden_size": 56,
                "mlp_ratio": 2,
                "num_heads": 5,
                "patch_size": 6,
            },
        },
        "Qwen2VLImageProcessorPil",
        {**QWEN_PIXELS, "size": {"shortest_edge": 576, "longest_edge": 7000}},
        processor="Qwen2VLProcessor",
        **QWEN,
    ),
    "qwen2_5-vl": lambda: Checkpoint(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_heads": 5,
                "patch_size": 6,
                "window_size": 24,
                "fullatt_block_indexes": [1, 3],
                "out_hidden_size": 56,
            },
        },
        "Qwen2VLImageProcessorPil",
        {**QWEN_PIXELS, "min_pixels": 576, "max_pixels": 7000},
        processor="Qwen2_5_VLProcessor",
        **QWEN,
    ),
    "qwen3-vl": lambda: Checkpoint(
        "Qwen3VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_heads": 5,
                "patch_size": 6,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 2],
                "out_hidden_size": 56,
            },
        },
        "Qwen2VLImageProcessorPil",
        {
            **QWEN_PIXELS,
            "size": {"shortest_edge": 576, "longest_edge": 7000},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        processor="Qwen3VLProcessor",
        **QWEN,
    ),
    "qwen3_5": lambda: Checkpoint(
        "Qwen3_5ForConditionalGeneration",
        {
            **QWEN_IDS,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "partial_rotary_factor": 0.5,
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 24,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_heads": 5,
                "patch_size": 6,
                "num_position_embeddings": 16,
                "out_hidden_size": 56,
            },
        },
        "Qwen2VLImageProcessorPil",
        {
            **QWEN_PIXELS,
            "size": {"shortest_edge": 576, "longest_edge": 7000},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        processor="Qwen3VLProcessor",
        **QWEN,
    ),
    "gemma3": lambda: Checkpoint(
        "Gemma3ForConditionalGeneration",
        {
            "image_token_id": 261,
            "image_token_index": 261,
            "boi_token_index": 259,
            "eoi_token_index": 260,
            "mm_tokens_per_image": 9,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 6,
                "head_dim": 12,
                "query_pre_attn_scalar": 20,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 36,
                "vision_use_head": False,
            },
        },
        "Gemma3ImageProcessorPil",
        {"size": {"height": 36, "width": 36}},
        tokens=["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        picture="<start_of_image>",
        processor="Gemma3Processor",
        settings={"image_seq_length": 9},
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "idefics3": lambda: Checkpoint(
        "Idefics3ForConditionalGeneration",
        {
            "image_token_id": 259,
            "scale_factor": 2,
            "pad_token_id": 258,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 24,
            },
        },
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 24}},
        tokens=[
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
            *[f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)],
        ],
        picture="<image>",
        processor="Idefics3Processor",
        settings={"image_seq_len": 4},
    ),
    "llava": lambda: Checkpoint(
        "LlavaForConditionalGeneration",
        {
            "image_token_id": 259,
            "image_token_index": 259,
            "image_seq_length": 9,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 4,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
                "projection_dim": 32,
            },
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 18}, "crop_size": {"height": 18, "width": 18}},
        tokens=["<image>"],
        picture="<image>",
        processor="LlavaProcessor",
        settings={"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava-next": lambda: Checkpoint(
        "LlavaNextForConditionalGeneration",
        {
            "image_token_id": 259,
            "image_token_index": 259,
            "image_grid_pinpoints": [[18, 36], [36, 18], [36, 36], [54, 18], [18, 54]],
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 4,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
                "projection_dim": 32,
            },
        },
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 18},
            "crop_size": {"height": 18, "width": 18},
            "image_grid_pinpoints": [[18, 36], [36, 18], [36, 36], [54, 18], [18, 54]],
        },
        tokens=["<image>"],
        picture="<image>",
        processor="LlavaNextProcessor",
        settings={"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava-onevision": lambda: Checkpoint(
        "LlavaOnevisionForConditionalGeneration",
        {
            "image_token_id": 259,
            "image_token_index": 259,
            "video_token_id": 260,
            "video_token_index": 260,
            "image_grid_pinpoints": [[18 * r, 18 * c] for r in range(1, 7) for c in range(1, 7)],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
                "vision_use_head": False,
            },
        },
        "LlavaOnevisionImageProcessorPil",
        {
            "size": {"height": 18, "width": 18},
            "image_grid_pinpoints": [[18 * r, 18 * c] for r in range(1, 7) for c in range(1, 7)],
        },
        tokens=["<image>", "<video>"],
        picture="<image>",
        processor="LlavaOnevisionProcessor",
        settings={
            "num_image_tokens": 9,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "internvl": lambda: Checkpoint(
        "InternVLForConditionalGeneration",
        {
            "image_token_id": 261,
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": [6, 6],
                "image_size": [24, 24],
                "attention_bias": True,
                "layer_scale_init_value": 0.1,
            },
        },
        "GotOcr2ImageProcessorPil",
        {
            "size": {"height": 24, "width": 24},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        tokens=["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        picture="<IMG_CONTEXT>",
        processor="InternVLProcessor",
        settings={"image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "pixtral": lambda: Checkpoint(
        "LlavaForConditionalGeneration",
        {
            "image_token_id": 259,
            "image_token_index": 259,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 12},
            "vision_config": {**PIXTRAL_VISION, "hidden_act": "gelu"},
        },
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 60}, "patch_size": {"height": 6, "width": 6}},
        tokens=["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        picture="[IMG]",
        processor="PixtralProcessor",
        settings={"patch_size": 6, "spatial_merge_size": 1},
    ),
    "mistral3": lambda: Checkpoint(
        "Mistral3ForConditionalGeneration",
        {
            "image_token_id": 259,
            "image_token_index": 259,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
            "vision_feature_layer": -1,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 12},
            "vision_config": {**PIXTRAL_VISION, "hidden_act": "silu"},
        },
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 60}, "patch_size": {"height": 12, "width": 12}},
        tokens=["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        picture="[IMG]",
        processor="PixtralProcessor",
        settings={"patch_size": 6, "spatial_merge_size": 2},
    ),
    "paligemma": lambda: Checkpoint(
        "PaliGemmaForConditionalGeneration",
        {
            "image_token_index": 259,
            "projection_dim": 56,
            "hidden_size": 56,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 2,
                "model_type": "gemma",
                "head_dim": 12,
                "hidden_act": "gelu_pytorch_tanh",
            },
            "vision_config": PALIGEMMA_VISION,
        },
        **PALIGEMMA,
    ),
    "paligemma2": lambda: Checkpoint(
        "PaliGemmaForConditionalGeneration",
        {
            "image_token_index": 259,
            "projection_dim": 56,
            "hidden_size": 56,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 2,
                "model_type": "gemma2",
                "head_dim": 12,
                "query_pre_attn_scalar": 20,
                # Longer than the prompts: transformers lets tokens of a prompt see past it, the weights' makers do not.
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": PALIGEMMA_VISION,
        },
        **PALIGEMMA,
    ),
    "glm4v": lambda: Checkpoint(
        "Glm4vForConditionalGeneration",
        {
            **GLM_IDS,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "hidden_size": 84, "num_hidden_layers": 3, "rope_parameters": GLM_ROPE},
            "vision_config": GLM_VISION,
        },
        **GLM,
    ),
    "glm4v-moe": lambda: Checkpoint(
        "Glm4vMoeForConditionalGeneration",
        {
            **GLM_IDS,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "hidden_size": 84,
                "num_hidden_layers": 2,
                "moe_intermediate_size": 20,
                "n_routed_experts": 5,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "rope_parameters": GLM_ROPE,
            },
            "vision_config": {**GLM_VISION, "depth": 2, "attention_bias": True},
        },
        **GLM,
    ),
    "gemma4": lambda: Checkpoint(
        "Gemma4ForConditionalGeneration",
        {
            **GEMMA4_IDS,
            "text_config": {
                **GEMMA4_TEXT,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
            },
            "vision_config": {**GEMMA4_VISION, "standardize": True},
        },
        **GEMMA4,
    ),
    "gemma4-layered": lambda: Checkpoint(
        "Gemma4ForConditionalGeneration",
        {
            **GEMMA4_IDS,
            "text_config": {
                **GEMMA4_TEXT,
                "hidden_size_per_layer_input": 10,
                "vocab_size_per_layer_input": VOCAB,
                "pad_token_id": 40,
            },
            "vision_config": {**GEMMA4_VISION, "use_clipped_linears": True},
        },
        **GEMMA4,
    ),
    "llama4": lambda: Checkpoint(
        "Llama4ForConditionalGeneration",
        {
            "image_token_index": 262,
            "boi_token_index": 259,
            "eoi_token_index": 260,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "intermediate_size": 16,
                "intermediate_size_mlp": 40,
                "head_dim": 12,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 256,
                "floor_scale": 32,
            },
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 240,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 24,
                "projector_input_dim": 44,
                "projector_output_dim": 44,
                "vision_output_dim": 44,
            },
        },
        "Llama4ImageProcessor",
        {"size": {"height": 24, "width": 24}, "max_patches": 6},
        tokens=[
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ],
        picture="<|image|>",
        processor="Llama4Processor",
        settings={"patch_size": 6, "pixel_shuffle_ratio": 0.5},
    ),
    "minicpmv": lambda: Checkpoint(
        "MiniCPMV",
        {
            **TEXT,
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "version": 2.6,
            "vocab_size": 272,
            "hidden_size": 128,
            "head_dim": 12,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "query_num": 5,
            "image_size": 36,
            "drop_vision_last_layer": False,
            "vision_config": {
                "model_type": "siglip",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "num_channels": 3,
                "patch_size": 6,
                "image_size": 54,
                "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6,
            },
        },
        image_processor="",
        pixels={
            "max_slice_nums": 4,
            "scale_resolution": 36,
            "patch_size": 6,
            "use_image_id": True,
            "image_feature_size": 5,
        },
        tokens=["<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
        picture="(<image>./</image>)",
        processor="MiniCPMVProcessor",
    ),
    "phi3_v": lambda: Checkpoint(
        "Phi3VForCausalLM",
        {
            **TEXT,
            "architectures": ["Phi3VForCausalLM"],
            "model_type": "phi3_v",
            "num_hidden_layers": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "embd_layer": {"embedding_cls": "image", "use_hd_transform": True, "with_learnable_separator": True},
            "img_processor": {"name": "clip_vision_model", "image_dim_out": 60, "num_img_tokens": 4},
            "vision_config": {  # which is not in published files, where it is always that of CLIP L
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 24,
            },
        },
        image_processor="",
        pixels={"num_crops": 4, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
        tokens=["<|image|>"],
        picture="<|image_1|>",
        processor="Phi3VProcessor",
    ),
    "kimi-vl": lambda: Checkpoint(
        "KimiVLForConditionalGeneration",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "media_placeholder_token_id": 261,
            "text_config": {**KIMI_TEXT, "architectures": ["DeepseekV3ForCausalLM"]},
            "vision_config": {
                **KIMI_VISION,
                "model_type": "moonvit",
                "init_pos_emb_height": 5,
                "init_pos_emb_width": 7,
            },
        },
        image_processor="",
        pixels={
            "patch_size": 6,
            "pad_input": True,
            "in_token_limit": 50,
            "merge_kernel_size": [2, 2],
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        processor="KimiVLProcessor",
        **KIMI,
    ),
    "kimi-k2_5": lambda: Checkpoint(
        "Kimi_K25ForConditionalGeneration",
        {
            "image_token_id": 261,
            "projection_hidden_size": 60,
            "tie_word_embeddings": False,
            "text_config": KIMI_TEXT,
            "vision_config": {**KIMI_VISION, "pos_emb_height": 5, "pos_emb_width": 5},
        },
        "Kimi_K25ImageProcessor",
        {"patch_size": 6, "merge_size": 2, "max_patches": 50, "size": {"max_height": 14, "max_width": 14}},
        processor="Kimi_K25Processor",
        **KIMI,
    ),
    "deepseek-vl2": lambda: Checkpoint(
        "DeepseekVLV2ForCausalLM",
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "candidate_resolutions": [list(size) for size in published.DeepseekVLV2Processor.candidates],
            "global_view_pos": "head",
            "tile_tag": "2D",
            "language_config": {
                **{key: value for key, value in KIMI_TEXT.items() if key != "model_type"},
                "model_type": "deepseek_v2",
                "topk_method": "greedy",
                "use_mla": True,
            },
            "projector_config": {"model_type": "mlp_projector", "input_dim": 60, "n_embed": 56},
            "vision_config": {
                "model_type": "vision",
                "image_size": 20,
                "patch_size": 6,
                "width": 60,
                "layers": 2,
                "heads": 5,
                "mlp_ratio": 0.74,
            },
        },
        image_processor="",
        pixels={"patch_size": 6, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "downsample_ratio": 2},
        tokens=["<image>"],
        picture="<image>",
        processor="DeepseekVLV2Processor",
    ),
    "deepseek-vl": lambda: Checkpoint(
        "DeepseekVLForConditionalGeneration",
        {
            "image_token_id": 259,
            "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 2},
            "vision_config": {**PALIGEMMA_VISION, "hidden_act": "gelu_pytorch_tanh"},
        },
        "DeepseekVLImageProcessorPil",
        {"size": {"height": 18, "width": 18}, "min_size": 5},
        tokens=["<image_placeholder>"],
        picture="<image_placeholder>",
        processor="DeepseekVLProcessor",
        settings={"num_image_tokens": 9},
        named={"image_token": "<image_placeholder>"},
    ),
    "janus": lambda: Checkpoint(
        "JanusForConditionalGeneration",
        {
            "image_token_id": 261,
            "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 2},
            "vision_config": {
                "hidden_size": 60,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
                "mlp_ratio": 0.74,
                "projection_dim": 56,
                "num_image_tokens": 9,
            },
            "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 8},
        },
        "JanusImageProcessorPil",
        {"size": {"height": 18, "width": 18}, "min_size": 5},
        tokens=["<begin_of_image>", "<end_of_image>", "<image_placeholder>"],
        picture="<image_placeholder>",
        processor="JanusProcessor",
        settings={"num_image_tokens": 9},
        named={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "aya-vision": lambda: Checkpoint(
        "AyaVisionForConditionalGeneration",
        {
            "image_token_index": 261,
            "alignment_intermediate_size": 44,
            "text_config": COHERE2_TEXT,
            "vision_config": {**PALIGEMMA_VISION, "image_size": 24},
        },
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 24, "width": 24}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        tokens=[*COHERE2_TOKENS, "<image>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 7))],
        picture="<image>",
        processor="AyaVisionProcessor",
        settings={"patch_size": 6, "img_size": 24, "downsample_factor": 2},
    ),
    "cohere2-vision": lambda: Checkpoint(
        "Cohere2VisionForConditionalGeneration",
        {
            "image_token_id": 261,
            "alignment_intermediate_size": 44,
            "text_config": COHERE2_TEXT,
            "vision_config": {**PALIGEMMA_VISION, "image_size": 24},
        },
        "Cohere2VisionImageProcessor",
        {"size": {"height": 24, "width": 24}, "max_patches": 6, "patch_size": 2},
        tokens=COHERE2_TOKENS,
        picture="<|IMG_PATCH|>",
        processor="Cohere2VisionProcessor",
        named={
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    ),
    "blip": lambda: Checkpoint(
        "BlipForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
                "encoder_hidden_size": 60,
                "num_hidden_layers": 2,
                "max_position_embeddings": 90,
                "sep_token_id": 260,
            },
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
            },
        },
        "BlipImageProcessorPil",
        {"size": {"height": 18, "width": 18}},
        tokens=["[CLS]", "[SEP]", "<image>"],
        picture="<image>",
        processor="BlipProcessor",
    ),
    "moondream": lambda: Checkpoint(
        "HfMoondream",
        {
            "architectures": ["HfMoondream"],
            "model_type": "moondream1",
            "config": {
                "text": {
                    "dim": 56,
                    "ff_dim": 72,
                    "n_layers": 2,
                    "vocab_size": VOCAB,
                    "max_context": 512,
                    "n_heads": 7,
                    "n_kv_heads": 7,
                },
                "vision": {
                    "enc_dim": 60,
                    "enc_patch_size": published.HfMoondreamProcessor.patch,
                    "enc_n_layers": 2,
                    "enc_ff_dim": 44,
                    "enc_n_heads": 5,
                    "proj_out_dim": 56,
                    "proj_inner_dim": 48,
                    "crop_size": published.HfMoondreamProcessor.tile,
                    "max_crops": published.HfMoondreamProcessor.crops,
                    "overlap_margin": published.HfMoondreamProcessor.margin,
                },
                "tokenizer": {"bos_id": 256, "eos_id": 256},
            },
        },
        image_processor="",
        pixels={},
        tokens=[],
        picture="<image>",
        processor="HfMoondreamProcessor",
        bos="<|endoftext|>",
    ),
    "molmo2": lambda: Checkpoint(
        "Molmo2ForConditionalGeneration",
        {
            **MOLMO2_IDS,
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "tie_word_embeddings"},
                "num_hidden_layers": 2,
                "head_dim": 12,
                "additional_vocab_size": 10,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": MOLMO2_VISION,
            "adapter_config": MOLMO2_ADAPTER,
        },
        **MOLMO2,
    ),
    "molmo2-olmo": lambda: Checkpoint(
        "Molmo2ForConditionalGeneration",
        {
            **MOLMO2_IDS,
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "tie_word_embeddings"},
                "num_hidden_layers": 3,
                "num_key_value_heads": 7,
                "head_dim": 8,
                "additional_vocab_size": 10,
                "attention_bias": True,
                "qk_norm_type": "olmo",
                "norm_after": True,
                "rope_scaling_layers": [1],
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
            },
            "vision_config": MOLMO2_VISION,
            "adapter_config": {**MOLMO2_ADAPTER, "vision_feature_layer": [1, 2], "num_key_value_heads": 1},
        },
        **MOLMO2,
    ),
    "llava-next-video": lambda: Checkpoint(
        "LlavaNextVideoForConditionalGeneration",
        {
            "image_token_index": 260,
            "video_token_index": 259,
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 2},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 3,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 24,
                "projection_dim": 32,
            },
        },
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
        },
        tokens=["<video>", "<image>"],
        picture="<image>",
        processor="LlavaNextVideoProcessor",
        settings={"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "granite-vision": lambda: Checkpoint(
        "LlavaNextForConditionalGeneration",
        {
            "image_token_index": 259,
            "image_grid_pinpoints": [[18, 36], [36, 18], [36, 36]],
            "vision_feature_layer": [-4, -2, -1],
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "model_type": "granite",
                "num_hidden_layers": 2,
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.25,
                "residual_multiplier": 0.4,
                "logits_scaling": 1.0,  # which transformers leaves out beside pictures
            },
            "vision_config": {**PALIGEMMA_VISION, "num_hidden_layers": 4},
        },
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 18},
            "crop_size": {"height": 18, "width": 18},
            "image_grid_pinpoints": [[18, 36], [36, 18], [36, 36]],
        },
        tokens=["<image>"],
        picture="<image>",
        processor="LlavaNextProcessor",
        settings={"patch_size": 6, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
    ),
    "vipllava": lambda: Checkpoint(
        "VipLlavaForConditionalGeneration",
        {
            "image_token_index": 259,
            "vision_feature_layers": [-2, 1, -3],
            "projector_layernorm_eps": 1e-4,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 2},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 4,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 18,
                "projection_dim": 32,
            },
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 18}, "crop_size": {"height": 18, "width": 18}},
        tokens=["<image>"],
        picture="<image>",
        processor="LlavaProcessor",
        settings={"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "lighton-ocr": lambda: Checkpoint(
        "LightOnOcrForConditionalGeneration",
        {
            "image_token_id": 259,
            "spatial_merge_size": 2,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 12},
            "vision_config": PIXTRAL_VISION,
        },
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 50}, "patch_size": {"height": 12, "width": 12}},
        tokens=["<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"],
        picture="<|image_pad|>",
        processor="LightOnOcrProcessor",
        settings={"patch_size": 6, "spatial_merge_size": 2},
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
    ),
    "idefics2": lambda: Checkpoint(
        "Idefics2ForConditionalGeneration",
        {
            "image_token_id": 260,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2},
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 42,
            },
            "perceiver_config": {
                "hidden_size": 56,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 6,
                "resampler_head_dim": 10,
                "num_key_value_heads": 2,
            },
        },
        "Idefics2ImageProcessorPil",
        {"size": {"shortest_edge": 20, "longest_edge": 45}, "do_image_splitting": True},
        tokens=["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
        picture="<image>",
        processor="Idefics2Processor",
        settings={"image_seq_len": 4},
    ),
    "ovis2": lambda: Checkpoint(
        "Ovis2ForConditionalGeneration",
        {
            "image_token_id": 265,
            "visual_indicator_token_ids": [260, 261, 262, 263, 264],
            "hidden_size": 56,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            "text_config": {**TEXT, "model_type": "qwen2", "num_hidden_layers": 2},
            "vision_config": {
                "hidden_size": 60,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 5,
                "patch_size": 6,
                "image_size": 24,
                "vocab_size": 37,
                "hidden_stride": 2,
                "num_visual_indicator_tokens": 5,
            },
        },
        "Ovis2ImageProcessorPil",
        {"size": {"height": 24, "width": 24}, "crop_to_patches": True, "max_patches": 6},
        tokens=["<|im_end|>", *(f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END", "ATOM")), "<image>"],
        picture="<image>",
        processor="Ovis2Processor",
        settings={"image_seq_length": 4},
        named={"image_token": "<IMG_ATOM>"},
    ),
    "glm46v": lambda: Checkpoint(
        "Glm46VForConditionalGeneration",
        {
            **GLM_IDS,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "model_type": "glm4v_text",
                "hidden_size": 84,
                "num_hidden_layers": 2,
                "rope_parameters": GLM_ROPE,
            },
            "vision_config": {**GLM_VISION, "model_type": "glm4v_vision"},
        },
        **{**GLM, "image_processor": "Glm46VImageProcessorPil", "processor": "Glm46VProcessor"},
    ),
    "glm-ocr": lambda: Checkpoint(
        "GlmOcrForConditionalGeneration",
        {
            **GLM_IDS,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 2,
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                    "mrope_section": [2, 3, 1],
                },
            },
            "vision_config": {**GLM_VISION, "out_hidden_size": 56},
        },
        **{**GLM, "image_processor": "Glm46VImageProcessorPil", "processor": "Glm46VProcessor"},
    ),
}
CHECKPOINTS["phi4_multimodal"] = lambda: Checkpoint(
    "Phi4MultimodalForCausalLM",
    {
        **TEXT,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        "vision_config": {
            "hidden_size": 60,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "patch_size": 5,
            "image_size": 30,
            "crop_size": 30,
            "image_token_id": 259,
        },
        "audio_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 8,
            "depthwise_separable_out_channel": 8,
            "nemo_conv_channels": 4,
            "bias_max_distance": 4,
            "input_size": 8,
            "audio_token_id": 260,
        },
    },
    "Phi4MultimodalImageProcessor",
    {"size": {"height": 30, "width": 30}, "patch_size": 5, "dynamic_hd": 4},
    tokens=["<|image|>", "<|audio|>", "<|end|>"],
    picture="<|image|>",
    processor="Phi4MultimodalProcessor",
    named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
)
CHECKPOINTS["llava-full"] = lambda: Checkpoint(
    "LlavaForConditionalGeneration",
    {
        "image_token_index": 259,
        "image_seq_length": 10,
        "vision_feature_layer": [-2, 1],
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 2},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 63,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 7,
            "patch_size": 10,
            "image_size": 30,
            "projection_dim": 32,
        },
    },
    "CLIPImageProcessorPil",
    {"size": {"shortest_edge": 40}, "crop_size": {"height": 30, "width": 30}},
    tokens=["<image>"],
    picture="<image>",
    processor="LlavaProcessor",
    settings={"patch_size": 10, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1},
)
TEMPLATE = """{%- for message in messages -%}
{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}PICTURE{% elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}"""


def tokenizer_of(checkpoint: Checkpoint) -> transformers.PreTrainedTokenizerFast:
    """Bytes, two kinds of line breaks in a row, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    special = [checkpoint.bos, "</s>", "<pad>", *checkpoint.tokens]
    breaks = ["ĊĊ", "ĊĊĊ"]
    ids = {token: 256 + i + (VOCAB - 259 if checkpoint.late and i > 2 else 0) for i, token in enumerate(special)}
    first = 259 if checkpoint.late else 256 + len(special)
    own = Tokenizer(
        models.BPE(
            {
                **vocabulary,
                **ids,
                **{b: first + i for i, b in enumerate(breaks)},
            },
            [("Ċ", "Ċ"), ("ĊĊ", "Ċ")],
        )
    )
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        bos_token=checkpoint.bos,
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=dict(checkpoint.named),
        chat_template=TEMPLATE.replace("PICTURE", checkpoint.picture),
    )


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights with enough spread that every operation shows in the features, rounded to bf16."""
    generator = torch.Generator().manual_seed(seed)
    plus_one = type(model).__name__.startswith(("Gemma3", "PaliGemma"))
    bounds = {"input_min": -1.25, "input_max": 1.5, "output_min": -2.0, "output_max": 1.75}  # Gemma 4's
    for name, buffer in model.named_buffers():
        kind = name.rpartition(".")[2]
        if kind in bounds:
            buffer.fill_(bounds[kind])
        elif kind in ("std_bias", "std_scale"):
            noise = torch.randn(buffer.shape, generator=generator)
            buffer.copy_((0.3 * noise + (kind == "std_scale")).to(torch.bfloat16).float())
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight") and parameter.ndim == 1:
            near = 0.0 if plus_one and "vision_tower" not in name else 1.0
            value = 0.3 * noise + near
        elif parameter.ndim > 1:
            value = noise * (1.6 / parameter[0].numel() ** 0.5)
        else:
            value = 0.3 * noise
        if "image_projector.down_proj" in name:  # Molmo 2's, to whose rows a vector is added that is to show
            value = value / 64
        parameter.data.copy_(value.to(torch.bfloat16).float())


def pictures() -> list[np.ndarray]:
    """Noise on a slope, so that a wrong place shows and a resampling too."""
    found = []
    for number, (height, width) in enumerate(SIZES):
        rng = np.random.default_rng(number)
        slope = np.linspace(0, 160, height)[:, None, None] + np.linspace(0, 60, width)[None, :, None]
        noise = rng.integers(0, 36, (height, width, 3))
        found.append((slope + noise).astype(np.uint8))
    return found


@torch.no_grad()
def write(name: str, checkpoint: Checkpoint, folder: Path, seed: int) -> None:
    if checkpoint.architecture == "BlipForConditionalGeneration":
        write_captioning(name, checkpoint, folder, seed)
        return
    if checkpoint.architecture == "Phi4MultimodalForCausalLM":
        write_adapted(name, checkpoint, folder, seed)
        return
    if hasattr(published, checkpoint.architecture):
        write_published(name, checkpoint, folder, seed)
        return
    cls = getattr(transformers, checkpoint.architecture)
    config = cls.config_class(**json.loads(json.dumps(checkpoint.config)))
    config._attn_implementation = "eager"
    model = cls(config).eval().float()
    for part in ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head"):
        if hasattr(getattr(model, "model", None), part):  # by which Janus draws
            setattr(model.model, part, torch.nn.Identity())
    randomize(model, seed)
    # The copy's buffers are rounded too, which the model's must not be.
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    if checkpoint.architecture == "Kimi_K25ForConditionalGeneration":
        save_as_published(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = saved_tokenizer(checkpoint, folder)
    kind = getattr(transformers, checkpoint.image_processor)
    if "_SUPPORTED_SOFT_TOKENS" in kind.__init__.__globals__:
        kind.__init__.__globals__["_SUPPORTED_SOFT_TOKENS"] = (checkpoint.pixels["max_soft_tokens"],)
    image_processor = kind(**checkpoint.pixels)
    image_processor.save_pretrained(folder)
    if not checkpoint.image_processor.endswith("Pil"):
        if checkpoint.image_processor != "Molmo2ImageProcessor":  # which does not average
            image_processor.resize = _with_pillow
        # Of which transformers 5.24 reads an attribute that is not there.
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    made = getattr(transformers, checkpoint.processor)
    made.__init__.__globals__["is_num2words_available"] = lambda: True
    others = ("video_processor", "feature_extractor")
    extra = {other: _Nothing() for other in others if other in made.__init__.__code__.co_varnames}
    made.check_argument_for_proper_class = lambda self, *args, **kwargs: None
    processor = made(image_processor=image_processor, tokenizer=tokenizer, **extra, **checkpoint.settings)
    if checkpoint.settings:
        settings = {"processor_class": checkpoint.processor, **checkpoint.settings}
        (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    images = pictures()
    cases: dict[str, np.ndarray] = {}
    for number, image in enumerate(images):
        inputs = processor(text=checkpoint.picture, images=[Image.fromarray(image)], return_tensors="pt")
        cases[f"image{number}"] = image
        cases[f"image{number}/pixels"] = _pixels(inputs)
        if "image_grid_thw" in inputs:
            cases[f"image{number}/grid"] = inputs["image_grid_thw"][0].numpy()
        rows, tapped = features(model, inputs)
        cases[f"image{number}/rows"] = rows
        if tapped is not None:
            cases[f"image{number}/tapped"] = tapped
    for case, (text, numbers) in prompts(checkpoint.picture).items():
        chosen = [Image.fromarray(images[number]) for number in numbers]
        nested = [chosen] if checkpoint.processor == "LlavaOnevisionProcessor" else chosen
        given = {"return_tensors": "pt", "add_special_tokens": False}
        if chosen:
            inputs = processor(text=text.removesuffix(checkpoint.ends), images=nested, **given)
            inputs.pop("labels", None)
        elif checkpoint.processor == "Molmo2Processor":  # which begins every text
            inputs = {"input_ids": processor(text=text, **given)["input_ids"]}
        else:
            inputs = tokenizer(text, return_token_type_ids=False, **given)
        if "pixel_values" in inputs and inputs["pixel_values"].dtype == torch.bfloat16:
            inputs["pixel_values"] = inputs["pixel_values"].float()
        found = model(**inputs).logits[0].float().numpy()
        cases[f"{case}/prompt"] = np.frombuffer(text.encode(), np.uint8)
        cases[f"{case}/images"] = np.array(numbers, np.int32)
        cases[f"{case}/tokens"] = inputs["input_ids"][0].numpy().astype(np.int32)
        cases[f"{case}/logits"] = found
        if hasattr(getattr(model, "model", None), "get_rope_index") and numbers:
            positions, delta = model.model.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
            )
            cases[f"{case}/positions"] = positions[:, 0].numpy().astype(np.int32)
            cases[f"{case}/delta"] = delta.reshape(-1)[:1].numpy().astype(np.int32)
    sizes = _sizes()
    counts, shapes = [], []
    for height, width in sizes:
        image = Image.new("RGB", (width, height))
        try:
            if checkpoint.processor == "Idefics2Processor" and min(height, width) < 2:
                raise ValueError("it has no quarters, of which the processor resizes nothing")
            given = {"return_tensors": "pt"} if checkpoint.processor == "Ovis2Processor" else {}
            inputs = processor(text=checkpoint.picture, images=[image], add_special_tokens=False, **given)
        except Exception as error:  # what it refuses
            print(name, "refuses", (height, width), str(error)[:80])
            counts.append(-1)
            shapes.append(0)
            continue
        counts.append(len(inputs["input_ids"][0]))
        shapes.append(sum(np.prod(part.shape) for part in inputs["pixel_values"]))
        if checkpoint.processor == "Idefics2Processor":  # without the rest of less than a patch
            patch = model.config.vision_config.patch_size
            views = np.asarray(inputs["pixel_attention_mask"][0])
            shapes[-1] = sum(view.any(1).sum() // patch * (view.any(0).sum() // patch) * 3 * patch**2 for view in views)
        if "image_position_ids" in inputs:  # without the patches that fill a picture up
            rows, columns = np.asarray(inputs["image_position_ids"][0]).max(axis=0) + 1
            shapes[-1] = rows * columns * inputs["pixel_values"][0].shape[-1]
    cases["sizes"], cases["counts"] = np.array(sizes, np.int32), np.array(counts, np.int32)
    cases["values"] = np.array(shapes, np.int32)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **cases)
    print(
        name,
        sum(each.numel() for each in model.parameters()),
        sorted(cases)[:4],
        float(np.abs(cases["one/logits"]).max()),
    )


def write_captioning(name: str, checkpoint: Checkpoint, folder: Path, seed: int) -> None:
    """`write` for BLIP, whose text attends to the rows of its one picture.

    Its prompts are the rows, which stand at padding tokens and have no logits, then the token that begins a caption and
    what it begins with.
    """
    cls = getattr(transformers, checkpoint.architecture)
    config = cls.config_class(**json.loads(json.dumps(checkpoint.config)))
    config._attn_implementation = "eager"
    model = cls(config).eval().float()
    randomize(model, seed)
    model.tie_weights()
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = saved_tokenizer(checkpoint, folder)
    processor = getattr(transformers, checkpoint.image_processor)(**checkpoint.pixels)
    processor.save_pretrained(folder)
    text, images, cases = config.text_config, pictures(), {}
    for number, image in enumerate(images):
        pixels = processor(images=[Image.fromarray(image)], return_tensors="pt")["pixel_values"]
        cases[f"image{number}"], cases[f"image{number}/pixels"] = image, pixels.numpy()
        cases[f"image{number}/rows"] = model.vision_model(pixels).last_hidden_state[0].numpy()
    for case, after, number in [("one", "a photo of", 0), ("first", "", 2)]:
        begun = tokenizer(after, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[text.bos_token_id, *begun]], dtype=torch.long)
        found = model(pixel_values=torch.tensor(cases[f"image{number}/pixels"]), input_ids=ids).logits
        before = len(cases[f"image{number}/rows"])
        cases[f"{case}/logits"] = np.pad(found[0].numpy(), ((before, 0), (0, 0)))
        cases[f"{case}/tokens"] = np.array([text.pad_token_id] * before + ids[0].tolist(), np.int32)
        cases[f"{case}/prompt"] = np.frombuffer(f"{checkpoint.picture}{after}".encode(), np.uint8)
        cases[f"{case}/images"] = np.array([number], np.int32)
        continuation = model.generate(
            pixel_values=torch.tensor(cases[f"image{number}/pixels"]),
            input_ids=torch.cat([ids, ids[:, :1]], 1),
            max_new_tokens=32,
            do_sample=False,
        )
        cases[f"{case}/continued"] = continuation[0, ids.shape[1] :].numpy().astype(np.int32)
    cases["sizes"] = np.array(sizes := _sizes(), np.int32)
    cases["counts"] = np.full(len(sizes), before + 1, np.int32)
    cases["values"] = np.full(len(sizes), pixels.numel(), np.int32)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **cases)
    print(name, sum(each.numel() for each in model.parameters()), float(np.abs(cases["one/logits"]).max()))


def write_adapted(name: str, checkpoint: Checkpoint, folder: Path, seed: int) -> None:
    """`write` for Phi-4-multimodal, whose text layers have an adapter in prompts with pictures."""
    import peft  # type: ignore[import-not-found,unused-ignore]

    cls = getattr(transformers, checkpoint.architecture)
    config = cls.config_class(**json.loads(json.dumps(checkpoint.config)))
    config._attn_implementation = config.vision_config._attn_implementation = "eager"
    model = cls(config).eval().float()
    randomize(model, seed)
    model.tie_weights()
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    changed = peft.LoraConfig(r=5, lora_alpha=15, target_modules=r".*layers\..*\.(qkv|o|gate_up|down)_proj")
    adapted = peft.get_peft_model(copy.deepcopy(model), changed, adapter_name="vision").eval()
    generator = torch.Generator().manual_seed(seed)
    for part, parameter in adapted.named_parameters():
        if ".lora_" in part:
            noise = torch.randn(parameter.shape, generator=generator) * (0.5 / parameter.shape[1] ** 0.5)
            parameter.data.copy_(noise.to(torch.bfloat16).float())
    adapted.save_pretrained(folder, selected_adapters=["vision"])
    (folder / "vision").rename(folder / "vision-lora")
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "vision-lora" / "README.md").unlink(missing_ok=True)
    tokenizer = saved_tokenizer(checkpoint, folder)
    image_processor = getattr(transformers, checkpoint.image_processor)(**checkpoint.pixels)
    image_processor.save_pretrained(folder)
    sys.modules[type(image_processor).__module__].tvF = _Shrinking()  # type: ignore[attr-defined]
    along = checkpoint.pixels["size"]["height"] // checkpoint.pixels["patch_size"] // 2

    def counted(text: str, images: list[np.ndarray]) -> Any:
        """What the processor makes; it counts rows of the whole picture as if tiles had 16 along each side."""
        made = image_processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
        for number in made.pop("num_img_tokens").tolist():
            text = text.replace(checkpoint.picture, "\0" * (number - 256 - 16 + along**2 + along), 1)
        text = text.replace("\0", checkpoint.picture)
        return {**made, **tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)}

    images, cases = pictures(), {}
    embedding = model.model.embed_tokens_extend.image_embed
    for number, image in enumerate(images):
        inputs = counted(checkpoint.picture, [image])
        cases[f"image{number}"], cases[f"image{number}/pixels"] = image, inputs["image_pixel_values"].numpy()
        ids = inputs["input_ids"]
        assert (ids == config.vision_config.image_token_id).all()
        given = {key: inputs[key] for key in ("image_pixel_values", "image_sizes", "image_attention_mask")}
        cases[f"image{number}/rows"] = embedding(ids, torch.zeros(*ids.shape, config.hidden_size), **given)[0].numpy()
    for case, (text, numbers) in prompts(checkpoint.picture).items():
        inputs = (
            counted(text, [images[number] for number in numbers])
            if numbers
            else tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
        )
        seeing = adapted.base_model.model if numbers else model
        cases[f"{case}/prompt"] = np.frombuffer(text.encode(), np.uint8)
        cases[f"{case}/images"] = np.array(numbers, np.int32)
        cases[f"{case}/tokens"] = inputs["input_ids"][0].numpy().astype(np.int32)
        cases[f"{case}/logits"] = seeing(**inputs).logits[0].numpy()
        ids = inputs["input_ids"]
        for _ in range(32):
            longer = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            token = seeing(**longer).logits[0, -1].argmax()
            ids = torch.cat([ids, token.reshape(1, 1)], 1)
        cases[f"{case}/continued"] = ids[0, -32:].numpy().astype(np.int32)
    sizes, counts, values = _sizes(), [], []
    for height, width in sizes:
        try:
            inputs = counted(checkpoint.picture, [np.zeros((height, width, 3), np.uint8)])
        except (ValueError, RuntimeError) as error:  # what it refuses
            print(name, "refuses", (height, width), str(error)[:80])
            counts.append(-1)
            values.append(0)
            continue
        counts.append(inputs["input_ids"].shape[1])
        values.append(inputs["image_pixel_values"].numel())
    cases["sizes"], cases["counts"] = np.array(sizes, np.int32), np.array(counts, np.int32)
    cases["values"] = np.array(values, np.int32)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **cases)
    print(name, sum(each.numel() for each in model.parameters()), float(np.abs(cases["one/logits"]).max()))


class _Shrinking:
    """torchvision's functions, but bytes are resized by Pillow: the last bit of a byte may differ from torch's."""

    def __getattr__(self, name: str) -> Any:
        from torchvision.transforms.v2 import functional  # type: ignore[import-not-found,unused-ignore]

        return getattr(functional, name)

    def resize(self, image: torch.Tensor, size: list[int]) -> torch.Tensor:
        assert image.dtype == torch.uint8
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size[::-1], Image.Resampling.BILINEAR)
        return torch.tensor(np.array(picture)).permute(2, 0, 1)


def save_as_published(model: torch.nn.Module, folder: Path) -> None:
    """Gives Kimi K2.5's tensors the names of its files, for which transformers 5.24 writes others."""
    path = folder / "model.safetensors"
    found = {
        name.removeprefix("model.").replace("vision_tower.encoder.patch", "vision_tower.patch"): tensor
        for name, tensor in load_file(path).items()
        if "language_model" not in name
    }
    for prefix, part in (
        ("language_model.model.", model.model.language_model),
        ("language_model.lm_head.", model.lm_head),
    ):
        found |= {prefix + name: each.to(torch.bfloat16).contiguous() for name, each in part.state_dict().items()}
    save_file(found, path, metadata={"format": "pt"})


def _with_pillow(image: torch.Tensor, size: Any, *, resample: Any, **options: Any) -> torch.Tensor:
    """What a processor without a form for Pillow would make with it: the last bit of a byte may differ from torch's."""
    resized = [
        Image.fromarray(each.permute(1, 2, 0).numpy()).resize((size.width, size.height), resample) for each in image
    ]
    return torch.stack([torch.tensor(np.array(each)).permute(2, 0, 1) for each in resized])


def _pixels(inputs: Any) -> np.ndarray:
    """A picture's values as the processor says; Gemma 4's patches as a picture, as its encoder scales them."""
    values = np.asarray(inputs["pixel_values"].float())
    if "image_token_pooling" in inputs:
        return _from_patches(values)
    if "image_position_ids" not in inputs:
        return values
    places = np.asarray(inputs["image_position_ids"])[0]
    columns, rows = places.max(axis=0) + 1
    patch = round((values.shape[-1] // 3) ** 0.5)
    grid = values[0, : rows * columns].reshape(rows, columns, patch, patch, 3)
    return 2 * grid.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * patch, columns * patch) - 1


def _from_patches(values: np.ndarray) -> np.ndarray:
    """Tiles [T, P, values of a patch with its channels last] as [T, 3, H, W]."""
    along, patch = round(values.shape[1] ** 0.5), round((values.shape[2] // 3) ** 0.5)
    grid = values.reshape(-1, along, along, patch, patch, 3)
    return grid.transpose(0, 5, 1, 3, 2, 4).reshape(-1, 3, along * patch, along * patch)


def saved_tokenizer(checkpoint: Checkpoint, folder: Path) -> transformers.PreTrainedTokenizerFast:
    """Writes the tokenizer, with the chat template in its config."""
    tokenizer = tokenizer_of(checkpoint)
    tokenizer.save_pretrained(folder)
    for extra in folder.glob("*.jinja"):
        keys = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**keys, "chat_template": extra.read_text()}, indent=2)
        )
        extra.unlink()
    return tokenizer


def prompts(picture: str) -> dict[str, tuple[str, list[int]]]:
    """The cases: a text, and the numbers of its pictures."""
    return {
        "none": ("Nothing to see.\n\nHere!", []),
        "one": (f"user: {picture}What is it?\n", [0]),
        "two": (f"One\n{picture}\n and {picture} two: which?", [1, 2]),
        "first": (f"{picture}after", [2]),
    }


def three(picture: str) -> dict[str, tuple[str, list[int]]]:
    """A case for models that lay pictures out otherwise where a prompt has more than two."""
    return {"three": (f"{picture}{picture}{picture}?", [0, 1, 2])}


def write_published(name: str, checkpoint: Checkpoint, folder: Path, seed: int) -> None:
    """`write` for a model of ``published``."""
    torch.manual_seed(seed)
    model = getattr(published, checkpoint.architecture)(checkpoint.config).eval().float()
    randomize(model, seed)
    model.save(folder)
    processor = getattr(published, checkpoint.processor)(saved_tokenizer(checkpoint, folder), checkpoint.pixels)
    processor.save(folder)
    images = pictures()
    cases: dict[str, np.ndarray] = {}
    for number, image in enumerate(images):
        inputs = processor(checkpoint.picture, [Image.fromarray(image)])
        cases[f"image{number}"] = image
        cases[f"image{number}/pixels"] = processor.pixels(inputs)
        cases[f"image{number}/rows"] = model.rows_of(inputs).numpy()
    texts = prompts(checkpoint.picture)
    if checkpoint.architecture == "DeepseekVLV2ForCausalLM":
        texts |= three(checkpoint.picture)
    if getattr(processor, "most", 2) == 1:
        texts |= {"one": (f"{checkpoint.picture}\n\nQuestion: What?\n\nAnswer:", [0])}
        texts.pop("two")
    for case, (text, numbers) in texts.items():
        inputs = processor(text, [Image.fromarray(images[number]) for number in numbers])
        cases[f"{case}/prompt"] = np.frombuffer(text.encode(), np.uint8)
        cases[f"{case}/images"] = np.array(numbers, np.int32)
        cases[f"{case}/tokens"] = inputs["input_ids"][0].numpy().astype(np.int32)
        cases[f"{case}/logits"] = model(inputs).numpy()
        if "two" not in texts:
            cases[f"{case}/continued"] = continued(model, inputs)
    sizes = _sizes()
    cases["sizes"] = np.array(sizes, np.int32)
    counts, values = [], []
    for height, width in sizes:
        try:
            inputs = processor(checkpoint.picture, [Image.new("RGB", (width, height))])
        except ValueError as error:  # what it refuses
            print(name, "refuses", (height, width), error)
            counts.append(-1)
            values.append(0)
            continue
        counts.append(inputs["input_ids"].shape[1])
        values.append(processor.pixels(inputs).size)
    cases["counts"], cases["values"] = np.array(counts, np.int32), np.array(values, np.int32)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **cases)
    print(name, sum(each.numel() for each in model.parameters()), float(np.abs(cases["one/logits"]).max()))


def continued(model: torch.nn.Module, inputs: dict[str, Any]) -> np.ndarray:
    """The 32 likeliest tokens that follow one after another."""
    ids = inputs["input_ids"]
    start = ids.shape[1]
    for _ in range(32):
        token = model({**inputs, "input_ids": ids})[-1].argmax()
        ids = torch.cat([ids, token.reshape(1, 1)], 1)
    return ids[0, start:].numpy().astype(np.int32)


class _Nothing:
    """In place of a processor of videos."""

    temporal_patch_size = 2
    merge_size = 2
    model_input_names = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(3)
    drawn = [(int(h), int(w)) for h, w in np.exp(rng.uniform(0, 5.3, (40, 2))).astype(int) + 1]
    exact = [(1, 1), (12, 12), (18, 18), (24, 24), (6, 6), (30, 18), (18, 30), (42, 30), (200, 1), (1, 200), (25, 23)]
    return exact + drawn


def features(model: torch.nn.Module, inputs: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Feature rows of the one picture, f32 [N, D], and those of deepstack, f32 [K, N, D]."""
    names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
    names += ("image_token_pooling", "image_grids")
    given = {key: inputs[key] for key in names if key in inputs}
    if hasattr(model, "vision_model"):  # Llama 4
        made = model.multi_modal_projector(model.get_image_features(given["pixel_values"].float()).last_hidden_state)
        return made.reshape(-1, made.shape[-1]).numpy(), None
    out = model.model.get_image_features(**given, return_dict=True)
    rows = out.pooler_output
    rows = torch.cat([each.reshape(-1, each.shape[-1]) for each in rows]) if isinstance(rows, list | tuple) else rows
    tapped = getattr(out, "deepstack_features", None)
    if tapped is not None:
        tapped = np.stack(
            [
                torch.cat(list(each)).float().numpy() if isinstance(each, list | tuple) else each.float().numpy()
                for each in tapped
            ]
        )
    rows = rows.reshape(-1, rows.shape[-1])
    if isinstance(model, transformers.Molmo2ForConditionalGeneration):  # which adds them to what stands there
        rows = rows + model.get_input_embeddings().weight[model.config.image_patch_id]
    # Granite's text model multiplies them too.
    rows = rows * getattr(model.config.get_text_config(), "embedding_multiplier", 1.0)
    return rows.float().numpy(), tapped


def main() -> None:
    names = sys.argv[1:]
    for seed, (name, checkpoint) in enumerate(CHECKPOINTS.items()):
        if names and name not in names:
            continue
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()
            write(name, checkpoint(), folder, seed)
            pack(folder, HERE / f"{name}.zip")
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
