"""Pictures of all kinds become RGB, and whatever is not a picture is refused in one line."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from llmjax.errors import InvalidRequest
from llmjax.media.decoding import ImageLimits, decoded

LIMITS = ImageLimits()


def written(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


def noise(mode: str, size: tuple[int, int] = (7, 5)) -> Image.Image:
    rng = np.random.default_rng(0)
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    return Image.frombytes(mode, size, values.tobytes())


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "1", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = noise(mode) if mode not in ("1", "I;16", "P") else noise("L").convert(mode)
    found = decoded(written(image), LIMITS)
    assert found.image.mode == "RGB" and found.image.size == (7, 5) and found.orientation == 1
    if mode == "RGB":
        assert found.image.tobytes() == image.tobytes()


def test_cmyk_and_webp_are_read() -> None:
    assert decoded(written(noise("CMYK"), "JPEG"), LIMITS).mode == "CMYK"
    assert decoded(written(noise("RGB"), "WEBP", lossless=True), LIMITS).image.tobytes() == noise("RGB").tobytes()


def test_transparency_lies_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    assert decoded(written(image), LIMITS).image.tobytes() == bytes([10, 20, 30, 255, 255, 255])
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([9, 8, 7, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    found = decoded(written(palette, transparency=0), LIMITS).image
    assert found.tobytes() == bytes([255, 255, 255, 1, 2, 3])


def test_pictures_are_turned_upright() -> None:
    image = noise("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decoded(written(image, exif=exif), LIMITS)
    assert found.orientation == 6
    assert found.image.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    data = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded(data, LIMITS).image.getpixel((0, 0)) == (255, 0, 0)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
JPEG = written(noise("RGB", (64, 64)), "JPEG")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"nothing of the kind", "not in a format that is supported"),
        (SVG, "not in a format that is supported"),
        (JPEG[:200], "is damaged"),
        (JPEG[:-600], "is damaged"),
        (written(noise("RGB"), "TIFF"), "not in a format that is supported"),
    ],
    ids=["empty", "text", "svg", "header", "truncated", "tiff"],
)
def test_what_is_not_a_picture_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        decoded(data, LIMITS)
    assert "\n" not in str(error.value) and "0x" not in str(error.value)


def test_limits_are_checked_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(noise("RGB", (40, 30)))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    for limits, words in (
        (ImageLimits(side=39), "40 x 30 pixels; a side may have 39"),
        (ImageLimits(pixels=1199), "40 x 30 pixels, more than 1199"),
        (ImageLimits(nbytes=len(data) - 1), f"has {len(data)} bytes, more than {len(data) - 1}"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            decoded(data, limits)


def test_a_bomb_is_refused() -> None:
    chunks = [b"IHDR" + (60000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00", b"IDAT"]
    png = b"\x89PNG\r\n\x1a\n"
    for chunk in chunks:
        png += (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    with pytest.raises(InvalidRequest, match="more than 50000000 pixels"):
        decoded(png, LIMITS)
