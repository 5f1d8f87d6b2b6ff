"""The processor that a model's files describe, and keywords in place of what they say."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmjax.errors import InvalidRequest
from llmjax.media.loading import ProcessorSource, source_in
from tests.checkpoints import SEEING
from tests.serve.pictures import png


@cache
def source(name: str) -> ProcessorSource:
    folder = SEEING / name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    return source_in(folder, config, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


# By checkpoint and keywords, numbers in ``pixel_values`` of the golden pictures and their sums, of transformers'
# 5.24 processors (the PIL backend), called with these keywords; Qwen's have each picture twice, as two frames.
KEYWORDS: list[tuple[str, dict[str, Any], list[tuple[int, float]]]] = [
    ("qwen2-vl", {"max_pixels": 1600}, [(24 * 216, 936.56441), (40 * 216, 1588.27473), (32 * 216, 1243.43843)]),
    (
        "qwen2-vl",
        {"min_pixels": 20000, "max_pixels": 30000},
        [(600 * 216, 23433.70014), (616 * 216, 24437.41912), (576 * 216, 22403.08782)],
    ),
    (
        "qwen2-vl",
        {"size": {"shortest_edge": 100, "longest_edge": 2000}},
        [(48 * 216, 1874.88816), (40 * 216, 1588.27473), (40 * 216, 1554.36802)],
    ),
    (
        "qwen2-vl",
        {"image_mean": [0.1, 0.2, 0.3]},
        [(48 * 216, 11548.53717), (40 * 216, 9649.64890), (144 * 216, 34623.76377)],
    ),
    ("internvl", {"max_patches": 2}, [(1728, 376.40072), (3 * 1728, 1150.07556), (3 * 1728, 1126.26693)]),
    ("internvl", {"crop_to_patches": False}, [(1728, 376.40072), (1728, 383.38321), (1728, 375.43350)]),
    ("idefics3", {"do_image_splitting": False}, [(1728, -6.51761), (1728, -3.54506), (1728, -7.12937)]),
    ("idefics3", {"size": {"longest_edge": 52}}, [(17280, -65.58392), (4 * 1728, -14.21945), (7 * 1728, -49.44286)]),
]


@pytest.mark.parametrize(("name", "keywords", "expected"), KEYWORDS, ids=str)
def test_keywords_do_what_transformers_does(
    name: str, keywords: dict[str, Any], expected: list[tuple[int, float]]
) -> None:
    processor = source(name).with_keywords(keywords).processor()
    plain = source(name).processor()
    assert processor is not None and plain is not None
    with np.load(SEEING / name / "golden.npz") as archive:
        files = [png(archive[f"image{number}"]) for number in range(3)]
    for file, (size, total) in zip(files, expected, strict=True):
        prepared = processor.prepare(file)
        frames = 2 if name == "qwen2-vl" else 1
        assert prepared.patches.size * frames == size
        assert prepared.patches.sum(dtype=np.float64) * frames == pytest.approx(total, abs=0.02)
        assert prepared.digest != plain.prepare(file).digest


@pytest.mark.parametrize(
    ("name", "keywords", "reason"),
    [
        ("qwen2-vl", {"max_pixles": 5}, "'max_pixles' is not known to this model's processor, which has .*max_pixels"),
        ("qwen2-vl", {"max_pixels": "many"}, "max_pixels = 'many' must be an integer"),
        ("qwen2-vl", {"patch_size": 3}, "patch_size = 3 is not supported"),
        ("qwen2-vl", {"size": 3}, "size = 3 must be an object"),
        ("qwen2-vl", {"image_token_id": 3}, "'image_token_id' is not known"),
        ("gemma3", {"do_pan_and_scan": "yes"}, "do_pan_and_scan = 'yes' must be"),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 99}, "must be an integer from 1 to 16"),
        ("gemma3", {"size": {"height": 9, "width": 9}}, "which is what the encoder takes"),
        ("idefics3", {"image_mean": [0, 0]}, "must be a list of 3 numbers"),
        ("idefics3", {"image_mean": [0, 0, "x"]}, "image_mean = 'x' must be 0 or a positive number"),
        ("llava-onevision", {"image_mean": [[1], [1], [1]]}, r"image_mean = \[1\] must be 0 or a positive number"),
        ("llava-onevision", {"image_mean": [9, 9, 9]}, "must be numbers from 0 to 1"),
        ("idefics3", {"size": {"longest_edge": 10**9}}, "must have a longest_edge from 1 to"),
    ],
)
def test_keywords_that_are_refused(name: str, keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^mm_processor_kwargs: .*{reason}") as caught:
        source(name).with_keywords(keywords)
    assert caught.value.field == "mm_processor_kwargs"


def test_gemma3_scans_long_pictures_where_keywords_say_so() -> None:
    scanning = source("gemma3").with_keywords({"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}).processor()
    whole = source("gemma3").processor()
    assert scanning is not None and whole is not None
    long = png(np.zeros((100, 400, 3), np.uint8))
    assert len(scanning.prepare(long).patches) > len(whole.prepare(long).patches)


def test_keywords_are_those_of_config_json_where_it_says_how_pictures_are_cut() -> None:
    """InternVL's checkpoints that came with code of their own."""
    config = {
        "architectures": ["InternVLChatModel"],
        "force_image_size": 28,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "max_dynamic_patch": 4,
        "vision_config": {"image_size": 28, "patch_size": 14},
    }
    found = ProcessorSource(config=config, files={}, tokenize=lambda text: [len(text)], path=SEEING)
    picture = png(np.zeros((28, 112, 3), np.uint8))
    counts = []
    for keywords in ({}, {"max_dynamic_patch": 2}, {"max_dynamic_patch": 2, "use_thumbnail": False}):
        processor = found.with_keywords(keywords).processor()
        assert processor is not None
        counts.append(len(processor.prepare(picture).patches) // 4)
    assert counts == [5, 3, 2]
