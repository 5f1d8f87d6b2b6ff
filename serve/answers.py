"""Reads what a model has written: reasoning, content and tool calls, each where OpenAI's messages have it."""

from __future__ import annotations

import secrets
import string
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from llmjax.config import ServerConfig
from llmjax.constraints.thinking import TokenMark
from llmjax.outputs import CompletionOutput
from llmjax.parsing.choice import Parsers, check_reasoning_parser, check_tool_parser
from llmjax.parsing.content import ContentReading
from llmjax.parsing.events import Arguments, CallBegun, Content, Event, Message, Reasoning
from llmjax.parsing.grammar import Grammar, Role
from llmjax.parsing.parser import OutputParser
from llmjax.parsing.schemas import ToolSchemas
from llmjax.serve.custom_tools import WRITTEN, InputReader, input_of, whole_call

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer

_LETTERS = string.ascii_letters + string.digits


class OutputFormats:
    """How the server's model writes, under each of its templates.

    Args:
        tokenizer: None on a server without one.
        config: names parsers, or leaves the choice to the template.

    Raises:
        ConfigError: there is no such parser.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self._tokenizer = tokenizer
        self._tools = check_tool_parser(config.tool_call_parser)
        self._reasoning = check_reasoning_parser(config.reasoning_parser)
        self._parsers = lru_cache(maxsize=16)(self._choose)
        self._special_ids = lru_cache(maxsize=16)(self._find_special_ids)
        self._marks = lru_cache(maxsize=16)(self._find_mark)

    def parsers(self, template: str) -> Parsers:
        """The parsers for answers to prompts that ``template`` makes."""
        return self._parsers(template)

    def shown(self, grammar: Grammar) -> frozenset[int]:
        """Special tokens that markers are made of; they are to stay in the text."""
        return self._special_ids(frozenset(grammar.markers))

    def mark(self, text: str) -> TokenMark:
        """A text as tokens may write it. The first time takes part of a second; any thread may ask."""
        return self._marks(text)

    def _find_mark(self, text: str) -> TokenMark:
        assert self._tokenizer is not None
        return TokenMark.of(text, self._tokenizer.bytes_of_all(self._tokenizer.vocab_size))

    def _choose(self, template: str) -> Parsers:
        return Parsers.of(template, tools=self._tools, reasoning=self._reasoning)

    def _find_special_ids(self, markers: frozenset[str]) -> frozenset[int]:
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids_in(markers)


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How the answers to one request are to be read.

    Args:
        grammar: None: all is content.
        tools: tools that the model may call.
        custom: the names of those whose input is a text.
        parallel: several calls in one answer; otherwise it ends with the first.
        include_reasoning: show it.
        counts_reasoning: count its tokens.
    """

    grammar: Grammar | None = None
    tools: Sequence[dict[str, Any]] = ()
    custom: Collection[str] = ()
    parallel: bool = True
    include_reasoning: bool = True
    counts_reasoning: bool = False

    @property
    def begins_with_reasoning(self) -> bool:
        """The prompt has opened it."""
        return self.grammar is not None and self.grammar.states[self.grammar.initial].role is Role.REASONING

    def reading(self) -> ContentReading | None:
        """Which text is content, and where the answer ends; None: all is."""
        if (grammar := self.grammar) is None:
            return None
        tools = ToolSchemas(self.tools)
        return ContentReading(
            parser=lambda: OutputParser(grammar, tools), one_call=bool(self.tools) and not self.parallel
        )

    def reader(self) -> AnswerReader:
        return AnswerReader(self)


class AnswerReader:
    """Reads one choice of an answer."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._parser = None if form.grammar is None else OutputParser(form.grammar, ToolSchemas(form.tools))
        self._uncounted: deque[int] = deque()  # where tokens begin whose text has not been read for certain
        self._calls = 0  # read
        self._arguments: list[str] = []  # of the last of them
        self._sent = 0
        self._input: InputReader | None = None  # of the custom tool that is being called
        self.reasoning_tokens = 0

    @property
    def reasons(self) -> bool:
        """Whether what was read has stopped inside of reasoning."""
        return self._parser is not None and self._parser.reasons

    def read(self, choice: CompletionOutput) -> list[Event]:
        """What is new in an output; a last one completes the answer. Every call has an id."""
        if self._parser is None:
            return [Content(choice.text)] if choice.text else []
        events = self._parser.feed(choice.text)
        if choice.finish_reason is not None:
            events += self._parser.finish(whole=choice.finish_reason == "stop" and choice.stop_reason is None)
        self._count(choice)
        return [self._with_id(event) for event in events if self._is_shown(event)]

    def _with_id(self, event: Event) -> Event:
        return CallBegun(event.name, self._new_id()) if isinstance(event, CallBegun) and not event.id else event

    def message(self, choice: CompletionOutput) -> dict[str, Any]:
        """The fields of OpenAI's message, from a whole output."""
        if self._parser is None:
            return {"content": choice.text}
        message = Message.of(self.read(choice))
        fields: dict[str, Any] = {"content": message.content or (None if message.calls or message.reasoning else "")}
        if message.reasoning:
            fields |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
        if message.calls:
            fields["tool_calls"] = [
                whole_call(kind, id=call.id, name=call.name, written=input_of(text) if kind == "custom" else text)
                for call in message.calls
                for kind, text in [(self._kind(call.name), call.arguments)]
            ]
        return fields

    def deltas(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        """The deltas of chunks, from what is new in an output."""
        changes = [delta for event in self.read(choice) for delta in self._deltas(event)]
        return changes if choice.finish_reason is None else [*changes, *self._rest()]

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Content(text):
                return [*self._rest(), {"content": text}]
            case Reasoning(text):
                return [*self._rest(), {"reasoning": text, "reasoning_content": text}]
            case CallBegun(name, id):
                rest, kind = self._rest(), self._kind(name)
                self._sent += 1
                self._input = InputReader() if kind == "custom" else None
                return [*rest, self._call(whole_call(kind, id=id, name=name, written=""))]
            case Arguments(text):
                return self._written(text if self._input is None else self._input.read(text))

    def _kind(self, name: str) -> str:
        return "custom" if name in self._form.custom else "function"

    def _rest(self) -> list[dict[str, Any]]:
        """What is left of a custom tool's input, whose call has ended."""
        rest = [] if self._input is None else self._written(self._input.finish())
        self._input = None
        return rest

    def _written(self, text: str) -> list[dict[str, Any]]:
        kind = "function" if self._input is None else "custom"
        return [self._call({kind: {WRITTEN[kind]: text}})] if text else []

    def _call(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": self._sent - 1, **fields}]}

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """OpenAI's word for why the answer has ended: calls are the client's turn, even where the model's arguments are
        not JSON, so that it can say so to the model. A call that the request's own stop string has cut is not."""
        calls = choice.finish_reason == "stop" and self._calls
        return "tool_calls" if calls and (choice.stop_reason is None or self._is_whole()) else choice.finish_reason

    def _is_whole(self) -> bool:
        """Whether the last call's arguments are JSON."""
        try:
            orjson.loads("".join(self._arguments))
        except orjson.JSONDecodeError:
            return False
        return True

    def _is_shown(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._form.include_reasoning
        if isinstance(event, CallBegun):
            self._calls += 1
            self._arguments.clear()
        elif isinstance(event, Arguments):
            self._arguments.append(event.text)
        return self._calls <= 1 or self._form.parallel or not isinstance(event, CallBegun | Arguments)

    def _new_id(self) -> str:
        if self._form.grammar is not None and self._form.grammar.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"

    def _count(self, choice: CompletionOutput) -> None:
        if self._parser is None or not self._form.counts_reasoning:
            return
        self._uncounted.extend(choice.text_offsets or ())
        ended = choice.finish_reason is not None
        while self._uncounted and (ended or self._uncounted[0] < self._parser.position):
            self.reasoning_tokens += self._parser.reasons_at(self._uncounted.popleft())
