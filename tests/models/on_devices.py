"""Checkpoints divided over devices, or on a plug-in's; run as a module by test_sharding.py and test_plugin.py, since a
process has one number of devices, and a plug-in from its start.

    python -m tests.models.on_devices PLATFORM COUNT FOLDER…

Prints as JSON, for each folder, the largest difference to Hugging Face's logits and where things lie. A folder with a
config.json alone gets random weights, and the difference is that to one device. On a plug-in the last token comes by
itself.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from llmjax.checkpoint import open_checkpoint
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.devices import CPU, platform_of, take_donations
from llmjax.kernels.loops import bounded_loops
from llmjax.kernels.sharding import WHOLE, Axes, Sharding
from llmjax.models import ModelConfig, abstract_model, init_random, merge, model_config
from llmjax.models.layers.state import make_stacks
from llmjax.parallel.division import Division
from llmjax.parallel.shards import cut_array
from tests.models.conftest import SOON

F32 = jnp.dtype(jnp.float32)
PAGE = 8
VOCAB = Axes((None, "vocab"))


@dataclass(frozen=True)
class Run:
    """What came of a prompt."""

    logits: np.ndarray[Any, Any]  # [T, V]
    sums: int  # over devices, in the first step
    params: dict[str, tuple[int, ...]]  # shapes on a device
    states: list[list[tuple[int, ...]]]  # by layer, those of its stack


def run(
    config: ModelConfig, arrays: dict[str, Any], tokens: np.ndarray[Any, Any], sharding: Sharding, *, decodes: int = 0
) -> Run:
    """The last tokens, as many as ``decodes``, come one by one."""
    number = sharding.mesh.size
    division = Division(config, number)
    graph, _ = abstract_model(division.local, dtype=F32, activation_dtype=F32)
    axes = dict(zip(graph.names, graph.axes, strict=True))
    params = {}
    for name, array in arrays.items():
        cut = division.cut(name, axes[name], array.shape)
        if cut is not None:
            array = np.concatenate([cut_array(array, cut, device) for device in range(number)], cut.axis)
        # Experts and what is inside of each have names, but one of them is divided.
        place = WHOLE if cut is None else Axes((*[None] * cut.axis, axes[name][cut.axis]))
        params[name] = jax.device_put(array, sharding.placed(place))
    count = -(-len(tokens) // PAGE)
    local = division.local

    def make() -> Any:
        return make_stacks(local.states, num_pages=dict.fromkeys(local.spans, 1 + count), page_size=PAGE, dtype=F32)

    kinds: Any = tuple(stack.axes(local.states) for stack in jax.eval_shape(make))
    places = jax.tree.map(sharding.spec, kinds, is_leaf=lambda x: isinstance(x, Axes))
    kv = jax.jit(sharding.program(make, arguments=(), results=places))()

    def step(params: Any, kv: Any, tokens: jax.Array, position: jax.Array, batch: RaggedBatch) -> Any:
        model = merge(graph, params)
        result = model(tokens, position, kv, (batch,) * len(config.spans))
        return model.logits(result.hidden), result.kv

    where = jax.tree.map(lambda x: x.sharding.spec, params)
    whole = PartitionSpec()
    program = jax.jit(
        sharding.program(step, arguments=(where, places, whole, whole, whole), results=(sharding.spec(VOCAB), places))
    )
    found, sums = [], []
    ends = range(len(tokens) - decodes, len(tokens) + 1)
    for start, end in itertools.pairwise((0, *ends)):
        batch = RaggedBatch(
            query_start=jnp.array([0, end - start], jnp.int32),
            kv_len=jnp.array([end], jnp.int32),
            page_table=1 + jnp.arange(count, dtype=jnp.int32)[None],
            kv_index=PAGE + jnp.arange(start, end, dtype=jnp.int32),
            decode=end - start == 1,
        )
        with bounded_loops(platform_of(sharding.mesh.devices[0]) != CPU):  # as `ProgramSpec.lower` has it
            lowered = program.lower(params, kv, jnp.asarray(tokens[start:end]), jnp.arange(start, end), batch)
        sums.append(lowered.as_text().count("stablehlo.all_reduce"))
        logits, kv = lowered.compile(compiler_options=SOON)(
            params, kv, jnp.asarray(tokens[start:end]), jnp.arange(start, end), batch
        )
        found.append(np.asarray(logits)[:, : config.vocab_size])

    def shape(x: jax.Array) -> tuple[int, ...]:
        return tuple(x.addressable_shards[0].data.shape)

    stacked = {layer: [shape(x) for x in jax.tree.leaves(stack)] for stack in kv for layer in stack.layers}
    return Run(
        logits=np.concatenate(found),
        sums=sums[0],
        params={name: shape(x) for name, x in params.items()},
        states=[stacked.get(layer, []) for layer in range(config.num_layers)],  # some layers read those of others
    )


def report(folder: Path, platform: str, count: int) -> dict[str, Any]:
    decodes = int(platform != CPU)
    if (folder / "golden.npz").exists():
        checkpoint = open_checkpoint(folder)
        config = checkpoint.model_config()
        names = abstract_model(config, dtype=F32, activation_dtype=F32)[0].names
        arrays = {name: checkpoint.tensors[name].read(np.dtype(F32)) for name in names}
        # The batch has nothing that says which sequences are long.
        case = "short" if any(rope.by_length for rope in config.ropes) else "long"
        with np.load(folder / "golden.npz") as archive:
            tokens, expected = archive[f"{case}/tokens"], archive[f"{case}/logits"]
    else:
        config = model_config(json.loads((folder / "config.json").read_text()))
        arrays = {name: np.asarray(x) for name, x in init_random(config, jax.random.key(0), dtype=F32).items()}
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, 21).astype(np.int32)
        decodes = 1
        expected = run(config, arrays, tokens, mesh_of(platform, 1), decodes=decodes).logits
    found = run(config, arrays, tokens, mesh_of(platform, count), decodes=decodes)
    return {
        "difference": float(np.abs(found.logits - expected).max()),
        "sums": found.sums,
        "params": found.params,
        "states": found.states,
    }


def mesh_of(platform: str, count: int) -> Sharding:
    return Sharding(Mesh(np.array(jax.devices(platform)[:count]), ("tensor",), axis_types=(AxisType.Auto,)))


def main() -> None:
    platform, count, *folders = sys.argv[1:]
    if platform == CPU:
        jax.config.update("jax_platforms", CPU)
        jax.config.update("jax_num_cpu_devices", int(count))
    else:
        take_donations(platform)
    print(json.dumps({folder: report(Path(folder), platform, int(count)) for folder in folders}))


if __name__ == "__main__":
    main()
