"""The group of an engine that runs in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llmjax.engine.clients.wire import Message
from llmjax.engine.device.commands import ProgramName, ReadPages, Values, WritePages
from llmjax.engine.ranks.wire import PageShape
from llmjax.errors import LLMJaxError
from llmjax.kernels.choices import Choices

T = TypeVar("T")


class Alone:
    """A group of one rank, which has no other rank to send anything to; see `RankZero`."""

    size = 1
    neighbors = 1

    def meet(self) -> None:
        """JAX sees the devices of this process anyway."""

    def shares_memory(self, devices: int) -> bool:
        """XLA adds up what the devices of one process have."""
        return False

    def agree(self, model: str, pages: list[int]) -> list[int]:
        return pages

    def choose(self, make: Callable[[], Choices]) -> Choices:
        return make()

    def receive_hidden(self) -> bytes:
        raise NotImplementedError("the model has one stage")

    def send_hidden(self, data: bytes) -> None:
        raise NotImplementedError("the model has one stage")

    def end_with_process(self) -> None:
        """No other rank has to notice the end of the process."""

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """No other rank can be lost."""

    def cause(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        """No other rank waits for the end."""

    def everywhere(self, program: ProgramName, compile: Callable[[], T]) -> T:
        return compile()

    def broadcast(self, message: Message) -> None:
        """There is no other rank."""

    def gather(self, command: ReadPages) -> list[Future[list[Values]]]:
        return []

    def scatter(self, command: WritePages) -> None:
        """There is no other rank."""

    def page_shapes(self, group: int) -> list[PageShape]:
        return []
