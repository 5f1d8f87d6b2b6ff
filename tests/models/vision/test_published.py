"""What well-known checkpoints' files say of pictures, as far as it differs from defaults, and what is read of it."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.models import UnsupportedModel
from llmjax.models.nested import text_config
from llmjax.models.vision.preparation import (
    Cropped,
    FilledGrid,
    Layout,
    Padded,
    PaddedViews,
    PanAndScan,
    Pinpoints,
    ShownTiles,
    Slices,
    SmartResize,
    Split,
    Stretched,
)
from llmjax.models.vision.registry import preparation_of, vision_spec_of

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], Layout]] = {
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "image_token_id": 151655,
            "hidden_size": 3584,
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
        },
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        (32, 1280, 3584, 1176),
        SmartResize(unit=28, min_pixels=3136, max_pixels=12845056),
    ),
    "google/gemma-3-27b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "text_config": {"hidden_size": 5376, "model_type": "gemma3_text"},
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        {"do_pan_and_scan": None, "resample": 2, "size": {"height": 896, "width": 896}},
        (27, 1152, 5376, 588),
        Stretched(height=896, width=896),
    ),
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 49190,
            "scale_factor": 4,
            "text_config": {"hidden_size": 576, "model_type": "llama"},
            "vision_config": {
                "hidden_size": 768,
                "image_size": 512,
                "max_image_size": {"longest_edge": 512},
                "num_attention_heads": 12,
                "patch_size": 16,
                "size": {"longest_edge": 2048},
            },
        },
        {
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 512},
            "resample": 1,
            "size": {"longest_edge": 2048},
        },
        (12, 768, 576, 768),
        Split(longest=2048, tile=512),
    ),
    "google/paligemma-3b-mix-224": (
        {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "image_token_index": 257152,
            "projection_dim": 2048,
            "text_config": {"hidden_size": 2048, "model_type": "gemma", "vocab_size": 257216},
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "projection_dim": 2048,
                "projector_hidden_act": "gelu_fast",
                "vision_use_head": False,
            },
        },
        {"resample": 3, "size": {"height": 224, "width": 224}, "image_seq_length": 256},
        (27, 1152, 2048, 588),
        Stretched(height=224, width=224),
    ),
    "microsoft/Phi-3.5-vision-instruct": (
        {
            "architectures": ["Phi3VForCausalLM"],
            "model_type": "phi3_v",
            "hidden_size": 3072,
            "embd_layer": {
                "embedding_cls": "image",
                "hd_transform_order": "sub_glb",
                "projection_cls": "mlp",
                "use_hd_transform": True,
                "with_learnable_separator": True,
            },
            "img_processor": {
                "image_dim_out": 1024,
                "model_name": "openai/clip-vit-large-patch14-336",
                "name": "clip_vision_model",
                "num_img_tokens": 144,
            },
        },
        {"num_crops": 4, "num_img_tokens": 144},
        (23, 1024, 3072, 588),
        FilledGrid(tile=336, most=4),
    ),
    "microsoft/Phi-4-multimodal-instruct": (
        {
            "architectures": ["Phi4MMForCausalLM"],
            "model_type": "phi4mm",
            "hidden_size": 3072,
            "embd_layer": {
                "audio_embd_layer": {"embedding_cls": "audio", "projection_cls": "mlp"},
                "embedding_cls": "image_audio",
                "image_embd_layer": {
                    "crop_size": 448,
                    "embedding_cls": "tune_image",
                    "enable_gradient_checkpointing": True,
                    "hd_transform_order": "sub_glb",
                    "image_token_compression_cls": "avg_pool_2d",
                    "projection_cls": "mlp",
                    "use_hd_transform": True,
                    "with_learnable_separator": True,
                },
            },
            "img_processor": None,
            "vision_lora": {"dp": 0.0, "lora_alpha": 512, "r": 256},
        },
        {"dynamic_hd": 36, "audio_compression_rate": 8, "image_processor_type": "Phi4MMImageProcessor"},
        (26, 1152, 3072, 588),
        ShownTiles(tile=448, most=36),
    ),
    "microsoft/Phi-4-multimodal-instruct, converted": (
        {
            "architectures": ["Phi4MultimodalForCausalLM"],
            "model_type": "phi4_multimodal",
            "hidden_size": 3072,
            "vision_config": {"crop_size": 448, "feature_layer": -2, "image_token_id": 200010},
        },
        {"dynamic_hd": 36, "size": {"height": 448, "width": 448}, "patch_size": 14, "resample": 3},
        (26, 1152, 3072, 588),
        ShownTiles(tile=448, most=36),
    ),
    "openbmb/MiniCPM-V-2_6": (
        {
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "version": 2.6,
            "hidden_size": 3584,
            "query_num": 64,
            "image_size": 448,
            "drop_vision_last_layer": False,
            "slice_config": {"max_slice_nums": 9, "patch_size": 14, "model_type": "minicpmv"},
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 980,
                "intermediate_size": 4304,
                "model_type": "siglip",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        {"max_slice_nums": 9, "scale_resolution": 448, "use_image_id": True, "norm_mean": [0.5] * 3, "version": 2.6},
        (27, 1152, 3584, 588),
        Slices(side=448, most=9, rows=64),
    ),
    "moonshotai/Kimi-VL-A3B-Instruct": (
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "media_placeholder_token_id": 163605,
            "text_config": {"hidden_size": 2048, "model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 1152,
                "init_pos_emb_height": 64,
                "init_pos_emb_width": 64,
                "intermediate_size": 4304,
                "merge_kernel_size": [2, 2],
                "model_type": "moonvit",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        {"in_token_limit": 4096, "patch_size": 14, "pad_input": True, "merge_kernel_size": [2, 2]},
        (27, 1152, 2048, 588),
        Padded(unit=28, patch=14, most=4096, longest=511, shrunk=False),
    ),
    "moonshotai/Kimi-K2.5": (
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": {"hidden_size": 7168, "model_type": "kimi_k2"},
            "vision_config": {
                "init_pos_emb_height": 64,
                "init_pos_emb_width": 64,
                "merge_kernel_size": [2, 2],
                "mm_hidden_size": 1152,
                "patch_size": 14,
                "projector_ln_eps": 1e-05,
                "vt_hidden_size": 1152,
                "vt_intermediate_size": 4304,
                "vt_num_attention_heads": 16,
                "vt_num_hidden_layers": 27,
            },
        },
        {
            "media_proc_cfg": {
                "fixed_output_tokens": None,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "in_patch_limit": 16384,
                "merge_kernel_size": 2,
                "patch_limit_on_one_side": 512,
                "patch_size": 14,
            }
        },
        (27, 1152, 7168, 588),
        Padded(unit=28, patch=14, most=16384, longest=512, shrunk=True),
    ),
    "deepseek-ai/deepseek-vl2-tiny": (
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "candidate_resolutions": [[384, 384], [768, 384]],
            "global_view_pos": "head",
            "language_config": {"hidden_size": 1280, "model_type": "deepseek_v2", "use_mla": False},
            "projector_config": {"model_type": "mlp_projector", "n_embed": 1280},
            "tile_tag": "2D",
            "vision_config": {
                "layers": 27,
                "mlp_ratio": 3.7362,
                "model_name": "siglip_so400m_patch14_384",
                "patch_size": 14,
                "width": 1152,
            },
        },
        {"downsample_ratio": 2, "image_mean": [0.5, 0.5, 0.5], "normalize": True, "patch_size": 14},
        (27, 1152, 1280, 588),
        PaddedViews(sizes=((384, 384), (384, 768)), tile=384, color=(127, 127, 127)),
    ),
    "llava-hf/llava-1.5-7b-hf": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "projector_hidden_act": "gelu",
            "text_config": {"hidden_size": 4096, "model_type": "llama"},
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
        {
            "crop_size": {"height": 336, "width": 336},
            "do_center_crop": True,
            "resample": 3,
            "size": {"shortest_edge": 336},
        },
        (23, 1024, 4096, 588),
        Cropped(shortest=336, crop=336),
    ),
    "llava-hf/LLaVA-NeXT-Video-7B-hf": (
        {
            "architectures": ["LlavaNextVideoForConditionalGeneration"],
            "model_type": "llava_next_video",
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
            "image_token_index": 32001,
            "video_token_index": 32000,
            "spatial_pool_mode": "average",
            "spatial_pool_stride": 2,
            "text_config": {"model_type": "llama", "hidden_size": 4096},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        {"crop_size": {"height": 336, "width": 336}, "resample": 3, "size": {"shortest_edge": 336}},
        (23, 1024, 4096, 588),
        Pinpoints(sizes=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), tile=336),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    config, processor, sizes, layout = PUBLISHED[name]
    spec, preparation = vision_spec_of(config), preparation_of(config, processor)
    assert spec is not None and preparation is not None
    assert (len(spec.layers), spec.size, spec.out, spec.patch_values) == sizes
    assert preparation.layout == layout


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("google/gemma-3-27b-it", "mm_tokens_per_image", 200, "is not a square"),
        ("llava-hf/llava-1.5-7b-hf", "vision_feature_layer", [-2, 0], "from -24 to 24, not 0"),
        ("llava-hf/LLaVA-NeXT-Video-7B-hf", "vision_feature_select_strategy", "full", "not supported for this encoder"),
        ("llava-hf/LLaVA-NeXT-Video-7B-hf", "spatial_pool_mode", "conv", "is not supported"),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", "scale_factor", 5, "does not divide 32 patches a side"),
    ],
)
def test_what_is_not_supported_is_named(name: str, key: str, value: Any, words: str) -> None:
    config = {**PUBLISHED[name][0], key: value}
    with pytest.raises(UnsupportedModel, match=words) as error:
        vision_spec_of(config)
    assert key in str(error.value)


def test_pan_and_scan_has_the_processors_sizes_where_files_say_null() -> None:
    config, processor, *_ = PUBLISHED["google/gemma-3-27b-it"]
    null = dict.fromkeys(
        ("pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")
    )
    made = preparation_of(config, {**processor, **null, "do_pan_and_scan": True})
    assert made is not None and made.layout == PanAndScan(tile=896, least=256, most=4, ratio=1.2)


def test_text_models_of_deepseek_vl2_are_of_three_kinds() -> None:
    config = PUBLISHED["deepseek-ai/deepseek-vl2-tiny"][0]
    for keys, architecture in [
        ({"use_mla": False}, "DeepseekForCausalLM"),
        ({"use_mla": True}, "DeepseekV2ForCausalLM"),
        ({"use_mla": True, "topk_method": "noaux_tc"}, "DeepseekV3ForCausalLM"),
    ]:
        text = text_config({**config, "language_config": {**config["language_config"], **keys}})
        assert text is not None and text["architectures"] == [architecture] and "use_mla" not in text


def test_text_models_do_not_see() -> None:
    assert vision_spec_of({"architectures": ["LlamaForCausalLM"]}) is None
    assert vision_spec_of({"architectures": ["Gemma3ForConditionalGeneration"]}) is None


def test_versions_whose_formulas_differ_are_refused_by_name() -> None:
    config = PUBLISHED["openbmb/MiniCPM-V-2_6"][0]
    for version, architecture in ((2.6, "Qwen2"), (4.0, "Llama"), (4.5, "Qwen3")):
        text = text_config({**config, "version": version})
        assert text is not None and text["architectures"] == [f"{architecture}ForCausalLM"]
    for version in (2.5, 2, None):
        with pytest.raises(UnsupportedModel, match=r"version = .* is not supported; supported are 2\.6, 4\.0, 4\.5"):
            text_config({**config, "version": version})
