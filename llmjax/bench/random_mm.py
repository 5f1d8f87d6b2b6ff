"""Random pictures in random prompts: vLLM's ``random-mm`` data set."""

from __future__ import annotations

import ast
import base64
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmjax.bench.dataset import FIRST_RANDOM_ID, MOST_RANDOM_ID, Sample
from llmjax.errors import ConfigError
from llmjax.media.processor import ImageProcessor

MOST_SIDE = 16384  # pixels
Bucket = tuple[int, int]
"""Height and width of a picture."""
DEFAULT_BUCKETS: Mapping[Bucket, float] = {(256, 256): 0.5, (720, 1280): 0.5}


@dataclass(frozen=True, kw_only=True)
class RandomPictures:
    """How many pictures a request has, and how large they are; names follow vLLM's benchmark.

    Args:
        base_items: pictures of a request.
        range_ratio: their number is uniform in ``[(1 - r) * base, (1 + r) * base]``; in [0, 1].
        most: the most pictures of a request.
        buckets: sizes, with the share of pictures that have each.
    """

    base_items: int = 1
    range_ratio: float = 0.0
    most: int = 255
    buckets: Mapping[Bucket, float] = field(default_factory=lambda: DEFAULT_BUCKETS)

    def __post_init__(self) -> None:
        if self.base_items < 0:
            raise ConfigError(f"--random-mm-base-items-per-request must be at least 0, not {self.base_items}")
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"--random-mm-num-mm-items-range-ratio must lie in [0, 1], not {self.range_ratio:g}")

    def added_to(self, samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
        """Prompts with pictures of random pixels, as data: URLs."""
        low = math.floor(self.base_items * (1 - self.range_ratio))
        high = math.ceil(self.base_items * (1 + self.range_ratio))
        sizes, shares = list(self.buckets), np.array(list(self.buckets.values()), np.float64)
        found = []
        for sample in samples:
            count = min(int(rng.integers(low, high + 1)), self.most)
            chosen = rng.choice(len(sizes), count, p=shares / shares.sum())
            pictures = tuple(random_picture(*sizes[int(i)], rng=rng) for i in chosen)
            found.append(dataclasses.replace(sample, pictures=pictures))
        return found


def random_picture(height: int, width: int, *, rng: np.random.Generator) -> str:
    """A JPEG file of random pixels, as a data: URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, format="JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def buckets_of(text: str) -> dict[Bucket, float]:
    """``--random-mm-bucket-config``: shares by height, width and frames, of which pictures have one.

    Raises:
        ConfigError: it is none, or has videos, which are not made here.
    """
    flag = "--random-mm-bucket-config"
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} must be of the form {{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}}, not {text!r}")
    found: dict[Bucket, float] = {}
    for key, share in given.items():
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < math.inf:
            raise ConfigError(f"{flag}: the share of {key} must be a number from 0 on, not {share!r}")
        whole = isinstance(key, tuple) and len(key) == 3 and all(type(one) is int and one > 0 for one in key)
        if not whole or max(key[:2]) > MOST_SIDE:
            raise ConfigError(f"{flag}: {key!r} is not (height, width, frames), with sides of at most {MOST_SIDE}")
        if share and key[2] > 1:
            raise ConfigError(f"{flag}: {key} are frames of a video; pictures alone are made here")
        if share:
            found[key[:2]] = float(share)
    if not found:
        raise ConfigError(f"{flag}: no size has a share above 0")
    return found


def most_pictures(text: str) -> int:
    """``--random-mm-limit-mm-per-prompt``: the most pictures of a request.

    Raises:
        ConfigError: it is none.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    most = given.get("image", 0) if isinstance(given, dict) else None
    if type(most) is not int or most < 0:
        raise ConfigError(
            f'--random-mm-limit-mm-per-prompt must be of the form {{"image": 3, "video": 0}}, not {text!r}'
        )
    return most


def random_text(processor: ImageProcessor, length: int, *, vocab_size: int, rng: np.random.Generator) -> list[int]:
    """Random token ids, none of which could stand for a picture.

    Args:
        processor: the processor that the model has.
        length: tokens of the text.
        vocab_size: tokens of the vocabulary.
    """
    below = min(MOST_RANDOM_ID, vocab_size)
    first = min(FIRST_RANDOM_ID, below // 2)
    special = {*processor.placeholder, *processor.video_placeholder}
    plain = np.array([token for token in range(first, below) if token not in special])
    return [int(token) for token in rng.choice(plain, length)]
