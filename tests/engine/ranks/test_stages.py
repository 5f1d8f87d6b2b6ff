"""The order in which commands reach the other ranks and the executor of rank 0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import Edit, RunMasked, RunStep, SetSampled
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.ranks.stages import LastStage, OneStage, Step

BUCKET = Bucket(tokens=2, rows=2, decode=True)
EDIT = Edit("write_pages", [])
MASKED = RunMasked(BUCKET, np.zeros((2, 1), np.int32))


class Ranks:
    """An executor and a group that note what they are given: ``here`` it is applied, the others are sent it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        rows = make_row_state(num_slots=3, num_groups=1, pages_per_sequence=1)
        rows = replace(rows, last_token=jnp.array([7, 8, 9], jnp.int32), length=jnp.array([1, 2, 3], jnp.int32))
        self.state = SimpleNamespace(rows=rows)

    def apply(self, command: Any) -> Any:
        self.log.append(("here", command))
        return SimpleNamespace(tokens=None)

    def broadcast(self, command: Any) -> None:
        self.log.append(("others", command))


@pytest.fixture
def ranks() -> Any:
    return Ranks()


def step(*slots: int, samples: bool = True) -> Step:
    packed = np.array(slots, np.int32)
    return Step(RunStep(BUCKET, packed), slots=slots, sampling=list(slots) if samples else [])


def test_every_rank_applies_every_command_in_order(ranks: Any) -> None:
    stages, first = OneStage(ranks, ranks), step(0)
    stages.apply(EDIT)
    stages.begin(first)
    stages.apply_to_samplers(MASKED)
    commands = [EDIT, first.command, MASKED]
    assert ranks.log == [(where, command) for command in commands for where in ("others", "here")]
    assert stages.finish(first) is first.output


def test_a_step_that_continues_rows_is_sent_after_what_they_have_sampled(ranks: Any) -> None:
    stages, first, second, other = LastStage(ranks, ranks), step(0, 2), step(2), step(1)
    stages.begin(first)
    assert ranks.log == [("others", first.command)]
    stages.begin(other)  # for which the first one is started here
    assert ranks.log[1:] == [("here", first.command), ("others", other.command)]
    stages.settle(first)
    (where, sampled) = ranks.log[3]
    assert where == "others" and isinstance(sampled, SetSampled)
    assert [array.tolist() for array in (sampled.slot, sampled.last_token, sampled.length)] == [[0, 2], [7, 9], [1, 3]]
    stages.settle(first)  # a second time there is nothing to send
    stages.begin(second)
    assert ranks.log[4:] == [("here", other.command), ("others", second.command)]
    third = step(2)
    stages.begin(third)  # the host has not read the second one, which has row 2, too
    assert [(where, type(command)) for where, command in ranks.log[6:]] == [
        ("others", SetSampled),
        ("here", RunStep),
    ]
    stages.settle(second)
    assert [type(command) for _, command in ranks.log[8:]] == [SetSampled, RunStep] and third.sent


def test_stages_without_a_head_are_not_sent_what_concerns_sampling(ranks: Any) -> None:
    stages, first = LastStage(ranks, ranks), step(0, samples=False)
    stages.begin(first)
    stages.apply_to_samplers(MASKED)
    stages.apply(EDIT)
    assert ranks.log[1:] == [("here", first.command), ("here", MASKED), ("others", EDIT), ("here", EDIT)]
