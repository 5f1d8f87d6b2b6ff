"""What the written pages share: text as it may stand in Markdown."""

from __future__ import annotations

import re
from typing import Any


def cell(text: str) -> str:
    """A text in one line that no table and no angle bracket breaks."""
    escaped = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"``(.+?)``", r"`\1`", escaped)


def code(value: Any) -> str:
    """A value in code marks; True and False as on and off, None in words."""
    words = {None: "none", True: "on", False: "off"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"`{value}`"
