"""matplotlib, which is wanted only where a picture is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError


def check_pyplot(command: str) -> None:
    """Refuses a picture that could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{command} needs matplotlib", hint="pip install 'llmjax[plot]'")


def pyplot() -> Any:
    """matplotlib.pyplot, without a window."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path, *, close: bool = True) -> None:
    """Writes a picture and lets go of it, unless it is to be written once more.

    Raises:
        ConfigError: the folder cannot be made, or the file not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if close:
        pyplot().close(figure)


def check_plot(path: str | None) -> None:
    """Refuses a picture that could not be drawn, before the run that it is for.

    Raises:
        ConfigError: matplotlib is not installed, or the folder does not exist.
    """
    if path is None:
        return
    check_pyplot("--plot")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot: no folder {Path(path).absolute().parent}")
