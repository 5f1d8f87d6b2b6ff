"""What the server needs of ``llmjax.AsyncLLM`` and of its tokenizer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from llmjax.config import EngineConfig
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import SamplingParams


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def chat_template(self) -> object | None: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int, /) -> str: ...

    def token_bytes(self, id: int, /) -> bytes: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...


class ModelShape(Protocol):
    """The one thing about the model that requests are checked against."""

    @property
    def vocab_size(self) -> int: ...


class Engine(Protocol):
    """A running model that turns prompts into outputs."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_config(self) -> ModelShape: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def default_sampling_params(self) -> Mapping[str, Any]: ...

    @property
    def num_requests(self) -> int: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def check_health(self) -> None: ...

    def add_stat_logger(self, logger: Any) -> None: ...

    async def shutdown(self, *, drain_timeout: float) -> None: ...
