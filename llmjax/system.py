"""What llmjax runs on, and in which processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmjax.errors import ConfigError


def check_system() -> None:
    """Raises ConfigError, which says what to do, where llmjax cannot run."""
    if sys.platform == "win32":
        raise ConfigError("llmjax does not run on Windows itself: use WSL (https://aka.ms/wsl)")


def python_path() -> str:
    """``PYTHONPATH`` for a process that is to import what this one imports, and llmjax from the same place."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *(os.path.abspath(entry) for entry in sys.path)])
