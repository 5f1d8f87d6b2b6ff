"""The ``llmjax`` console script: picks the subcommand and turns its errors into one line and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from llmjax.engine.compile_threads import leave
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.settings import nearest
from llmjax.system import check_system


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose ``main(argv)`` runs it, imported when it is asked for, and its line of help."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("llmjax.cli.serve", "serve a model over HTTP with OpenAI's API"),
    "generate": Command("llmjax.cli.generate", "continue prompts from arguments, a file or standard input"),
    "chat": Command("llmjax.cli.chat", "talk to a model in the terminal"),
    "bench": Command("llmjax.cli.bench", "measure latency, throughput or a server"),
    "inspect": Command("llmjax.cli.inspect", "show what a model's files hold, without loading them"),
    "eval": Command("llmjax.cli.evaluate", "measure how good a model is as it is served"),
    "quantize": Command("llmjax.cli.quantize", "write a model with quantised weights, as GGUF or safetensors"),
    "doctor": Command("llmjax.cli.doctor", "show what this machine has and what llmjax would use of it"),
    "version": Command("llmjax.cli.version", "print the versions of llmjax and JAX"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit status: 0, 1 after an error, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if arguments else 1
    if arguments[0] == "--version":
        arguments[0] = "version"
    return run(lambda rest: _dispatch(arguments[0])(rest), arguments[1:])


def script() -> NoReturn:
    """The console script: ``main`` in a process of its own."""
    leave(main())


def run(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs one command with deliberate errors as one line; ``--debug``, anywhere, asks for tracebacks.

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
            print(f"llmjax: error: {error}", file=sys.stderr)
        else:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"llmjax: unexpected error: {line} (--debug shows the traceback)", file=sys.stderr)
        return 1


def usage() -> str:
    """The text of ``llmjax --help``."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: llmjax COMMAND [options]",
            "",
            "LLM inference and serving on JAX: CPUs, NVIDIA GPUs and any PJRT device.",
            "",
            *lines,
            "",
            "llmjax COMMAND --help describes the options of a command.",
        ]
    )


def _dispatch(name: str) -> Callable[[list[str]], int | None]:
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, COMMANDS)} (llmjax --help lists them)")
    command: Callable[[list[str]], int | None] = importlib.import_module(COMMANDS[name].module).main
    return command
