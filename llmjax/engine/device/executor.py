"""The executor of a rank owns weights, device state, compiled programs and page moves, and applies commands to them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from llmjax.config import EngineConfig
from llmjax.engine.device.commands import (
    Command,
    Edit,
    LoadAdapter,
    PlaceImages,
    ProgramName,
    ReadPages,
    RunEncoder,
    RunMasked,
    RunStep,
    SetSampled,
    Sleep,
    Values,
    WakeState,
    WakeWeights,
    WritePages,
)
from llmjax.engine.device.device_state import DeviceState, StepOutput
from llmjax.engine.device.edits import StateEditor
from llmjax.engine.device.encoder_state import EncoderState
from llmjax.engine.device.heads import Sampled
from llmjax.engine.device.page_moves import PageMover, PendingPages
from llmjax.engine.device.rows import RowState
from llmjax.engine.device.sleep import Sleeper
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.group import Group
from llmjax.host_memory import keep_freed_blocks
from llmjax.kernels.sharding import on_devices
from llmjax.models.vision.batch import PatchBatch


class Executor:
    """Applies commands to the devices of one rank, in order. Every rank of a group has one.

    Args:
        compiler: compiles this rank's programs.
        config: the configuration with which the model was loaded.
        group: where hidden states come from and go to, if the model has several stages.
        threads: where programs of edits and page moves are compiled.

    Attributes:
        state: the state that stays on the devices from command to command.
    """

    state: DeviceState

    def __init__(self, compiler: StepCompiler, config: EngineConfig, *, group: Group, threads: CompileThreads) -> None:
        self._compiler = compiler
        self._group = group
        self._sleeper = Sleeper(config, platform=compiler.platform, model=compiler.model)
        self._state_gone = False
        if compiler.platform.is_cpu:
            keep_freed_blocks()
        self._take_weights()
        self.state = compiler.make_state()
        self._output: StepOutput | None = None  # output of the latest step
        self._images: EncoderState | None = None  # of the encoder's run that has begun
        self._programs: dict[ProgramName, Executable] = {}
        editor = StateEditor(
            self.state, cache=compiler.cache, sharding=compiler.platform.sharding, samples=compiler.has_head
        )
        self._editor = threads.submit(editor.compiled)
        self._put_adapter: Future[Executable] | None = None
        if (adapters := compiler.model.adapters) is not None:
            self._put_adapter = threads.submit(adapters.compiled, compiler.cache)
        self._mover: Future[PageMover] | None = None
        if config.moves_pages:
            self._mover = threads.submit(PageMover(compiler).compiled)

    def compile(self, program: ProgramName) -> Executable:
        """Compiles a program, or reads it, so that commands can run it. May be called by several threads.

        Raises whatever XLA raises.
        """
        build = {
            "step": self._compiler.compile,
            "masked": self._compiler.compile_masked,
            "encode": self._compiler.compile_encoder,
        }[program.kind]
        executable = self._programs[program] = build(program.bucket)
        return executable

    def wait_ready(self) -> None:
        """Returns when edits and page moves are compiled."""
        self._editor.result()
        if self._put_adapter is not None:
            self._put_adapter.result()
        if self._mover is not None:
            self._mover.result()

    def apply(self, command: Command) -> Any:
        """Starts what a command says, and returns without waiting for the devices.

        Returns:
            For `RunStep` a `StepOutput`, or from a stage without a head the hidden states [T, D]; for `RunMasked` a
            `Sampled`; for `ReadPages` the `PendingPages`; else None.

        Raises:
            EngineDead: the hidden states of a step do not come, because a stage has gone.
            CheckpointError: `WakeWeights` finds other files than before, or none.
        """
        match command:
            case RunStep():
                return self._run_step(command)
            case RunMasked():
                return self._run_masked(command)
            case PlaceImages():
                self._place_images(command)
            case RunEncoder():
                self._run_encoder(command)
            case LoadAdapter():
                self._load_adapter(command)
            case Edit():
                self.state = self._editor.result().apply(self.state, command)
            case SetSampled():
                self.state = replace(self.state, rows=_with_sampled(self.state.rows, command))
            case ReadPages():
                return self._read_pages(command)
            case WritePages():
                kv = self._page_mover.write(self.state.kv, command.group, command.pages, command.arrays)
                self.state = replace(self.state, kv=kv)
            case Sleep():
                self._free_state()
                if self._compiler.model.adapters is not None:
                    self._compiler.model.adapters.free()
                self._sleeper.sleep(discard=command.discard)
            case WakeWeights():
                self._sleeper.wake()
                if self._compiler.model.adapters is not None:
                    self._compiler.model.adapters.make()
                self._take_weights()
            case WakeState():
                self.state = self._compiler.make_state() if self._state_gone else self.state
                self._state_gone = False
        return None

    @property
    def asleep(self) -> bool:
        """Whether something that steps need has left the devices."""
        return self._state_gone or self._sleeper.asleep

    def page_arrays(self, group: int) -> int:
        """Number of a group's arrays that this rank has, or has a part of."""
        return self._page_mover.arrays_of(group)

    @property
    def sampler_bytes(self) -> int:
        """Bytes of the device's memory that the sampler's slots take."""
        return sum(array.nbytes for array in jax.tree.leaves(self.state.sampler))

    def _take_weights(self) -> None:
        """Has later steps use the weights that the model has now."""
        self._weights = self._compiler.weights
        self._adapted_weights = self._compiler.adapted_weights
        self._head_weights = self._compiler.head_weights
        self._encoder_weights = self._compiler.encoder_weights

    def _load_adapter(self, command: LoadAdapter) -> None:
        adapters = self._compiler.model.adapters
        assert adapters is not None and self._put_adapter is not None
        adapters.put(self._put_adapter.result(), command.place, command.values)
        self._take_weights()

    def _free_state(self) -> None:
        self._output, self._images, self._state_gone = None, None, True
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()

    @property
    def _page_mover(self) -> PageMover:
        assert self._mover is not None
        return self._mover.result()

    def _run_step(self, command: RunStep) -> StepOutput | jax.Array:
        program = self._programs[ProgramName.step(command.bucket)]
        before = () if self._compiler.model.graph.config.embeds else (self._hidden(command),)
        weights = self._adapted_weights if command.bucket.adapters else self._weights
        self.state, output = program(weights, self.state, command.packed, *before)
        if not self._compiler.has_head:
            hidden: jax.Array = output
            self._group.send_hidden(np.asarray(hidden).tobytes())
            return hidden
        self._output = output
        return self._output

    def _hidden(self, command: RunStep) -> Values:
        """The hidden states [T, D] that the stage before has computed for a step."""
        shape = self._compiler.hidden(command.bucket)
        return np.frombuffer(self._group.receive_hidden(), shape.dtype).reshape(shape.shape)

    def _run_masked(self, command: RunMasked) -> Sampled:
        assert self._output is not None
        program, ends = self._programs[ProgramName.masked(command.bucket)], self._output.ends
        state, sampled = program(self._head_weights, self.state.without_layers, ends, command.mask)
        self.state = state.with_layers(self.state)
        masked: Sampled = sampled
        return masked

    def _place_images(self, command: PlaceImages) -> None:
        everywhere, adapter = self._compiler.platform.everywhere, None
        if command.adapter is not None:
            adapter = tuple(on_devices(value, everywhere) for value in command.adapter)
        self._images = EncoderState(command.places, PatchBatch(**command.batch), adapter)

    def _run_encoder(self, command: RunEncoder) -> None:
        images, program = self._images, self._programs[ProgramName("encode", command.bucket)]
        assert images is not None
        last = command.bucket.rows == self._compiler.encoder_parts(command.bucket.tokens) - 1
        media, places = (self.state.media, images.places) if last else (None, None)
        made = program(self._encoder_weights, media, places, images.batch, images.underway, images.adapter)
        if last:
            self.state, self._images = replace(self.state, media=made), None
        else:
            self._images = images.after(made)

    def _read_pages(self, command: ReadPages) -> PendingPages:
        return self._page_mover.read(self.state.kv, command.group, command.pages)


def _with_sampled(rows: RowState, sampled: SetSampled) -> RowState:
    """The rows with the last tokens and lengths of those that have sampled."""
    slot = sampled.slot
    padded = np.full(rows.length.shape, rows.length.shape[0], np.int32)
    padded[: len(slot)] = slot

    def with_new(old: jax.Array, new: Values) -> jax.Array:
        values = np.zeros(old.shape, np.int32)
        values[: len(slot)] = new
        return old.at[padded].set(values, mode="drop")

    return replace(
        rows,
        last_token=with_new(rows.last_token, sampled.last_token),
        length=with_new(rows.length, sampled.length),
    )
