"""The progress bar that people see in a terminal while something takes long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(title: str, *, shown: bool = True) -> Progress:
    """A bar on standard error, if that is a terminal: standard output belongs to results.

    Tasks need a ``note``, a text behind the bar: ``bar.add_task("", total=…, note="")``.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)
