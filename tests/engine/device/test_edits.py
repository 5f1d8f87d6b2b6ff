"""Compiled edits change the part of the state that they name."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from llmjax.engine.core.layer_states import TableChanges
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.edits import EDITS, StateEditor
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.device.slots import table_edit
from llmjax.sampling.state import make_sampler_state


def test_entries_of_page_tables_are_written() -> None:
    rows = make_row_state(num_slots=2, num_groups=1, pages_per_sequence=3)
    state = DeviceState(kv=(), rows=rows, sampler=make_sampler_state(num_slots=2, vocab_size=8))
    edit = table_edit(TableChanges(np.array([1, 5], np.int32), np.array([7, 9], np.int32)), size=6)
    edited = StateEditor(state).apply(state, edit)
    assert edited.rows.page_tables.tolist() == [[[0, 7, 0], [0, 0, 9]]]
    assert edited.sampler is state.sampler


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_called_as_its_function_is(name: str) -> None:
    kind = EDITS[name]
    assert kind.function.__name__ == name
    assert len(inspect.signature(kind.function).parameters) == 1 + len(kind.arguments)
