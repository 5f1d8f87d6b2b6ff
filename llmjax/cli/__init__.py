"""The ``llmjax`` console script: picks the subcommand and turns its errors into a line or two and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from llmjax.cli.commands import COMMANDS, dispatch
from llmjax.engine.programs.threads import leave
from llmjax.errors import LLMJaxError, written
from llmjax.system import check_system


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit status: 0, 1 after an error, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        arguments[0] = "version"
    if arguments[:1] == ["--install-completion"]:
        arguments[:1] = ["completion", "--install"]
    return run(partial(dispatch, "llmjax", COMMANDS), arguments)


def script() -> NoReturn:
    """The console script: ``main`` in a process of its own."""
    leave(main())


def run(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs one command, with deliberate errors in a line or two; ``--debug``, anywhere, asks for tracebacks.

    Returns:
        The exit status, as in ``main``.
    """
    options = argv[: argv.index("--")] if "--" in argv else argv
    debug = "--debug" in options
    if debug:
        argv = [argument for i, argument in enumerate(argv) if argument != "--debug" or i >= len(options)]
    try:
        check_system()
        return command(argv) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (llmjax … | head). Python would fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, LLMJaxError):
            print(written(error), file=sys.stderr)
        else:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"llmjax: unexpected error: {line} (--debug shows the traceback)", file=sys.stderr)
        return 1
