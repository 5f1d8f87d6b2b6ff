"""Messages of the terminal's commands."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from llmjax.cli.models import user_message
from llmjax.errors import InvalidRequest

pytestmark = pytest.mark.smoke


def test_pictures_stand_before_the_text(tmp_path: Path) -> None:
    assert user_message("What?", []) == {"role": "user", "content": "What?"}
    (tmp_path / "a.png").write_bytes(b"picture")
    picture, text = user_message("What?", [str(tmp_path / "a.png")])["content"]
    kind, _, data = picture["image_url"]["url"].partition(";base64,")
    assert (kind, base64.b64decode(data)) == ("data:image/*", b"picture")
    assert text == {"type": "text", "text": "What?"}


def test_a_picture_that_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match=r"^/nowhere/a\.png: the file cannot be read: No such file"):
        user_message("What?", ["/nowhere/a.png"])
