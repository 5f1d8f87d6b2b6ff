"""Writes ``video/<name>.npz`` beside it: what transformers makes of a video with the golden checkpoints.

Needs what ``make_golden`` does, which writes those first:

    python -m tests.models.vision.golden.make_video [name ...]

An archive holds ``config``, a video_preprocessor_config.json; ``frames`` u8 [T, H, W, 3], which have the size that the
processor gives them, their ``indices`` and the video's ``total`` and ``fps``; ``pixels`` and, where positions have
three axes, ``grid`` of the processor; ``odd`` frames of another size with ``odd/pixels``; ``rows`` f32 [N, D] and
``tapped`` f32 [K, N, D], the feature rows; ``prompt``, ``tokens``, ``logits`` f32 [n, V] and, with three axes,
``positions`` i32 [3, n] and ``delta`` of a prompt with the video and, except for GLM-4V and Molmo 2, then picture 0;
``videos`` f64 [m, 2], frames and frames a second of other videos, and ``sampled/<i>``, which of their frames are taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from PIL import Image
from transformers.video_utils import VideoMetadata  # type: ignore[import-not-found,unused-ignore]

from tests.checkpoints import SEEING
from tests.models.vision.golden.make_golden import CHECKPOINTS, _from_patches

OUT = Path(__file__).parent / "video"
SIZE = {"patch_size": 6, "temporal_patch_size": 2, "merge_size": 2}
# The processor, its settings, and what stands for a video in the prompt given to it and in ours.
VIDEOS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "qwen2-vl": (
        "Qwen2VLVideoProcessor",
        {**SIZE, "size": {"shortest_edge": 576, "longest_edge": 2000}},
        *["<|vision_start|><|video_pad|><|vision_end|>"] * 2,
    ),
    "qwen2_5-vl": (
        "Qwen2VLVideoProcessor",
        {**SIZE, "size": {"shortest_edge": 576, "longest_edge": 2000}},
        *["<|vision_start|><|video_pad|><|vision_end|>"] * 2,
    ),
    # Before transformers 5 this processor replaced the tokens around the placeholder too, as models are trained.
    "qwen3-vl": (
        "Qwen3VLVideoProcessor",
        {**SIZE, "size": {"shortest_edge": 1152, "longest_edge": 8001}, "cap_pixels_per_frame": False},
        "<|video_pad|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "glm4v": (
        "Glm4vVideoProcessor",
        {**SIZE, "size": {"shortest_edge": 1152, "longest_edge": 8001}},
        *["<|begin_of_video|><|video|><|end_of_video|>"] * 2,
    ),
    "glm46v": (
        "Glm46VVideoProcessor",
        {**SIZE, "size": {"shortest_edge": 1152, "longest_edge": 8001}},
        *["<|begin_of_video|><|video|><|end_of_video|>"] * 2,
    ),
    "llava-next-video": (
        "LlavaNextVideoVideoProcessor",
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "num_frames": 6},
        *["<video>"] * 2,
    ),
    "llava-onevision": (
        "LlavaOnevisionVideoProcessor",
        {"size": {"height": 18, "width": 18}, "num_frames": 6},
        *["<video>"] * 2,
    ),
    "molmo2": (
        "Molmo2VideoProcessor",
        {
            "size": {"height": 30, "width": 30},
            "patch_size": 6,
            "pooling_size": [3, 3],
            "num_frames": 6,
            "max_fps": 2,
            "do_rescale": True,
            "do_normalize": True,
        },
        *["<|video|>"] * 2,
    ),
}
# Heights and widths that are not resized.
KNOWN = {"llava-next-video": (24, 35), "llava-onevision": (18, 18), "molmo2": (30, 30)}
TAKEN, TOTAL = [0, 4, 8, 13, 19], 21
# Frames of Qwen2.5-VL's are so near in time that transformers 5 goes on after the last of them, as models are trained.
FPS = {**dict.fromkeys(VIDEOS, 7.5), "qwen2_5-vl": 30.0}
OTHERS = [(7, 24.0), (30, 29.97), (100, 23.976), (61, 30.0), (1000, 25.0), (2000, 60.0), (33, 10.0), (20000, 24.0)]


def frames(height: int, width: int) -> np.ndarray:
    """Noise on a slope that moves."""
    found = []
    for number in range(len(TAKEN)):
        rng = np.random.default_rng(number)
        down, across = np.linspace(0, 150 - 20 * number, height), np.linspace(10 * number, 60, width)
        slope = down[:, None, None] + across[None, :, None]
        found.append((slope + rng.integers(0, 36, (height, width, 3))).astype(np.uint8))
    return np.stack(found)


@torch.no_grad()
def write(name: str) -> None:
    kind, settings, given, ours = VIDEOS[name]
    folder, checkpoint = SEEING / name, CHECKPOINTS[name]()
    model = getattr(transformers, checkpoint.architecture).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pictures = getattr(transformers, checkpoint.image_processor)(**checkpoint.pixels)
    videos = getattr(transformers, kind)(**settings)
    three = hasattr(model.model, "get_rope_index")  # axes of positions
    made = getattr(transformers, checkpoint.processor)
    made.check_argument_for_proper_class = lambda self, *args, **kwargs: None
    processor = made(image_processor=pictures, tokenizer=tokenizer, video_processor=videos, **checkpoint.settings)
    clip, metadata = (
        frames(*KNOWN.get(name, (36, 48))),
        VideoMetadata(total_num_frames=TOTAL, fps=FPS[name], frames_indices=list(TAKEN)),
    )
    with np.load(folder / "golden.npz") as archive:
        picture = archive["image0"]
    alone = name.startswith(("glm4", "molmo2"))  # of which transformers takes a video or pictures, not both
    text = "See\n%s\n which?" if alone else f"See\n%s\n and {checkpoint.picture} which?"
    inputs = processor(
        text=text % given,
        images=None if alone else [Image.fromarray(picture)],
        videos=[torch.tensor(clip).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
        add_special_tokens=False,
    )
    inputs = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor | list)}
    names = ("pixel_values_videos", "video_grid_thw", "video_token_pooling", "video_grids")
    out = model.model.get_video_features(*(inputs[key] for key in names if key in inputs), return_dict=True)
    rows = out.pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows.flatten(0, 1)
    if name == "molmo2":  # which adds them to what stands there
        rows = rows + model.get_input_embeddings().weight[model.config.image_patch_id]
    cases = {
        "config": np.frombuffer(json.dumps(settings).encode(), np.uint8),
        "frames": clip,
        "indices": np.array(TAKEN),
        "total": np.array(TOTAL),
        "fps": np.array(FPS[name]),
        "pixels": inputs["pixel_values_videos"].numpy(),
        **({"grid": inputs["video_grid_thw"][0].numpy()} if three else {}),
        "odd": (odd := frames(40, 57)),
        "odd/pixels": videos([torch.tensor(odd).permute(0, 3, 1, 2)], do_sample_frames=False)["pixel_values_videos"],
        "rows": rows.numpy(),
        "prompt": np.frombuffer((text % ours).encode(), np.uint8),
        "tokens": inputs["input_ids"][0].numpy().astype(np.int32),
        "logits": model(**{key: value for key, value in inputs.items() if key != "video_metadata"}).logits[0].numpy(),
    }
    if (tapped := getattr(out, "deepstack_features", None)) is not None:
        cases["tapped"] = np.stack(
            [torch.cat(list(each)) if isinstance(each, list | tuple) else each for each in tapped]
        )
    if three:
        keys = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        known = {key: inputs[key] for key in keys if key in inputs}
        positions, delta = model.model.get_rope_index(inputs["input_ids"], **known)
        cases["positions"], cases["delta"] = positions[:, 0].numpy().astype(np.int32), delta.reshape(-1)[:1].numpy()
    cases["odd/pixels"] = np.asarray(cases["odd/pixels"])
    if name == "molmo2":
        cases |= {key: _from_patches(cases[key]) for key in ("pixels", "odd/pixels")}
    cases["videos"] = np.array(OTHERS)
    for number, (total, fps) in enumerate(OTHERS):
        of = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        most = settings.get("num_frames", 0)
        if name.startswith("llava") and most > total:  # which transformers refuses
            continue
        taken = videos.sample_frames(of, **({} if most else {"fps": 2}))
        cases[f"sampled/{number}"] = np.array(taken)
    OUT.mkdir(exist_ok=True)
    np.savez_compressed(OUT / f"{name}.npz", allow_pickle=False, **cases)
    print(name, cases["pixels"].shape, cases["tokens"].tolist())


if __name__ == "__main__":
    for each in sys.argv[1:] or VIDEOS:
        write(each)
