"""What the server needs of ``llmjax.AsyncLLM``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.core.stats import StatLogger
from llmjax.outputs import PoolingRequestOutput, RequestOutput
from llmjax.parsing.content import ContentReading
from llmjax.pooling_params import PoolingParams
from llmjax.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:  # importing it takes a while, and a busy port should be reported at once
    from pathlib import Path

    from llmjax.adapters.reference import Adaptation
    from llmjax.engine.front.adapters import AdapterRegistry
    from llmjax.engine.front.vectors import PooledTokens
    from llmjax.engine.info import EngineInfo, EngineState, SleepState
    from llmjax.tokenizer import Tokenizer


class Engine(Protocol):
    """A running model that turns prompts into outputs."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def request_ids(self) -> list[str]: ...

    async def abort(self, request_id: str) -> None: ...

    @property
    def adapters(self) -> AdapterRegistry: ...

    async def load_adapter(self, name: str, path: Path, *, base: str | None, replace: bool) -> None: ...

    async def unload_adapter(self, name: str, *, number: int | None) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def sleep_state(self) -> SleepState: ...

    async def sleep(self, level: int, mode: str) -> None: ...

    async def wake_up(self, tags: Sequence[str] | None) -> None: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def num_held_back(self) -> int: ...

    async def pause_generation(self, mode: str, *, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> None: ...

    def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        shown: frozenset[int] = frozenset(),
        thinking: ThinkingBudget | None = None,
        reading: ContentReading | None = None,
        client: str = "",
        lora_request: Adaptation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def beam_search(
        self,
        prompt: Mapping[str, Any],
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        logprobs: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        lora_request: Adaptation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @property
    def states(self) -> tuple[EngineState, ...]: ...

    @property
    def renders_pairs(self) -> bool: ...

    def pooled_tokens(
        self, prompt: Any, pooling_params: PoolingParams, *, add_special_tokens: bool = True
    ) -> PooledTokens: ...

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: Adaptation | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]: ...

    def check_health(self) -> None: ...

    @property
    def exit_status(self) -> int: ...

    async def wait_died(self) -> int: ...

    def add_stat_logger(self, stat_logger: StatLogger, /) -> None: ...

    async def shutdown(self, *, drain_timeout: float) -> None: ...
