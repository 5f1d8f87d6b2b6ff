"""``llmjax chat``: a conversation in the terminal, with an engine in this process or a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llmjax.cli.markdown import MarkdownStream
from llmjax.cli.models import (
    KEY_VARIABLE,
    ChatModel,
    LocalModel,
    Message,
    RemoteModel,
    key_for_server,
    user_message,
)
from llmjax.cli.parser import Parser, add_config_flags, configs_of
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError, EngineDead, LLMJaxError
from llmjax.settings import nearest, settings_of

# One answer of text is shown: several, and what goes with none of it, have no flags here.
NOT_IN_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize")
HELP = """/reset        start over, with the same system message
/system TEXT  set the system message and start over; without TEXT: none
/image FILE   put a picture before the next message, for models that see
/exit         leave (also Ctrl-D)
/help         this
//text        send text that starts with a slash
Ctrl-C        stop the answer"""


def main(argv: list[str]) -> int:
    """Talks until /exit or the end of the input.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be loaded or the server not reached.
    """
    sampling = sampling_settings(without=NOT_IN_CHAT, max_tokens=None)
    parser = Parser(prog="llmjax chat", description="Talk to a model in the terminal.")
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--url", help="talk to this server instead of an engine in this process")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {KEY_VARIABLE})")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask the server for (default: its first one)")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="picture for the first message, for models that see; may be given more than once",
    )
    parser.add_argument("--quick", metavar="TEXT", help="send this message, show the answer, and leave")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a line on each answer's length and speed (default: not with --quick)",
    )
    parser.add_argument(
        "--markdown",
        action=argparse.BooleanOptionalAction,
        default=sys.stdout.isatty(),
        help="render Markdown (default: only in a terminal)",
    )
    add_sampling_flags(parser, sampling)
    add_config_flags(parser)
    values = parser.parse(argv)
    sampling_given = given_sampling(values, sampling)
    # One event loop for the whole conversation: the engine's requests belong to it.
    with asyncio.Runner() as runner:
        if values.url is None:
            for flag, value in (("--api-key", values.api_key), ("--model-name", values.model_name)):
                if value is not None:
                    raise ConfigError(f"{flag} is for a server: give --url too")
            defaults = {name: setting.default for name, setting in sampling.items()}
            model: ChatModel = LocalModel(
                configs_of(values, model=values.positional_model).engine, sampling_given, defaults
            )
        else:
            model = runner.run(_connect(values, sampling_given))
        try:
            stats = values.quick is None if values.stats is None else values.stats
            chat = Chat(model, system=values.system, markdown=values.markdown, stats=stats)
            for picture in values.image:
                chat.attach(picture)
            if values.quick is None:
                chat.run(runner)
            else:
                chat.quick(values.quick, runner)
        finally:
            runner.run(model.close())
    return 0


@dataclass(frozen=True)
class Answer:
    """An answer as far as it came. Times in seconds."""

    text: str
    tokens: int
    first_token: float
    seconds: float
    stopped: bool

    def summary(self) -> str:
        """Its length and speed: tokens after the first, over the time after the first."""
        rest = self.seconds - self.first_token
        speed = f", {(self.tokens - 1) / rest:.1f} tokens/s" if self.tokens > 1 and rest > 0 else ""
        stopped = ", stopped" if self.stopped else ""
        return f"{self.tokens} tokens{speed}, first after {self.first_token:.2f} s{stopped}"


class Chat:
    """A conversation: the messages so far, and the commands that change them.

    Args:
        model: the model that answers.
        system: the system message; None: none.
        markdown: render answers; else they are written as they come.
        stats: a line after each answer says how long it is and how fast it came.
    """

    def __init__(
        self, model: ChatModel, *, system: str | None = None, markdown: bool = False, stats: bool = True
    ) -> None:
        self.messages: list[Message] = []
        self._pictures: list[str] = []  # for the next message
        self._model = model
        self._system = system
        self._markdown = markdown
        self._stats = stats
        self._out = Console(highlight=False)
        self._notes = Console(highlight=False, stderr=not sys.stdout.isatty(), style="dim")
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": lambda _: self.reset(),
            "system": self.set_system,
            "image": self.attach,
            "help": lambda _: self._note(HELP),
        }
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def attach(self, picture: str) -> None:
        """Puts a picture before the text of the next message; its path."""
        self._pictures.append(picture)

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.reset()

    def run(self, runner: asyncio.Runner) -> None:
        """Reads lines and answers them until the input ends."""
        terminal = sys.stdin.isatty()
        if terminal:
            _remember_lines()
            self._note(f"{self._model.name}: /help lists the commands")
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/") and not line.startswith("//"):
                self.command(line)
            elif line:
                self.say(line.removeprefix("/") if line.startswith("//") else line, runner)

    def quick(self, text: str, runner: asyncio.Runner) -> None:
        """Sends one message and shows the answer.

        Raises:
            LLMJaxError: there is none.
        """
        self._show_stats(runner.run(self._answer([*self.messages, user_message(text, self._pictures)])))

    def command(self, line: str) -> None:
        """Carries out a line such as ``/system You are brief.``"""
        name, _, rest = line[1:].partition(" ")
        if name in self._commands:
            self._commands[name](rest.strip())
        else:
            hint = nearest(name, [*self._commands, "exit"])
            self._note(f"unknown command /{name}{hint} (/help lists them)")

    def say(self, text: str, runner: asyncio.Runner) -> None:
        """Sends a message and shows the answer; one that fails leaves the conversation as it was.

        Raises:
            EngineDead: there will be no more answers.
        """
        try:
            asked = [*self.messages, user_message(text, self._pictures)]
            answer = runner.run(self._answer(asked))
        except EngineDead:
            raise
        except KeyboardInterrupt:
            self._note("stopped")
            return
        except LLMJaxError as error:
            self._note(f"error: {error}")
            return
        finally:
            self._pictures = []
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self._show_stats(answer)

    async def _answer(self, messages: list[Message]) -> Answer:
        if not self._markdown:
            answer = await self._collect(messages, self._write)
            self._write("\n")
            return answer
        with MarkdownStream(self._out) as stream:
            return await self._collect(messages, stream.write)

    async def _collect(self, messages: list[Message], write: Callable[[str], None]) -> Answer:
        """Writes the answer as it comes; Ctrl-C, which cancels the task, ends it early."""
        start = time.perf_counter()
        first: float | None = None
        parts: list[str] = []
        tokens: int | None = None
        stopped = False
        try:
            async with aclosing(self._model.answer(messages)) as pieces:
                async for piece in pieces:
                    if first is None:
                        first = time.perf_counter() - start
                    if piece.text:
                        parts.append(piece.text)
                        write(piece.text)
                    tokens = piece.tokens if piece.tokens is not None else tokens
        except asyncio.CancelledError:
            stopped = True
        seconds = time.perf_counter() - start
        return Answer(
            text="".join(parts),
            tokens=tokens if tokens is not None else len(parts),
            first_token=first if first is not None else seconds,
            seconds=seconds,
            stopped=stopped,
        )

    def _show_stats(self, answer: Answer) -> None:
        if self._stats:
            self._note(answer.summary())

    def _note(self, text: str) -> None:
        self._notes.print(text, markup=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


async def _connect(values: Any, sampling: dict[str, Any]) -> RemoteModel:
    from llmjax.bench.client import OpenAIClient

    without_effect = [name for name in settings_of(EngineConfig) if hasattr(values, name) and name != "model"]
    if without_effect or values.config is not None:
        flag = "--" + without_effect[0].replace("_", "-") if without_effect else "--config"
        raise ConfigError(f"{flag} has no effect on the server of --url")
    client = OpenAIClient(values.url, api_key=key_for_server(values.api_key))
    named = values.model_name or values.positional_model or getattr(values, "model", None)
    return RemoteModel(client, named or await client.first_model(), sampling)


def _remember_lines() -> None:
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
    readline.set_history_length(1000)
    atexit.register(readline.write_history_file, path)
