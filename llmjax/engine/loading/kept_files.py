"""Checks of files that one start keeps for the next: their owner, and the error for damaged files."""

from __future__ import annotations

import os
import stat


class Damaged(Exception):
    """The error that a file does not hold what its name says."""


def check_owner(status: os.stat_result) -> None:
    """Checks that only this process's user, or root, can have written a file.

    Raises:
        Damaged: another user may have written it.
    """
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise Damaged(f"it belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Damaged("others than its owner may write to it")


def line(error: Exception) -> str:
    """An error in one line."""
    text = str(error) if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
