"""Sends steps from rank 0 to all ranks: at once, or stage after stage where processes divide the model's layers.

With several stages, rank 0 has the last one. The others begin a step when rank 0 sends it to them, and each passes on
the hidden states that it has computed. Sampled tokens are known at rank 0 first, so a step that continues them is sent
when they have been read. Chunks of prompts need no sampled token: the first stage computes the next chunk while the
last stage computes the one before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from llmjax.engine.device.commands import Command, RunStep, SetSampled
from llmjax.engine.device.device_state import StepOutput
from llmjax.engine.device.executor import Executor
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.ranks.group import RankZero


@dataclass(eq=False)
class Step:
    """A step that has begun.

    Attributes:
        command: runs it.
        slots: slots of all its rows.
        sampling: slots of its rows that sample.
        copies: whether its tokens are copied to the host as soon as they are there.
        sent: whether the command has been sent to the other ranks.
        output: its output here; None if it has not been started here.
    """

    command: RunStep
    slots: Collection[int]
    sampling: list[int]
    copies: bool = False
    sent: bool = False
    output: StepOutput | None = None

    def start(self, executor: Executor) -> StepOutput:
        """Starts it here."""
        output: StepOutput = executor.apply(self.command)
        if self.copies:
            output.tokens.copy_to_host_async()
        self.output = output
        return output


class Stages(Protocol):
    """How commands reach the ranks, rank 0 included.

    Attributes:
        samplers: the group of the ranks that sample.
    """

    samplers: RankZero

    def apply(self, command: Command) -> Any:
        """Has every rank apply a command, after every step that has begun; returns what it returns here."""

    def apply_to_samplers(self, command: Command) -> Any:
        """Has every rank that samples apply a command, after every step that has begun."""

    def begin(self, step: Step) -> None:
        """Begins a step."""

    def finish_begun(self) -> None:
        """Returns when every step that has begun has been started here."""

    def finish(self, step: Step) -> StepOutput:
        """The output of a step, which is started here, if it has not been."""

    def settle(self, step: Step) -> None:
        """Tells the other ranks what a step has sampled; called when the host has read it."""


class OneStage:
    """Every rank has all layers, and applies every command at once.

    Args:
        executor: the executor of rank 0.
        group: the ranks.
    """

    def __init__(self, executor: Executor, group: RankZero) -> None:
        self._executor = executor
        self.samplers = group

    def apply(self, command: Command) -> Any:
        self.samplers.broadcast(command)
        return self._executor.apply(command)

    def apply_to_samplers(self, command: Command) -> Any:
        return self.apply(command)

    def begin(self, step: Step) -> None:
        self.samplers.broadcast(step.command)
        step.start(self._executor)

    def finish_begun(self) -> None:
        """Does nothing: a step is started when it begins."""

    def finish(self, step: Step) -> StepOutput:
        assert step.output is not None
        return step.output

    def settle(self, step: Step) -> None:
        """Does nothing: every rank has sampled the same tokens."""


class LastStage:
    """Rank 0 has the last stage, and starts steps when their hidden states come. At most one has begun and has not been
    started here.

    Args:
        executor: the executor of the last stage.
        group: all stages.
    """

    def __init__(self, executor: Executor, group: RankZero) -> None:
        self._executor = executor
        self._group = group
        self.samplers: RankZero = Alone()
        self._begun: Step | None = None
        self._unsettled: Step | None = None  # it has been started here; the others do not know what it has sampled

    def apply(self, command: Command) -> Any:
        self.finish_begun()
        self._group.broadcast(command)
        return self._executor.apply(command)

    def apply_to_samplers(self, command: Command) -> Any:
        self.finish_begun()
        return self._executor.apply(command)

    def begin(self, step: Step) -> None:
        """Sends a step to the other stages, now or when they know what it continues."""
        self.finish_begun()
        self._begun = step
        if self._unsettled is None or not set(self._unsettled.sampling) & set(step.slots):
            self._send(step)

    def finish_begun(self) -> None:
        if self._begun is not None:
            self.finish(self._begun)

    def finish(self, step: Step) -> StepOutput:
        """The output of a step; waits for the stages before.

        Raises:
            EngineDead: one of them has gone.
        """
        if step.output is not None:
            return step.output
        if self._unsettled is not None:
            self.settle(self._unsettled)
        if not step.sent:
            self._send(step)
        output = step.start(self._executor)
        self._begun, self._unsettled = None, step
        return output

    def settle(self, step: Step) -> None:
        """Sends the other stages what a step has sampled, and then the next one, if it waits for that."""
        if self._unsettled is not step:
            return
        self._unsettled = None
        if step.sampling:
            rows = self._executor.state.rows
            last_token, length = np.asarray(jnp.stack((rows.last_token, rows.length)))  # the step owns its own arrays
            slot = np.asarray(step.sampling, np.int32)
            self._group.broadcast(SetSampled(slot, last_token[slot], length[slot]))
        if self._begun is not None and not self._begun.sent:
            self._send(self._begun)

    def _send(self, step: Step) -> None:
        self._group.broadcast(step.command)
        step.sent = True
