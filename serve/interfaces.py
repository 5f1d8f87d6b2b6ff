"""What the server needs of ``llmjax.AsyncLLM``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.config import EngineConfig
from llmjax.engine.stats import StatLogger
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import SamplingParams

if TYPE_CHECKING:  # importing it takes a while, and a busy port should be reported at once
    from llmjax.tokenizer import Tokenizer


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
        prompt: Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def check_health(self) -> None: ...

    def add_stat_logger(self, stat_logger: StatLogger, /) -> None: ...

    async def shutdown(self, *, drain_timeout: float) -> None: ...
