"""Families against transformers: what the processor makes of pictures, tokens, positions, and feature rows."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage
from llmjax.media.loading import image_processor_of
from llmjax.media.processor import PillowProcessor
from llmjax.media.prompt import MediaPrompt, mrope_positions, with_images
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.functional import abstract_encoder, encode
from llmjax.models.vision.packing import bucket, pack
from tests.checkpoints import SEEING

NAMES = sorted(path.name for path in SEEING.iterdir())
ATOL = 2e-4


@dataclass(frozen=True)
class Family:
    """A golden checkpoint with what transformers says of it."""

    folder: Path
    checkpoint: Checkpoint
    processor: PillowProcessor
    tokenizer: Tokenizer
    golden: dict[str, np.ndarray]

    def prepared(self, number: int, *, several: bool = False) -> PreparedImage:
        """One of the golden pictures."""
        return self.processor.prepare(png(self.golden[f"image{number}"]), several=several)


@cache
def family(name: str) -> Family:
    folder = SEEING / name
    checkpoint = open_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = image_processor_of(
        folder, checkpoint.whole_config, lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    assert processor is not None
    with np.load(folder / "golden.npz") as archive:
        golden = dict(archive)
    return Family(folder, checkpoint, processor, tokenizer, golden)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def encoded(
    checkpoint: Checkpoint, images: list[PreparedImage], *, dtype: Any = jnp.float32
) -> tuple[np.ndarray, np.ndarray]:
    spec = checkpoint.vision
    assert spec is not None
    graph, shapes = abstract_encoder(spec, dtype=dtype, activation_dtype=dtype)
    tensors = checkpoint.vision_tensors
    assert {name: like.shape for name, like in shapes.items()} == {name: each.shape for name, each in tensors.items()}
    params = {name: jnp.asarray(tensors[name].read(np.dtype(np.float32)), like.dtype) for name, like in shapes.items()}
    arrays = pack(spec, images, patches=bucket(spec, sum(len(image.patches) for image in images)))
    batch = PatchBatch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    out = jax.jit(lambda params, batch: encode(graph, params, batch))(params, batch)
    rows = sum(image.num_rows for image in images)
    return np.asarray(out.rows, np.float32)[:rows], np.asarray(out.tapped, np.float32)[:, :rows]


def in_transformers_order(image: PreparedImage, processor: PillowProcessor, golden: np.ndarray) -> np.ndarray:
    """Our patches as transformers' tensor of the same picture."""
    preparation = processor.preparation
    patch, side = preparation.patch, preparation.side
    tiles, rows, columns = image.grid
    if golden.ndim == 4 and golden.shape[-1] != patch and golden.shape[-2:] != (rows * patch, columns * patch):
        return as_padded(image, patch, golden)
    if golden.shape[-1] == patch:  # patches one after another, of tiles that differ
        lines = image.patches
        if side > 1:
            lines = lines.reshape(rows // side, columns // side, side, side, -1).swapaxes(1, 2)
        return lines.reshape(golden.shape)
    if golden.ndim == 2:  # patches with their frames
        frames = golden.shape[1] // image.patches.shape[1]
        return np.repeat(image.patches.reshape(len(golden), 3, 1, -1), frames, axis=2).reshape(golden.shape)
    squares = image.patches.reshape(tiles, rows // side, columns // side, side, side, 3, patch, patch)
    return squares.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(tiles, 3, rows * patch, columns * patch)


def as_padded(image: PreparedImage, patch: int, golden: np.ndarray) -> np.ndarray:
    """Tiles of several sizes in the corner of what others, and rests of less than a patch, are in."""
    found, start = golden.copy(), 0
    grids = [grid[1:] for grid in (image.grid, *image.further) for _ in range(grid[0])]
    assert len(grids) == len(golden)
    for tile, (rows, columns) in zip(found, grids, strict=True):
        lines = image.patches[start : start + rows * columns].reshape(rows, columns, 3, patch, patch)
        tile[:, : rows * patch, : columns * patch] = lines.transpose(2, 0, 3, 1, 4).reshape(3, rows * patch, -1)
        start += rows * columns
    return found


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_prepared_as_by_transformers(name: str) -> None:
    each = family(name)
    for number in range(3):
        image, golden = each.prepared(number), each.golden[f"image{number}/pixels"]
        golden = golden.reshape(-1, *golden.shape[-3:]) if golden.ndim == 5 else golden
        found = in_transformers_order(image, each.processor, golden)
        np.testing.assert_allclose(found, golden[: len(found)], atol=1e-5)
        assert not golden[len(found) :].any()  # a batch's padding
        if f"image{number}/grid" in each.golden:
            assert image.grid == tuple(each.golden[f"image{number}/grid"])
        rows = sum(token in each.processor.row_token_ids for token in image.tokens)
        # Rows of texts around tiles are none of transformers' features.
        learned = rows - image.tokens.count(each.processor.row_token_id)
        assert image.num_rows == len(each.golden[f"image{number}/rows"]) + learned == rows


@pytest.mark.parametrize("name", NAMES)
def test_every_size_has_as_many_tokens_as_in_transformers(name: str) -> None:
    each = family(name)
    picture = each.golden["first/prompt"].tobytes().decode().removesuffix("after")
    pixels = each.golden["image0/pixels"]
    frames = pixels.shape[1] // each.prepared(0).patches.shape[1] if pixels.ndim == 2 else 1
    for (height, width), count, values in zip(
        each.golden["sizes"].tolist(), each.golden["counts"].tolist(), each.golden["values"].tolist(), strict=True
    ):
        data = png(np.zeros((height, width, 3), np.uint8))
        if count < 0:
            with pytest.raises(InvalidRequest):
                each.processor.prepare(data)
            continue
        image = each.processor.prepare(data)
        assert len(placed(each, picture, [image]).ids) == count, (height, width)
        assert image.patches.size * frames == values, (height, width)


def placed(each: Family, text: str, images: list[PreparedImage]) -> MediaPrompt:
    """The tokens of a prompt with pictures."""
    processor = each.processor
    ids = [*processor.first, *each.tokenizer.encode(processor.spelled(text), add_special_tokens=False).ids]
    return with_images(
        ids,
        images,
        placeholder=processor.placeholder,
        line_breaks=processor.line_breaks,
        counted=processor.counted,
        frame=processor.frame,
        fence=processor.fence,
    )


@pytest.mark.parametrize("case", ["none", "one", "two", "first"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_same_tokens_and_positions(name: str, case: str) -> None:
    each = family(name)
    if f"{case}/images" not in each.golden:  # a prompt must have one picture
        assert each.processor.sole and case in ("none", "two")
        return
    numbers = each.golden[f"{case}/images"].tolist()
    images = [each.prepared(number, several=len(numbers) > each.processor.alone) for number in numbers]
    prompt, processor = placed(each, each.golden[f"{case}/prompt"].tobytes().decode(), images), each.processor
    assert list(prompt.ids) == each.golden[f"{case}/tokens"].tolist()
    for span, image in zip(prompt.spans, images, strict=True):
        found = prompt.ids[span.start : span.start + span.length]
        assert sum(token in processor.row_token_ids for token in found) == image.num_rows
    if f"{case}/positions" in each.golden:
        spec = each.checkpoint.vision
        assert spec is not None
        positions, delta = mrope_positions(prompt, images, row_token=processor.row_token_id, merge=spec.side)
        np.testing.assert_array_equal(positions, each.golden[f"{case}/positions"])
        assert delta == each.golden[f"{case}/delta"][0]


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_transformers(name: str) -> None:
    each = family(name)
    images = [each.prepared(number) for number in range(3)]
    rows, tapped = encoded(each.checkpoint, images)
    golden = np.concatenate([each.golden[f"image{number}/rows"] for number in range(3)])
    of_patches = [
        token == each.processor.row_token_id
        for image in images
        for token in image.tokens
        if token in each.processor.row_token_ids
    ]
    rows = rows[np.array(of_patches)]
    np.testing.assert_allclose(rows, golden, atol=ATOL * max(1.0, float(np.abs(golden).max())))
    if "image0/tapped" in each.golden:
        expected = np.concatenate([each.golden[f"image{number}/tapped"] for number in range(3)], axis=1)
        np.testing.assert_allclose(tapped, expected, atol=ATOL * max(1.0, float(np.abs(expected).max())))
    else:
        assert len(tapped) == 0
    assert float(golden.std()) > 0.05  # they say something


def test_more_pictures_than_two_are_seen_whole() -> None:
    each = family("deepseek-vl2")
    alone, several = (each.prepared(2, several=several) for several in (False, True))
    assert each.processor.alone == 2 and alone.num_rows > several.num_rows and alone.digest != several.digest
    images = [each.prepared(number, several=True) for number in range(3)]
    text = each.golden["three/prompt"].tobytes().decode()
    assert list(placed(each, text, images).ids) == each.golden["three/tokens"].tolist()


@pytest.mark.parametrize("name", ["qwen2_5-vl", "gemma3", "internvl"])
def test_features_in_bf16_point_the_same_way(name: str) -> None:
    each = family(name)
    rows, _ = encoded(each.checkpoint, [each.prepared(0)], dtype=jnp.bfloat16)
    golden = each.golden["image0/rows"]
    assert float((rows * golden).sum() / np.linalg.norm(rows) / np.linalg.norm(golden)) > 0.999


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_is_of_all_that_decides(name: str) -> None:
    each = family(name)
    pixels = each.golden["image0"]
    first, again = each.processor.prepare(png(pixels)), each.processor.prepare(png(pixels))
    turned = each.processor.prepare(png(pixels.reshape(pixels.shape[1], pixels.shape[0], 3)))
    assert first.digest == again.digest and len(first.digest) == 32
    assert first.digest != turned.digest


def test_text_models_of_the_same_files_have_no_encoder(tmp_path: Path) -> None:
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    assert image_processor_of(tmp_path, config, lambda text: []) is None
