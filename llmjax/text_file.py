"""Files of text that users name."""

from __future__ import annotations

from pathlib import Path

from llmjax.errors import ConfigError


def read_text(path: Path, *, name: str | None = None) -> str:
    """What is in a file.

    Args:
        path: path of the file.
        name: what it is called in messages; None: its path.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8.
    """
    name = name or str(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
