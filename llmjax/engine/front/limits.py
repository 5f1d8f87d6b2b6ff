"""What requests may ask of an engine: priorities, log-probabilities, token ids, and how many of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmjax.config import EngineConfig
from llmjax.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:  # importing it takes a while
    from llmjax.engine.info import EngineInfo


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Checks requests before work begins; each check raises InvalidRequest, which names the field at fault.

    Args:
        vocab_size: number of token ids.
        max_model_len: longest prompt and output together, in tokens.
        max_logprobs: log-probabilities of one position that a request may ask for.
        priorities: whether the scheduler knows priorities.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    priorities: bool

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> RequestLimits:
        return cls(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_logprobs=config.max_logprobs,
            priorities=config.scheduling_policy == "priority",
        )

    def check_priority(self, priority: int | None) -> None:
        if priority and not self.priorities:
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", field="priority")

    def check_logprobs(self, count: int | None, *, field: str) -> None:
        if count is not None and not 0 <= count <= self.max_logprobs:
            raise InvalidRequest(
                f"{field} must be between 0 and {self.max_logprobs} (--max-logprobs), not {count}", field=field
            )

    def check_ids(self, token_ids: Collection[int], *, field: str = "prompt") -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            outside = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidRequest(
                f"{field} holds token id {outside}; the vocabulary has {self.vocab_size} tokens", field=field
            )

    def check_prompt(self, length: int, *, field: str = "prompt") -> int:
        """Checks how many tokens a prompt has, and returns for how many the context has room after it."""
        if not length:
            raise InvalidRequest(f"{field} has no tokens", field=field)
        if length >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {length} tokens; the context of {self.max_model_len} must also hold at least one "
                "output token",
                field=field,
                tokens=length,
                limit=self.max_model_len - 1,
            )
        return self.max_model_len - length
