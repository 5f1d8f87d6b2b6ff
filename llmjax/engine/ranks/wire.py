"""Messages between the processes that run one model, besides the commands: joining, compiling, answers."""

from __future__ import annotations

import msgspec

from llmjax.engine.clients.wire import Failed, Failure, Leave, Message
from llmjax.engine.device.commands import Command, ProgramName, Values


class PageShape(msgspec.Struct, array_like=True, frozen=True):
    """Shape and dtype of one array of a page's content: [layers, …]."""

    shape: tuple[int, ...]
    dtype: str


class Challenge(Message, tag="challenge"):
    """To a process that has connected: random bytes to prove the secret with."""

    nonce: bytes


class Join(Message, tag="join"):
    """To rank 0, first: asks to join the group.

    Args:
        nonce: random bytes for rank 0 to prove the secret with.
        proof: proves that this rank knows the secret.
        settings: everything that all ranks must have alike, by name.
        machine: equal for all ranks on one machine.
    """

    rank: int
    nonce: bytes
    proof: bytes
    settings: dict[str, str]
    machine: str


class Welcome(Message, tag="welcome"):
    """To a worker, when all ranks are there.

    Args:
        proof: proves that rank 0 knows the secret.
        port: where JAX's coordinator listens, on the machine of rank 0.
        neighbors: ranks on this worker's machine, itself included.
    """

    proof: bytes
    port: int
    neighbors: int


class Refused(Message, tag="refused"):
    """To a process that may not join, or must leave: the last message, with the reason."""

    reason: str


class Alive(Message, tag="alive"):
    """From either side, now and then, because a process that is stopped or hangs stays connected."""


class Loaded(Message, tag="loaded"):
    """To rank 0, when a worker has loaded its part of the model.

    Args:
        model: digest of what has been loaded.
        pages: number of pages that the worker's devices have room for, by group of layers.
    """

    model: str
    pages: list[int]


class Agreed(Message, tag="agreed"):
    """To a worker: the number of pages that all ranks have room for, by group of layers."""

    pages: list[int]


class Chosen(Message, tag="chosen"):
    """To a worker: how rank 0 computes products, and so all ranks do.

    Args:
        choices: for each kind of matrix, rows and a method for up to that many.
    """

    choices: list[tuple[str, list[tuple[int, str]]]]


class Meet(Message, tag="meet"):
    """To a worker, twice: memory that ranks of one machine share, and whether all of them have it.

    Args:
        name: name of that memory; empty: there is none.
        devices: number of devices that add up there.
    """

    name: str
    devices: int


class Met(Message, tag="met"):
    """To rank 0: why a worker cannot use that memory; empty: it can."""

    why: str


class Compile(Message, tag="compile"):
    """To a worker: compiles a program that will be run."""

    program: ProgramName


class Compiled(Message, tag="compiled"):
    """To rank 0: a program can be run, or why not."""

    program: ProgramName
    failure: Failure | None = None


class Hidden(Message, tag="hidden"):
    """Between stages: the hidden states of a step, from one stage to the next.

    Args:
        data: bytes of an array [T, D] of the activations' type.
    """

    data: bytes


class Holds(Message, tag="holds"):
    """To rank 0, where pages are moved: shapes of a worker's part of a page, by group of layers."""

    groups: list[list[PageShape]]


class Pages(Message, tag="pages"):
    """To rank 0: a worker's part of some pages, for each stack of layers [pages, layers, …]."""

    number: int
    arrays: list[Values]


ToWorker = Challenge | Welcome | Refused | Meet | Chosen | Agreed | Compile | Command | Hidden | Leave | Alive
ToRankZero = Join | Alive | Met | Loaded | Compiled | Holds | Pages | Hidden | Failed
