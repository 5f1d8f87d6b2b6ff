"""Models that answer in the terminal: an engine in this process, or a server."""

from __future__ import annotations

import itertools
import os
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llmjax.bench.client import OpenAIClient
    from llmjax.engine.front.requests import PromptInput

Message = Mapping[str, Any]
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Piece:
    """New text of an answer, and the tokens of the answer so far; None: not known yet."""

    text: str
    tokens: int | None


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
            data = Path(picture).expanduser().read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{picture} cannot be read: {error.strerror}") from error
        url = f"data:image/*;base64,{b64encode(data).decode()}"
        images.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


class ChatModel(Protocol):
    """Something to talk to."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]: ...

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

    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        return self.continued(self.chat_prompt(messages))

    def chat_prompt(self, messages: Sequence[Message]) -> PromptInput:
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
        ids = tokenizer.encode(tokenizer.apply_chat_template(shown), add_special_tokens=False)
        return {"prompt_token_ids": ids, "multi_modal_data": data} if data else ids

    async def continued(self, prompt: PromptInput) -> AsyncGenerator[Piece, None]:
        """The continuation of a prompt, piece by piece.

        Raises:
            InvalidRequest: the prompt does not fit the context, for example.
        """
        tokens = 0
        async with aclosing(self._llm.generate(prompt, self._params, next(self._ids))) as outputs:
            async for output in outputs:
                tokens += len(output.outputs[0].token_ids)
                yield Piece(output.outputs[0].text, tokens)

    async def close(self) -> None:
        await self._llm.shutdown(drain_timeout=0)


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

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._pieces("/v1/chat/completions", {"messages": list(messages)})) as pieces:
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
                text = choice.get("text") or choice.get("delta", {}).get("content")
                yield Piece(text or "", usage.get("completion_tokens"))

    async def close(self) -> None:
        await self._client.close()
