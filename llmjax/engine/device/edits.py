"""Compiled edits of the device state outside the step: sampling state of slots, page tables of long prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.engine.core.layer_states import TABLE_CHUNK
from llmjax.engine.device.commands import Edit
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.rows import write_pages
from llmjax.engine.device.slots import CHUNK
from llmjax.engine.programs.cache import Executable, ProgramCache, ProgramSpec
from llmjax.kernels.sharding import Sharding
from llmjax.sampling import state as edits
from llmjax.sampling.params import MAX_SCORED, MAX_WINDOW
from llmjax.sampling.settings import MAX_BANS


@dataclass(frozen=True)
class EditKind:
    """One kind of edit.

    Attributes:
        function: ``function(part, *arguments) -> part``.
        arguments: their shapes.
    """

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SAMPLER_EDITS: Mapping[str, EditKind] = MappingProxyType(
    {
        "reset_slot": EditKind(edits.reset_slot, (_ints(), _floats())),
        "add_prompt_tokens": EditKind(edits.add_prompt_tokens, (_ints(), _ints(CHUNK))),
        "add_output_tokens": EditKind(edits.add_output_tokens, (_ints(), _ints(CHUNK))),
        "set_bias": EditKind(edits.set_bias, (_ints(), _ints(CHUNK), _floats(CHUNK))),
        "set_bans": EditKind(edits.set_bans, (_ints(), _ints(MAX_BANS), _ints(MAX_BANS))),
        "set_recent": EditKind(edits.set_recent, (_ints(), _ints(MAX_WINDOW + 1))),
        "set_scored": EditKind(edits.set_scored, (_ints(), _ints(MAX_SCORED))),
    }
)
TABLE_EDITS: Mapping[str, EditKind] = MappingProxyType(
    {"write_pages": EditKind(write_pages, (_ints(TABLE_CHUNK), _ints(TABLE_CHUNK)))}
)
EDITS: Mapping[str, EditKind] = MappingProxyType({**SAMPLER_EDITS, **TABLE_EDITS})


class StateEditor:
    """Applies edits to a device state, of which the edited part is donated.

    Args:
        state: a state of the same shapes.
        cache: where the programs are kept.
        sharding: the devices, where several have the state.
        samples: whether slots will be edited, not only page tables.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        cache: ProgramCache | None = None,
        sharding: Sharding | None = None,
        samples: bool = True,
    ) -> None:
        self._cache = cache or ProgramCache()
        self._sharding = sharding
        self._samples = samples
        self._sampler, self._tables = jax.tree.map(_shape_of, (state.sampler, state.rows.page_tables))
        self._programs: dict[str, Executable] = {}

    def compiled(self) -> StateEditor:
        """Compiles every edit, and returns this editor; without this call each is compiled at its first use."""
        for name in EDITS if self._samples else TABLE_EDITS:
            self._program(name)
        return self

    def apply(self, state: DeviceState, edit: Edit) -> DeviceState:
        """The state after an edit.

        Raises:
            KeyError: there is no edit of this name.
        """
        run = self._program(edit.name)
        if edit.name in TABLE_EDITS:
            tables = run(state.rows.page_tables, *edit.arguments)
            return replace(state, rows=replace(state.rows, page_tables=tables))
        return replace(state, sampler=run(state.sampler, *edit.arguments))

    def _program(self, name: str) -> Executable:
        if name not in self._programs:
            self._programs[name] = self._cache.get(self._spec(name))
        return self._programs[name]

    def _spec(self, name: str) -> ProgramSpec:
        kind, part = EDITS[name], self._tables if name in TABLE_EDITS else self._sampler
        devices = jax.tree.leaves(part)[0].sharding.addressable_devices
        return ProgramSpec(
            function=kind.function,
            arguments=(part, *kind.arguments),
            device=min(devices, key=lambda device: device.id),
            donated=(0,),
            sharding=self._sharding,
        )


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
