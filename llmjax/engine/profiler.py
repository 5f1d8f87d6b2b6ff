"""Profiles of what an engine computes, for TensorBoard, XProf and Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from llmjax.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Profiler:
    """Writes down what this process and its devices do, from one call to another.

    Args:
        folder: below which each profile has a folder of its own; None: nothing is written.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        self._running = False

    def start(self) -> None:
        """Begins a profile.

        Raises:
            InvalidRequest: there is no folder, or a profile is being written.
        """
        if self._folder is None:
            raise InvalidRequest("profiles need a folder: set profile_dir (--profile-dir)")
        if self._running:
            raise InvalidRequest("a profile is being written already")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self._folder))
        except (OSError, RuntimeError) as error:  # another profile of this process, for one
            raise InvalidRequest(f"no profile can be written to {self._folder}: {error}") from error
        self._running = True
        logger.info("a profile is being written to %s", self._folder)

    def stop(self) -> None:
        """Ends the profile and writes it; raises InvalidRequest if there is none."""
        if not self._running:
            raise InvalidRequest("no profile is being written")
        self._running = False
        jax.profiler.stop_trace()
        logger.info("a profile has been written to %s", self._folder)

    def close(self) -> None:
        """Ends a profile that nobody has ended."""
        if self._running:
            self.stop()
