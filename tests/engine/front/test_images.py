"""Pictures that callers give as images of Pillow are what their files would be."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from llmjax.engine.front.images import bytes_of
from llmjax.errors import InvalidRequest
from llmjax.media.decoding import ImageLimits, decoded


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decoded(data, ImageLimits()).image)


def noise(mode: str) -> Image.Image:
    values = np.random.default_rng(3).integers(0, 256, (9, 14, 4), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_image_is_turned_as_its_file_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    noise("RGB").save(file, format="PNG", exif=exif)
    data = file.getvalue()
    found = pixels(bytes_of(Image.open(io.BytesIO(data)), most=0))
    np.testing.assert_array_equal(found, pixels(data))
    assert found.shape == ((14, 9, 3) if orientation in (6, 8) else (9, 14, 3))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_lies_on_white(mode: str) -> None:
    image = noise("LA").convert(mode) if mode == "PA" else noise(mode)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    np.testing.assert_array_equal(pixels(bytes_of(image, most=0)), np.asarray(whole))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "F", "I"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = noise("RGB").convert("L" if mode in "FI" else "RGB").convert(mode)
    np.testing.assert_array_equal(pixels(bytes_of(image, most=0)), np.asarray(image.convert("RGB")))


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a int is not a picture"):
        bytes_of(3, most=0)
