"""A step that has been dispatched and whose result has not been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmjax.engine.core.scheduler import StepPlan
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.device_state import NO_TOKEN, StepOutput


def _nothing() -> None:
    return


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose result has not been read. One whose plan ``waits`` has none before `Runner.sample`.

    Attributes:
        result: returns its output; waits if other processes have to finish their part of it first.
        when_read: called when its tokens are there.
    """

    plan: StepPlan
    bucket: Bucket
    result: Callable[[], StepOutput]
    when_read: Callable[[], None] = _nothing

    @property
    def output(self) -> StepOutput:
        """The step's results for the host."""
        return self.result()

    def tokens(self) -> list[tuple[int, ...]]:
        """Waits for the tokens that each row sampled."""
        tokens = np.asarray(self.output.tokens)[:, : len(self.plan.rows)]
        self.when_read()
        rows = list(zip(*tokens.tolist(), strict=True))
        if (tokens == NO_TOKEN).any():
            rows = [tuple([token for token in row if token != NO_TOKEN]) for row in rows]
        return rows
