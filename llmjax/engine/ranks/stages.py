"""Steps on their way through the stages of a model whose layers processes divide; this process has the last stage.

The others begin a step when they are told of it, and each passes on what it has made of the tokens. What rows sample is
known here first, so a step that continues such rows is told of when that has been read. Chunks of prompts need no
sampled token: the first stage computes the next one while this one computes the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.device_state import StepOutput
from llmjax.engine.device.rows import RowState
from llmjax.engine.ranks.group import Alone
from llmjax.engine.ranks.wire import Array, RunStep, Taken


@dataclass(eq=False)
class StagedStep:
    """A step that has begun.

    Attributes:
        bucket, packed: what it computes.
        slots: of all its rows.
        sampling: of its rows that sample.
        run: this stage's part, of what the stage before has made of the tokens, [T, D].
        told: the others know of it.
        output: of this stage; None: it has not run.
    """

    bucket: Bucket
    packed: npt.NDArray[np.int32]
    slots: Collection[int]
    sampling: list[int]
    run: Callable[[npt.NDArray[np.generic]], StepOutput]
    told: bool = False
    output: StepOutput | None = None


class LastStage:
    """Runs steps when their hidden states come. At most one has begun and not run here.

    Args:
        group: the other stages.
        hidden: shape and type of what comes, by bucket.
        rows: this stage's row state, as the step that has run last has left it.
    """

    def __init__(
        self,
        group: Alone,
        *,
        hidden: Callable[[Bucket], tuple[tuple[int, ...], np.dtype]],
        rows: Callable[[], RowState],
    ) -> None:
        self._group = group
        self._hidden = hidden
        self._rows = rows
        self._begun: StagedStep | None = None
        self._untold: StagedStep | None = None  # it has run here, and the others do not know what it has sampled

    def begin(self, step: StagedStep) -> None:
        """Has the other stages compute a step, now or when they know what it continues."""
        assert self._begun is None
        self._begun = step
        if self._untold is None or not set(self._untold.sampling) & set(step.slots):
            self._tell(step)

    def finish_begun(self) -> None:
        """Returns when every step that has begun has been started here."""
        if self._begun is not None:
            self.finish(self._begun)

    def finish(self, step: StagedStep) -> StepOutput:
        """What a step brings; waits for the stages before.

        Raises:
            EngineDead: one of them has gone.
        """
        if step.output is None:
            if self._untold is not None:
                self.settle(self._untold)
            if not step.told:
                self._tell(step)
            shape, dtype = self._hidden(step.bucket)
            step.output = step.run(np.frombuffer(self._group.hidden(), dtype).reshape(shape))
            self._begun, self._untold = None, step
        return step.output

    def settle(self, step: StagedStep) -> None:
        """Tells the others what a step has sampled, when it has."""
        if self._untold is not step:
            return
        self._untold = None
        if step.sampling:
            rows = self._rows()
            last_token, length = np.asarray(jnp.stack((rows.last_token, rows.length)))  # the step owns its own arrays
            slot = np.asarray(step.sampling, np.int32)
            self._group.tell(Taken(Array.of(slot), Array.of(last_token[slot]), Array.of(length[slot])))
        if self._begun is not None and not self._begun.told:
            self._tell(self._begun)

    def _tell(self, step: StagedStep) -> None:
        self._group.tell(RunStep(step.bucket, Array.of(step.packed)))
        step.told = True
