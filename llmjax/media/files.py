"""Reads the file of a picture or of a video, which a caller's path names."""

from __future__ import annotations

from pathlib import Path

from llmjax.checkpoint.files import check_file
from llmjax.errors import InvalidRequest

IMAGE_BYTES = 20 * 2**20  # of a picture's file, at most
VIDEO_BYTES = 100 * 2**20  # of a video's


def file_content(path: str | Path, *, most: int) -> bytes:
    """The content of a file.

    Args:
        most: bytes that it may have.

    Raises:
        InvalidRequest: it cannot be read, is none, such as a device, or is larger.
    """
    try:
        path = Path(path).expanduser()
        check_file(path, error=InvalidRequest)
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InvalidRequest(f"the file cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a null in the path, or nobody's home
        raise InvalidRequest(f"the file cannot be read: {error}") from error
    if len(data) > most:
        raise InvalidRequest(f"the file has more than {most} bytes")
    return data
