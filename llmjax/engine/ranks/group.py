"""The interfaces of a group: the processes, one or many, that run one model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from llmjax.engine.clients.wire import Message
from llmjax.engine.device.commands import ProgramName, ReadPages, Values, WritePages
from llmjax.engine.ranks.wire import PageShape
from llmjax.errors import LLMJaxError
from llmjax.kernels.choices import Choices

T = TypeVar("T")


class Group(Protocol):
    """The interface of a group for every rank.

    Attributes:
        size: number of ranks.
        neighbors: ranks on this machine, itself included.
    """

    size: int
    neighbors: int

    def meet(self) -> None:
        """Makes JAX see the devices of all ranks. Must be called before JAX has opened any."""

    def shares_memory(self, devices: int) -> bool:
        """Whether all ranks are on this machine, and from now on their devices can add up in memory.

        Args:
            devices: number of devices of all ranks.
        """

    def agree(self, model: str, pages: list[int]) -> list[int]:
        """Compares what the ranks have loaded.

        Args:
            model: digest of the loaded model.
            pages: number of pages, by group of layers, that this rank has room for.

        Returns:
            The number of pages, by group of layers, that every rank has room for.

        Raises:
            ConfigError: the ranks have loaded different models.
        """

    def choose(self, make: Callable[[], Choices]) -> Choices:
        """Has rank 0 choose the methods of products for all ranks.

        Args:
            make: chooses them; called on rank 0 alone.
        """

    def receive_hidden(self) -> bytes:
        """Waits for the hidden states of the next step, which the stage before this one has computed.

        Raises:
            EngineDead: a stage has gone.
        """

    def send_hidden(self, data: bytes) -> None:
        """Sends the hidden states of a step to the next stage."""

    def end_with_process(self) -> None:
        """Has the other ranks notice at once when this process is killed."""

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """Has ``lost`` called, on another thread, when a rank has gone; at once, if one has gone already."""

    def cause(self, error: Exception) -> Exception:
        """The cause of a step's error: the loss of a rank, if one is noticed, else the error itself."""

    def close(self) -> None:
        """Leaves the group; rank 0 lets the other ranks end, and waits for them a little."""


class RankZero(Group, Protocol):
    """The interface of a group for rank 0, which has the requests."""

    def everywhere(self, program: ProgramName, compile: Callable[[], T]) -> T:
        """Compiles a program on every rank.

        Args:
            compile: compiles it here.

        Returns:
            What ``compile`` has returned, once every rank has the program.
        """

    def broadcast(self, message: Message) -> None:
        """Sends a command, or another message, to every other rank."""

    def gather(self, command: ReadPages) -> list[Future[list[Values]]]:
        """Has each of the other ranks read its part of some pages: for each stack of layers [pages, layers, …]."""

    def scatter(self, command: WritePages) -> None:
        """Has each of the other ranks write its part of some pages.

        Args:
            command: the pages, with the parts of all other ranks one after another.
        """

    def page_shapes(self, group: int) -> list[PageShape]:
        """Shapes of the parts of a page, of a group of layers, that the other ranks have, in their order."""


class StartedRanks(Protocol):
    """Other ranks that this process has started."""

    def check(self) -> None:
        """Raises ConfigError if one of them has ended."""

    def end(self) -> object:
        """Waits a little for them to end by themselves, and then kills them."""

    def kill(self, rank: int) -> None:
        """Kills a rank that hangs."""
