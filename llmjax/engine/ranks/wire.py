"""What the processes that run one model say to each other: rank 0 leads, the others follow."""

from __future__ import annotations

import msgspec

from llmjax.engine.clients.wire import Failed, Failure, Leave, Message
from llmjax.engine.device.commands import Command, ProgramName, Values


class PageShape(msgspec.Struct, array_like=True, frozen=True):
    """Of one of the arrays of a page's content: [layers, …]."""

    shape: tuple[int, ...]
    dtype: str


class Challenge(Message, tag="challenge"):
    """To who has connected: what to prove the secret with."""

    nonce: bytes


class Join(Message, tag="join"):
    """To the leader, first.

    Args:
        nonce: for the leader to prove the secret with.
        proof: of the secret.
        settings: what all ranks must have alike, by name.
        machine: that this rank is on; equal for those on one.
    """

    rank: int
    nonce: bytes
    proof: bytes
    settings: dict[str, str]
    machine: str


class Welcome(Message, tag="welcome"):
    """To a follower, when all ranks are there.

    Args:
        proof: of the secret.
        port: of JAX's coordinator, on the leader's machine.
        neighbors: ranks on this one's machine, itself included.
    """

    proof: bytes
    port: int
    neighbors: int


class Refused(Message, tag="refused"):
    """To who may not follow, last."""

    reason: str


class Alive(Message, tag="alive"):
    """Of either side, now and then: one that is stopped or hangs stays connected."""


class Loaded(Message, tag="loaded"):
    """To the leader.

    Args:
        model: a digest of what has been loaded.
        pages: of each group of layers, that this process's devices have room for.
    """

    model: str
    pages: list[int]


class Agreed(Message, tag="agreed"):
    """To a follower: the pages of each group of layers, which all ranks have room for."""

    pages: list[int]


class Meet(Message, tag="meet"):
    """To a follower, twice: memory that ranks of one machine share, and whether all of them have it.

    Args:
        name: of it; empty: there is none.
        devices: that add up there.
    """

    name: str
    devices: int


class Met(Message, tag="met"):
    """To the leader: why this rank cannot use that memory; empty: it can."""

    why: str


class Compile(Message, tag="compile"):
    """To a follower: a program that will be run."""

    program: ProgramName


class Compiled(Message, tag="compiled"):
    """To the leader: it can be run, or why not."""

    program: ProgramName
    failure: Failure | None = None


class Hidden(Message, tag="hidden"):
    """Between stages: what the layers of one have made of a step's tokens, for those of the next one.

    Args:
        data: of an array [T, D] of the activations' type.
    """

    data: bytes


class Holds(Message, tag="holds"):
    """To the leader, where pages are moved: what this rank has of a page, by group of layers."""

    groups: list[list[PageShape]]


class Pages(Message, tag="pages"):
    """To the leader: what this rank has of some pages; of each of their arrays [pages, layers, …]."""

    number: int
    arrays: list[Values]


ToFollower = Challenge | Welcome | Refused | Meet | Agreed | Compile | Command | Hidden | Leave | Alive
ToLeader = Join | Alive | Met | Loaded | Compiled | Holds | Pages | Hidden | Failed
