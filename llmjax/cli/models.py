"""Models that answer in the terminal: an engine in this process, or a server."""

from __future__ import annotations

import itertools
import os
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.media.files import IMAGE_BYTES, file_content
from llmjax.parsing.choice import Parsers, switches_of_thinking, tools_variable
from llmjax.parsing.events import Arguments, CallBegun, Content, Event, Reasoning
from llmjax.parsing.parser import OutputParser
from llmjax.parsing.schemas import ToolSchemas
from llmjax.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llmjax.bench.client import OpenAIClient
    from llmjax.engine.front.requests import PromptInput

Message = Mapping[str, Any]
KEY_VARIABLE = "OPENAI_API_KEY"
PROMPT_END = 64  # tokens at the end of a prompt that say whether reasoning has been opened


@dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
        text: what the user is to read.
        tokens: those of the answer so far; None: not known yet.
        reasoning: text of what was thought before it.
        calls: pieces of calls of tools.
    """

    text: str
    tokens: int | None
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(frozen=True)
class CallPiece:
    """A piece of a tool's call: its arguments, which are JSON, come after its name."""

    index: int
    name: str = ""
    id: str = ""
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation is put to the model.

    Attributes:
        tools: functions that the model may call, in OpenAI's form.
        thinking: whether it is to reason; None: as its template does.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None


PLAIN = ChatOptions()


def user_message(text: str, pictures: Sequence[str]) -> Message:
    """A message of the user, with pictures before its text.

    Args:
        pictures: paths of their files.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    if not pictures:
        return {"role": "user", "content": text}
    images = []
    for picture in pictures:
        try:
            data = file_content(picture, most=IMAGE_BYTES)
        except InvalidRequest as error:
            raise InvalidRequest(f"{picture}: {error}") from error
        url = f"data:image/*;base64,{b64encode(data).decode()}"
        images.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


class ChatModel(Protocol):
    """Something to talk to."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> AsyncGenerator[Piece, None]: ...

    async def close(self) -> None: ...


class LocalModel:
    """An engine in this process.

    Args:
        config: what to run.
        sampling: fields of ``SamplingParams`` that the user gave; the model's own defaults fill the others.
        defaults: the command's defaults, below the model's.
    """

    def __init__(self, config: EngineConfig, sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        from llmjax import AsyncLLM

        self._llm = AsyncLLM.from_config(config)
        fields = {**defaults, **self._llm.default_sampling_params, **sampling}
        self._params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        self._ids = (f"terminal-{i}" for i in itertools.count())

    @property
    def name(self) -> str:
        return self._llm.model_name

    async def answer(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> AsyncGenerator[Piece, None]:
        """The answer, read as the model's family writes reasoning and calls.

        Raises:
            InvalidRequest: the model's template reads no tools, or the prompt does not fit, for example.
        """
        prompt = self.chat_prompt(messages, options)
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None  # the prompt was made with it
        source = tokenizer.template_source(None, with_tools=bool(options.tools))
        if options.tools and tools_variable(source) is None:
            raise InvalidRequest(
                "this model's chat template reads no tools",
                hint="a server describes them in words: llmjax serve, --url",
            )
        ids: list[int] = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        written = tokenizer.decode(ids[-PROMPT_END:], skip_special_tokens=False)
        grammar = Parsers.of(source).grammar(with_tools=bool(options.tools), prompt=written)
        if grammar is None:
            async with aclosing(self.continued(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        shown = tokenizer.special_ids_in(frozenset(grammar.markers))
        parser, calls = OutputParser(grammar, ToolSchemas(options.tools)), 0
        async with aclosing(self.continued(prompt, shown=shown)) as pieces:
            async for piece in pieces:
                read, calls = _pieces_of(parser.feed(piece.text), piece.tokens, calls)
                yield read
        yield _pieces_of(parser.finish(whole=True), None, calls)[0]

    def chat_prompt(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> Any:
        """The token ids of a conversation under the model's chat template, and its pictures.

        Raises:
            ConfigError: there is no tokenizer.
            InvalidRequest: there are pictures, and the model sees none.
            TokenizerError: there is no template, or it refuses the messages.
        """
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise ConfigError("a chat needs a tokenizer: leave out --skip-tokenizer-init")
        from llmjax.engine.front.chat_images import with_pictures  # the engine has imported it

        shown, data = with_pictures(messages, self._llm.images)
        tools = list(options.tools)
        variables: dict[str, Any] = {"tools": tools} if tools else {}
        if options.thinking is not None:
            source = tokenizer.template_source(None, with_tools=bool(tools))
            variables |= dict.fromkeys(switches_of_thinking(source), options.thinking)
        ids = tokenizer.encode(tokenizer.apply_chat_template(shown, **variables), add_special_tokens=False, kept_for="")
        return {"prompt_token_ids": ids, "multi_modal_data": data} if data else ids

    async def continued(
        self, prompt: PromptInput, *, shown: frozenset[int] = frozenset()
    ) -> AsyncGenerator[Piece, None]:
        """The continuation of a prompt, piece by piece.

        Args:
            shown: special tokens that are part of the text.

        Raises:
            InvalidRequest: the prompt does not fit the context, for example.
        """
        tokens = 0
        async with aclosing(self._llm.generate(prompt, self._params, next(self._ids), shown=shown)) as outputs:
            async for output in outputs:
                tokens += len(output.outputs[0].token_ids)
                yield Piece(output.outputs[0].text, tokens)

    async def close(self) -> None:
        await self._llm.shutdown(drain_timeout=0)


def _pieces_of(events: Sequence[Event], tokens: int | None, calls: int) -> tuple[Piece, int]:
    """What events bring, and the number of calls that have begun; ``calls``: that before them."""
    text, reasoning, pieces = "", "", []
    for event in events:
        match event:
            case Content():
                text += event.text
            case Reasoning():
                reasoning += event.text
            case CallBegun():
                pieces.append(CallPiece(calls, name=event.name, id=event.id or f"call_{calls}"))
                calls += 1
            case Arguments():
                pieces.append(CallPiece(calls - 1, arguments=event.text))
    return Piece(text, tokens, reasoning, pieces), calls


def key_for_server(given: str | None) -> str | None:
    """The key of --api-key or, as with OpenAI's clients, of the environment."""
    return given or os.environ.get(KEY_VARIABLE) or None


class RemoteModel:
    """A server with OpenAI's API.

    Args:
        client: a client of the server.
        name: the model to ask for.
        sampling: fields of the request that the user gave; the server's defaults fill the others.
    """

    def __init__(self, client: OpenAIClient, name: str, sampling: Mapping[str, Any]) -> None:
        self.name = name
        self._client = client
        self._sampling = dict(sampling)

    async def answer(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> AsyncGenerator[Piece, None]:
        asked: dict[str, Any] = {"messages": list(messages)}
        if options.tools:
            asked["tools"] = list(options.tools)
        if options.thinking is not None:
            asked["thinking"] = options.thinking
        async with aclosing(self._pieces("/v1/chat/completions", asked)) as pieces:
            async for piece in pieces:
                yield piece

    async def continued(self, prompt: str) -> AsyncGenerator[Piece, None]:
        """The continuation of a prompt, piece by piece.

        Raises:
            RequestFailed: the server refuses it, for example.
        """
        async with aclosing(self._pieces("/v1/completions", {"prompt": prompt})) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces(self, path: str, asked: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        payload = {
            "model": self.name,
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        async with aclosing(self._client.stream(path, payload)) as events:
            async for event in events:
                usage = event.get("usage") or {}
                choice = event["choices"][0] if event.get("choices") else {}
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or ""
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                yield Piece(text, usage.get("completion_tokens"), reasoning, _calls(delta.get("tool_calls") or ()))

    async def close(self) -> None:
        await self._client.close()


def _calls(written: Sequence[Mapping[str, Any]]) -> list[CallPiece]:
    """Pieces of calls as OpenAI's streams have them."""
    pieces = []
    for piece in written:
        function = piece.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        pieces.append(CallPiece(piece.get("index") or 0, name, piece.get("id") or "", arguments))
    return pieces
