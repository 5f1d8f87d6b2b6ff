"""Small programs beside the step that run for few requests: their sampling state, page tables of long prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from llmjax.engine.core.layer_states import TABLE_CHUNK, TableChanges
from llmjax.engine.device.rows import write_pages
from llmjax.engine.programs.cache import ProgramCache, ProgramSpec
from llmjax.engine.ranks.group import Alone
from llmjax.engine.ranks.wire import Array, RunEdit
from llmjax.kernels.sharding import Sharding
from llmjax.sampling import state as edits
from llmjax.sampling.params import MAX_SCORED, MAX_WINDOW
from llmjax.sampling.settings import MAX_BANS, Feature, RequestSampling
from llmjax.sampling.state import SamplerState

CHUNK = 512  # ids an edit takes at once
Ints = npt.NDArray[np.int32]

# Edits of the sampler's slots, and of page tables, by name.
SLOT_EDITS = {
    edit.__name__: edit
    for edit in (
        edits.reset_slot,
        edits.add_prompt_tokens,
        edits.add_output_tokens,
        edits.set_bias,
        edits.set_bans,
        edits.set_recent,
        edits.set_scored,
    )
}
TABLE_EDITS = {write_pages.__name__: write_pages}


class Editor:
    """Edits of a part of the device's state as compiled programs; the part is donated through each.

    Args:
        part: of the state.
        cache: where the programs are kept.
        sharding: the devices, where several have it.
        group: the processes whose devices have it, each of which makes every edit.
    """

    def __init__(
        self,
        part: Any,
        *,
        cache: ProgramCache | None = None,
        sharding: Sharding | None = None,
        group: Alone | None = None,
    ) -> None:
        self._cache = cache or ProgramCache()
        self._sharding = sharding
        self._group = group or Alone()
        self._shapes = jax.tree.map(_shape_of, part)

    def program(self, edit: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """``edit(part, *arguments) -> part``, in this process; arguments like these."""
        shapes = (jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments)
        devices = jax.tree.leaves(self._shapes)[0].sharding.addressable_devices
        spec = ProgramSpec(
            function=edit,
            arguments=(self._shapes, *shapes),
            device=min(devices, key=lambda device: device.id),
            donated=(0,),
            sharding=self._sharding,
        )
        return self._cache.get(spec)

    def _everywhere(self, edit: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """As ``program``, in all processes."""
        program = self.program(edit, *arguments)
        if self._group.size == 1:
            return program

        def run(part: Any, *given: Any) -> Any:
            self._group.tell(RunEdit(edit.__name__, [Array.of(argument) for argument in given]))
            return program(part, *given)

        return run


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


class TableEditor(Editor):
    """Writes entries of page tables [G, S, P], a chunk at a time."""

    def compiled(self) -> TableEditor:
        """This one, when its program is compiled."""
        _ = self._write
        return self

    def write(self, page_tables: jax.Array, changes: TableChanges) -> jax.Array:
        """Args: changes: at most TABLE_CHUNK."""
        entry, page = np.full(TABLE_CHUNK, page_tables.size, np.int32), np.zeros(TABLE_CHUNK, np.int32)
        entry[: len(changes.entry)], page[: len(changes.page)] = changes.entry, changes.page
        written: jax.Array = self._write(page_tables, entry, page)
        return written

    @cached_property
    def _write(self) -> Callable[..., jax.Array]:
        chunk = np.zeros(TABLE_CHUNK, np.int32)
        return self._everywhere(write_pages, chunk, chunk)


class SlotEditor(Editor):
    """Edits of ``SamplerState`` slots."""

    def compiled(self) -> SlotEditor:
        """This one, when every edit is compiled; otherwise each is compiled at its first use."""
        _ = self._reset, self._add_prompt, self._add_output, self._set_bias, self._set_bans
        _ = self._set_recent, self._set_scored
        return self

    def set_up(
        self,
        state: SamplerState,
        slot: int,
        sampling: RequestSampling,
        *,
        prompt: list[int],
        output: list[int],
    ) -> SamplerState:
        """Makes the slot that of a request that has ``output`` behind it already (after a preemption)."""
        at = np.int32(slot)
        state = self._reset(state, at, np.float32(sampling.bias_fill))
        if sampling.features & Feature.PENALTY:
            older = max(0, len(prompt) + len(output) - sampling.window) if sampling.window else 0
            for ids in self._chunks(np.asarray(prompt[older:], np.int32)):
                state = self._add_prompt(state, at, ids)
            for ids in self._chunks(np.asarray(output[max(0, older - len(prompt)) :], np.int32)):
                state = self._add_output(state, at, ids)
        if sampling.window:
            state = self._set_recent(state, at, recent_tokens(prompt, output))
        if sampling.scored:
            scored = np.full(MAX_SCORED, self._shapes.vocab_size, np.int32)
            scored[: len(sampling.scored)] = sampling.scored
            state = self._set_scored(state, at, scored)
        if sampling.features & Feature.BIAS:
            state = self._bias(state, at, sampling.bias_ids, sampling.bias_values)
            if len(output) < sampling.min_tokens:
                forbidden = np.full(len(sampling.stop_ids), -np.inf, np.float32)
                state = self._bias(state, at, sampling.stop_ids, forbidden)
        if sampling.bad_words:
            state = self.ban(state, slot, sampling, history=[*prompt, *output][:-1])
        return state

    def allow_stops(self, state: SamplerState, slot: int, sampling: RequestSampling) -> SamplerState:
        """Ends the time of ``min_tokens``."""
        return self._bias(state, np.int32(slot), sampling.stop_ids, sampling.stop_values)

    def ban(self, state: SamplerState, slot: int, sampling: RequestSampling, *, history: list[int]) -> SamplerState:
        """Sets what bad words forbid next, given all tokens but the last."""
        previous = np.full(MAX_BANS, -1, np.int32)
        tokens = np.full(MAX_BANS, self._shapes.vocab_size, np.int32)
        for i, pair in enumerate(sampling.bans(history)):
            previous[i], tokens[i] = pair
        return self._set_bans(state, np.int32(slot), previous, tokens)

    def _bias(self, state: SamplerState, slot: np.int32, ids: Ints, values: npt.NDArray[np.float32]) -> SamplerState:
        for start, chunk in zip(range(0, len(ids), CHUNK), self._chunks(ids), strict=True):
            part = np.zeros(CHUNK, np.float32)
            part[: len(ids) - start] = values[start : start + CHUNK]
            state = self._set_bias(state, slot, chunk, part)
        return state

    def _chunks(self, ids: Ints) -> Iterator[Ints]:
        for start in range(0, len(ids), CHUNK):
            chunk = np.full(CHUNK, self._shapes.vocab_size, np.int32)
            chunk[: len(ids) - start] = ids[start : start + CHUNK]
            yield chunk

    @cached_property
    def _reset(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.reset_slot, np.int32(0), np.float32(0))

    @cached_property
    def _add_prompt(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.add_prompt_tokens, np.int32(0), np.zeros(CHUNK, np.int32))

    @cached_property
    def _add_output(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.add_output_tokens, np.int32(0), np.zeros(CHUNK, np.int32))

    @cached_property
    def _set_bias(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.set_bias, np.int32(0), np.zeros(CHUNK, np.int32), np.zeros(CHUNK, np.float32))

    @cached_property
    def _set_bans(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.set_bans, np.int32(0), np.zeros(MAX_BANS, np.int32), np.zeros(MAX_BANS, np.int32))

    @cached_property
    def _set_recent(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.set_recent, np.int32(0), np.zeros(MAX_WINDOW + 1, np.int32))

    @cached_property
    def _set_scored(self) -> Callable[..., SamplerState]:
        return self._everywhere(edits.set_scored, np.int32(0), np.zeros(MAX_SCORED, np.int32))


def recent_tokens(prompt: list[int], output: list[int], *, size: int = MAX_WINDOW + 1) -> Ints:
    """``SamplerState.recent`` of a slot: the last ``size`` tokens, each at its position modulo ``size``."""
    marked = [-token - 1 for token in prompt[max(0, len(prompt) + len(output) - size) :]]
    marked += [token + 1 for token in output[-size:]]
    recent = np.zeros(size, np.int32)
    end = len(prompt) + len(output)
    recent[np.arange(end - len(marked), end) % size] = marked
    return recent
