"""Markdown that is rendered while it arrives."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown


class MarkdownStream:
    """Shows growing Markdown: finished blocks are printed for good, the last one is redrawn as it grows.

    Redrawing everything would flicker, and could not go past the height of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, vertical_overflow="ellipsis", transient=True)
        self._pending = ""
        self._restored = ExitStack()

    def __enter__(self) -> MarkdownStream:
        _hide_keys(self._restored)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._restored:
            self._live.stop()
            if self._pending.strip():
                self._console.print(Markdown(self._pending))

    def write(self, text: str) -> None:
        """Adds text to the end."""
        self._pending += text
        finished = finished_length(self._pending)
        if finished:
            # Printed above the live part, which rich redraws below.
            self._console.print(Markdown(self._pending[:finished]))
            self._console.print()
            self._pending = self._pending[finished:]
        self._live.update(Markdown(self._pending))


def _hide_keys(restored: ExitStack) -> None:
    """Has the terminal not show what is typed.

    A ``^C``, or a question typed ahead, moves the cursor, and the line that is redrawn would stand there twice. The
    next prompt shows what was typed ahead.

    Args:
        restored: gets what puts the terminal back.
    """
    try:
        import termios
    except ImportError:  # Windows
        return
    terminal = 0
    try:
        if os.tcgetpgrp(terminal) != os.getpgrp():  # in the background it would be stopped for this
            return
        before = termios.tcgetattr(terminal)
    except OSError:  # standard input is not a terminal, or not the one of this process
        return
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    restored.callback(termios.tcsetattr, terminal, termios.TCSANOW, before)


def finished_length(text: str) -> int:
    """How many characters at the start are blocks that nothing which follows can change.

    A block is finished at a blank line outside a code fence, once the line after it has begun without indentation (an
    indented one may belong to a list item).
    """
    finished, position = 0, 0
    fence: str | None = None
    after_blank = False
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if fence is None and after_blank and stripped and not line[0].isspace():
            finished = position
        marker = stripped[:3]
        if fence is None and marker in ("```", "~~~"):
            fence = marker
        elif fence is not None and marker == fence and not stripped.strip(fence[0]):
            fence = None
        after_blank = not stripped
        position += len(line)
    return finished
