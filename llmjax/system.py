"""Which operating systems llmjax runs on."""

from __future__ import annotations

import sys

from llmjax.errors import ConfigError


def check_system() -> None:
    """Raises ConfigError, which says what to do, where llmjax cannot run."""
    if sys.platform == "win32":
        raise ConfigError("llmjax does not run on Windows itself: use WSL (https://aka.ms/wsl)")
