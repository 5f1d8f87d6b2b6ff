"""Reads a picture's file, within limits that are checked before anything is decoded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from llmjax.errors import InvalidRequest
from llmjax.media.files import IMAGE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """How large a picture may be.

    Attributes:
        nbytes: the size of its file.
        pixels: the number of them in its first frame.
        side: pixels along either side.
    """

    nbytes: int = IMAGE_BYTES
    pixels: int = 50_000_000
    side: int = 16384


@dataclass(frozen=True, eq=False)
class Decoded:
    """A picture's pixels.

    Attributes:
        image: in RGB, upright, on white where it was transparent.
        mode: Pillow's name of how the file has its pixels.
        orientation: the EXIF orientation, 1 if there is none.
    """

    image: Image.Image
    mode: str
    orientation: int


def decoded(data: bytes, limits: ImageLimits) -> Decoded:
    """The first frame of a picture, as transformers' ``load_image`` and ``convert_to_rgb`` make it.

    Raises:
        InvalidRequest: it is too large, not a picture in one of FORMATS, or damaged.
    """
    if not data:
        raise InvalidRequest("the image is empty")
    if len(data) > limits.nbytes:
        raise InvalidRequest(f"the image has {len(data)} bytes, more than {limits.nbytes}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limits below are narrower
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise InvalidRequest(f"the image is not in a format that is supported: {', '.join(FORMATS)}") from None
        except Image.DecompressionBombError:
            raise InvalidRequest(f"the image has more than {limits.pixels} pixels") from None
        except (OSError, SyntaxError, ValueError, EOFError):
            raise InvalidRequest("the image is damaged") from None
    width, height = image.size
    if max(width, height) > limits.side:
        raise InvalidRequest(f"the image is {width} x {height} pixels; a side may have {limits.side}")
    if width * height > limits.pixels:
        raise InvalidRequest(f"the image is {width} x {height} pixels, more than {limits.pixels}")
    if not width or not height:
        raise InvalidRequest("the image has no pixels")
    try:
        image.load()
        mode, orientation = image.mode, image.getexif().get(ORIENTATION, 1)
        return Decoded(rgb(ImageOps.exif_transpose(image)), mode, orientation if isinstance(orientation, int) else 1)
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError):
        raise InvalidRequest("the image is damaged") from None


def rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB; what is transparent lies on white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")
