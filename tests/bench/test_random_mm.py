"""Random pictures in the prompts of a benchmark."""

from __future__ import annotations

import base64
import io
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmjax.bench import serve
from llmjax.bench.backends import BACKENDS
from llmjax.bench.options import DatasetOptions
from llmjax.bench.random_mm import buckets_of, most_pictures, random_text
from llmjax.errors import ConfigError


def size_of(url: str) -> tuple[int, int]:
    head, _, body = url.partition(",")
    assert head == "data:image/jpeg;base64"
    width, height = Image.open(io.BytesIO(base64.b64decode(body))).size
    return height, width


def options(**changes: object) -> DatasetOptions:
    return DatasetOptions(dataset_name="random-mm", num_prompts=40, input_len=5, output_len=3, **changes)  # type: ignore[arg-type]


def test_sizes_come_by_their_shares_and_numbers_within_their_range() -> None:
    changes = {
        "random_mm_base_items_per_request": 3,
        "random_mm_num_mm_items_range_ratio": 0.5,
        "random_mm_bucket_config": "{(8, 16, 1): 3, (24, 8, 1): 1, (9, 9, 1): 0, (8, 8, 16): 0.0}",
        "random_mm_limit_mm_per_prompt": '{"image": 4, "video": 0}',
    }
    samples = options(**changes).samples(seed=1, count_tokens=len)
    assert samples == options(**changes).samples(seed=1, count_tokens=len)
    assert all((len(sample.prompt), sample.output_tokens) == (5, 3) for sample in samples)
    assert set(Counter(len(sample.pictures) for sample in samples)) == {1, 2, 3, 4}  # of 1 to 5, four at most
    sizes = Counter(size_of(url) for sample in samples for url in sample.pictures)
    assert set(sizes) == {(8, 16), (24, 8)}
    assert sizes[8, 16] > 2 * sizes[24, 8]
    pictures = [url for sample in samples for url in sample.pictures]
    assert len(set(pictures)) == len(pictures)


def test_pictures_follow_the_text_in_each_api() -> None:
    changes = {"random_mm_bucket_config": "{(8, 8, 1): 1}"}
    sample = options(**changes).samples(seed=0, count_tokens=len)[0]
    (message,) = BACKENDS["openai-chat"].fields(sample)["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][1]["image_url"]["url"] == sample.pictures[0]
    (item,) = BACKENDS["openai-responses"].fields(sample)["input"]
    assert [part["type"] for part in item["content"]] == ["input_text", "input_image"]
    plain = DatasetOptions(num_prompts=1).samples(seed=0, count_tokens=len)[0]
    assert BACKENDS["openai-responses"].fields(plain)["input"] == plain.prompt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backend openai", "--dataset-name random-mm goes with --backend openai-chat or openai-responses"),
        ("--random-mm-base-items-per-request -1", "--random-mm-base-items-per-request must be at least 0"),
        ("--random-mm-num-mm-items-range-ratio 1.5", "--random-mm-num-mm-items-range-ratio must lie in [0, 1]"),
        ("--random-mm-bucket-config {(8,8,16):1}", "--random-mm-bucket-config: (8, 8, 16) are frames of a video"),
        ("--random-mm-bucket-config {(8,8):1}", "--random-mm-bucket-config: (8, 8) is not (height, width, frames)"),
        ("--random-mm-bucket-config {(8,99999,1):1}", "--random-mm-bucket-config: (8, 99999, 1) is not"),
        ("--random-mm-bucket-config {(8,8,1):'x'}", "--random-mm-bucket-config: the share of (8, 8, 1) must be"),
        ("--random-mm-bucket-config {(8,8,1):0}", "--random-mm-bucket-config: no size has a share above 0"),
        ("--random-mm-bucket-config __import__('os')", "--random-mm-bucket-config must be of the form"),
        ("--random-mm-limit-mm-per-prompt 3", "--random-mm-limit-mm-per-prompt must be of the form"),
    ],
)
def test_what_cannot_be_says_so(line: str, message: str) -> None:
    backend = [] if "--backend" in line else ["--backend", "openai-chat"]
    with pytest.raises(ConfigError) as error:
        serve.parse(["--dataset-name", "random-mm", *backend, *line.split(" ")])
    assert str(error.value).startswith(message)


def test_the_command_line_of_vllms_documentation() -> None:
    """https://docs.vllm.ai/en/latest/benchmarking/cli/, of synthetic random images."""
    line = [
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random-mm",
        "--num-prompts", "100", "--max-concurrency", "10", "--random-prefix-len", "25", "--random-input-len", "300",
        "--random-output-len", "40", "--random-range-ratio", "0.2", "--random-mm-base-items-per-request", "2",
        "--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 0}', "--random-mm-bucket-config",
        "{(256, 256, 1): 0.25, (720, 1280, 1): 0.75}", "--request-rate", "inf", "--ignore-eos", "--seed", "42",
    ]  # fmt: skip
    pictures = serve.parse(line).dataset.pictures()
    assert (pictures.base_items, pictures.most) == (2, 3)
    assert (
        pictures.buckets
        == {(256, 256): 0.25, (720, 1280): 0.75}
        == buckets_of(str({(256, 256, 1): 0.25, (720, 1280, 1): 0.75}))
    )
    assert most_pictures("{}") == 0


def test_random_texts_have_no_placeholder() -> None:
    processor: Any = SimpleNamespace(placeholder=(7, 8), video_placeholder=(9,))
    text = random_text(processor, 200, vocab_size=12, rng=np.random.default_rng(0))
    assert len(text) == 200 and set(text) == {6, 10, 11}
