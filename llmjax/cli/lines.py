"""Messages that are typed: line editing, a history over sessions, and messages of several lines."""

from __future__ import annotations

import sys
from pathlib import Path

BLOCK = '"""'  # opens a message of several lines, and closes it
PROMPT, FURTHER = "> ", "… "
HISTORY = 1000  # lines that are kept


class LineReader:
    """Reads messages from standard input.

    Attributes:
        terminal: somebody types them, who wants a prompt.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdin.isatty()

    def message(self, prompt: str = PROMPT) -> str:
        """The next message, without white space around it.

        Lines that end in a backslash go on in the next one, and between two lines of three quotation marks is one
        message. A text that is pasted into a terminal is one message too.

        Raises:
            EOFError: the input has ended before a message began.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        line = self._line(prompt).strip()
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\").rstrip()
            try:
                lines.append(self._line(FURTHER).rstrip())
            except EOFError:
                break
        return "\n".join(lines).strip()

    def remember(self) -> None:
        """Line editing and a history over sessions, where Python has readline."""
        try:
            import atexit
            import readline
        except ImportError:
            return
        path = Path.home() / ".cache" / "llmjax" / "chat_history"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                readline.read_history_file(path)
        except OSError:
            return  # a home that cannot be written, or a foreign file: chat without a memory of past sessions
        readline.set_history_length(HISTORY)
        atexit.register(readline.write_history_file, path)

    def _block(self, begun: str) -> str:
        lines = [begun] if begun else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            try:
                lines.append(self._line(FURTHER))
            except EOFError:
                return "\n".join(lines).strip()
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        return input(prompt if self.terminal else "")
