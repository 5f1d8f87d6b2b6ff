"""A conversation in the terminal: its messages, the commands that change them, and answers as they come."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from llmjax.cli.lines import LineReader
from llmjax.cli.markdown import MarkdownStream
from llmjax.cli.models import PLAIN, CallPiece, ChatModel, ChatOptions, Message, Piece, user_message
from llmjax.errors import ConfigError, EngineDead, LLMJaxError
from llmjax.settings import nearest
from llmjax.text_file import read_text

HELP = """/reset        start over, with the same system message
/system TEXT  set the system message and start over; without TEXT: none
/image FILE   put a picture before the next message, for models that see
/tools FILE   let the model call the functions of a JSON file (OpenAI's form); without FILE: none
/thinking on  have the model reason; off: not; else as its chat template does
/exit         leave (also Ctrl-D)
/help         this
//text        send text that starts with a slash
\"\"\"           begin a message of several lines, which ends at the next \"\"\"
\\             at the end of a line: the message goes on in the next one
Ctrl-C        stop the answer"""


@dataclass(frozen=True)
class Answer:
    """An answer as far as it came, with its calls of tools. Times in seconds."""

    text: str
    tokens: int
    first_token: float
    seconds: float
    stopped: bool
    calls: tuple[CallPiece, ...] = ()

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
        options: what goes with every message.
        system: the system message; None: none.
        markdown: render answers; else they are written as they come.
        stats: a line after each answer says how long it is and how fast it came.
    """

    def __init__(
        self,
        model: ChatModel,
        options: ChatOptions = PLAIN,
        *,
        system: str | None = None,
        markdown: bool = False,
        stats: bool = True,
    ) -> None:
        self.messages: list[Message] = []
        self._options = options
        self._lines = LineReader()
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
            "tools": self.set_tools,
            "thinking": self.set_thinking,
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

    def set_tools(self, file: str) -> None:
        """Lets the model call the functions of a JSON file; an empty name: none."""
        try:
            tools = read_tools(file) if file else ()
        except ConfigError as error:
            self._note(f"error: {error}")
            return
        self._options = replace(self._options, tools=tools)
        self._note(f"tools: {', '.join(tool['function']['name'] for tool in tools) or 'none'}")

    def set_thinking(self, word: str) -> None:
        """Has the model reason (``on``) or not (``off``); anything else: as its template does."""
        self._options = replace(self._options, thinking={"on": True, "off": False}.get(word))
        said = {True: "on", False: "off", None: "as the model's template has it"}[self._options.thinking]
        self._note(f"thinking: {said}")

    def run(self, runner: asyncio.Runner) -> None:
        """Reads messages and answers them until the input ends."""
        if self._lines.terminal:
            self._lines.remember()
            self._note(f"{self._model.name}: /help lists the commands")
        while True:
            try:
                text = self._lines.message()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")
                continue
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/") and not text.startswith("//"):
                self.command(text)
            elif text:
                self.say(text.removeprefix("/") if text.startswith("//") else text, runner)

    def quick(self, text: str, runner: asyncio.Runner) -> None:
        """Sends one message and shows the answer.

        Raises:
            LLMJaxError: there is none.
        """
        self._converse([*self.messages, user_message(text, self._pictures)], runner)

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
            self.messages = self._converse([*self.messages, user_message(text, self._pictures)], runner)
        except EngineDead:
            raise
        except KeyboardInterrupt:
            self._note("stopped")
        except LLMJaxError as error:
            self._note(f"error: {error}")
        finally:
            self._pictures = []

    def _converse(self, asked: list[Message], runner: asyncio.Runner) -> list[Message]:
        """The messages with the answer, after as many calls of tools as the model makes."""
        while True:
            answer = runner.run(self._answer(asked))
            said: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if answer.calls:
                said["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in answer.calls
                ]
            asked = [*asked, said]
            self._show_stats(answer)
            if not answer.calls or answer.stopped:
                return asked
            try:
                asked += [self._result(call) for call in answer.calls]
            except EOFError:  # nobody says what the tools bring
                return asked

    def _result(self, call: CallPiece) -> Message:
        """What a tool brings: nothing runs it here, the user says it.

        Raises:
            EOFError: the input has ended.
        """
        self._note(f"→ {call.name}({call.arguments})")
        result = self._lines.message(f"result of {call.name}: ")
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    async def _answer(self, messages: list[Message]) -> Answer:
        if not self._markdown:
            answer = await self._collect(messages, self._write)
            if answer.text or not answer.calls:
                self._write("\n")
            return answer
        with MarkdownStream(self._out) as stream:
            return await self._collect(messages, stream.write)

    async def _collect(self, messages: list[Message], write: Callable[[str], None]) -> Answer:
        """Writes the answer as it comes; Ctrl-C, which cancels the task, ends it early."""
        start = time.perf_counter()
        first: float | None = None
        parts: list[str] = []
        thought = False
        calls: dict[int, CallPiece] = {}
        tokens: int | None = None
        stopped = False
        try:
            async with aclosing(self._model.answer(messages, self._options)) as pieces:
                async for piece in pieces:
                    if first is None:
                        first = time.perf_counter() - start
                    self._think(piece, write, begun=thought, ended=bool(parts))
                    thought = thought or bool(piece.reasoning)
                    for call in piece.calls:
                        calls[call.index] = _together(calls.get(call.index), call)
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
            calls=tuple(calls[index] for index in sorted(calls)),
        )

    def _think(self, piece: Piece, write: Callable[[str], None], *, begun: bool, ended: bool) -> None:
        """Shows reasoning before the answer: quoted in Markdown, else as a note.

        Args:
            begun: there has been some.
            ended: the answer has begun.
        """
        if piece.reasoning and self._markdown:
            write(("" if begun else "> ") + piece.reasoning.replace("\n", "\n> "))
        elif piece.reasoning:
            self._notes.print(piece.reasoning, markup=False, soft_wrap=True, end="")
        elif begun and not ended and (piece.text or piece.calls):
            write("\n\n") if self._markdown else self._notes.print()

    def _show_stats(self, answer: Answer) -> None:
        if self._stats:
            self._note(answer.summary())

    def _note(self, text: str) -> None:
        self._notes.print(text, markup=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _together(before: CallPiece | None, piece: CallPiece) -> CallPiece:
    if before is None:
        return piece
    return replace(
        before,
        name=before.name + piece.name,
        id=before.id or piece.id,
        arguments=before.arguments + piece.arguments,
    )


def read_tools(file: str) -> list[dict[str, Any]]:
    """The functions of a JSON file: a list of OpenAI's tools, or of functions alone.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(read_text(Path(file).expanduser(), name=f"tools: {file}"))
    except ValueError as error:
        raise ConfigError(f"tools: {file} is not JSON: {error}") from None
    tools = []
    for number, entry in enumerate(content if isinstance(content, list) else [content]):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"tools: {file}: entry {number} is not a function",
                hint='write [{"type": "function", "function": {"name": "…", "parameters": {…}}}]',
            )
        tools.append({"type": "function", "function": function})
    return tools
