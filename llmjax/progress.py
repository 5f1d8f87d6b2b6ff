"""The progress bar that people see in a terminal while something takes long."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


class Bar(Protocol):
    """What is used of rich's ``Progress``."""

    def add_task(self, description: str, *, total: float | None, note: str) -> TaskID: ...

    def update(self, task_id: TaskID, **fields: Any) -> None: ...


class _NoBar:
    """Nobody sees it, so that rich need not be imported."""

    def add_task(self, description: str, *, total: float | None, note: str) -> TaskID:
        return 0  # type: ignore[return-value]

    def update(self, task_id: TaskID, **fields: Any) -> None: ...


def progress_bar(title: str, *, shown: bool = True) -> AbstractContextManager[Bar]:
    """A bar on standard error, if that is a terminal: standard output belongs to results.

    Tasks need a ``note``, a text after the bar: ``bar.add_task("", total=…, note="")``.
    """
    if not shown or not sys.stderr.isatty():
        return nullcontext(_NoBar())
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar: Any = Progress(*columns, console=Console(stderr=True), transient=True)
    return bar
