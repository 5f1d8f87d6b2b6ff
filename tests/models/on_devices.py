"""Checkpoints on a mesh of devices; run as a module by test_sharding.py, since a process has one number of devices.

    python -m tests.models.on_devices COUNT FOLDER…

Prints as JSON, for each folder, the largest difference to Hugging Face's logits and where things lie. A folder with a
config.json alone gets random weights, and the difference is that to one device.
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
from jax.sharding import AxisType, Mesh

from llmjax.checkpoint import open_checkpoint
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.sharding import Axes, Sharding, sharded
from llmjax.models import ModelConfig, abstract_model, init_random, merge, model_config

F32 = jnp.dtype(jnp.float32)
PAGE = 8


@dataclass(frozen=True)
class Run:
    """What came of a prompt."""

    logits: np.ndarray[Any, Any]  # [T, V]
    sums: int  # over devices, in the first step
    params: dict[str, jax.Array]
    kv: tuple[Any, ...]


def run(
    config: ModelConfig,
    arrays: dict[str, Any],
    tokens: np.ndarray[Any, Any],
    sharding: Sharding | None,
    *,
    decodes: int = 0,
) -> Run:
    """The last tokens, as many as ``decodes``, come one by one."""
    graph, _ = abstract_model(config, dtype=F32, activation_dtype=F32)

    def placed(axes: Axes, x: Any) -> Any:
        return x if sharding is None else jax.device_put(x, sharding.placed(axes))

    axes = dict(zip(graph.names, graph.axes, strict=True))
    params = {name: placed(Axes(axes[name]), array) for name, array in arrays.items()}
    count = -(-len(tokens) // PAGE)
    states = [layer.mixer.state for layer in config.layers]
    made = [state.make(num_pages=1 + count, page_size=PAGE, dtype=F32) for state in states]
    kv = tuple(
        jax.tree.map(placed, state.axes(pages), pages, is_leaf=lambda x: isinstance(x, Axes))
        for state, pages in zip(states, made, strict=True)
    )

    @jax.jit
    def step(params: Any, kv: Any, tokens: jax.Array, position: jax.Array, batch: RaggedBatch) -> Any:
        model = merge(graph, params)
        result = model(tokens, position, kv, (batch,) * len(config.spans))
        return model.logits(result.hidden), result.kv

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
        arguments = (params, kv, jnp.asarray(tokens[start:end]), jnp.arange(start, end), batch)
        with sharded(sharding):
            lowered = step.lower(*arguments)
        sums.append(lowered.as_text().count("stablehlo.all_reduce"))
        logits, kv = lowered.compile()(*arguments)
        found.append(np.asarray(logits))
    return Run(np.concatenate(found), sums[0], params, kv)


def report(folder: Path, sharding: Sharding) -> dict[str, Any]:
    if (folder / "golden.npz").exists():
        checkpoint = open_checkpoint(folder)
        config = checkpoint.model_config()
        names = abstract_model(config, dtype=F32, activation_dtype=F32)[0].names
        arrays = {name: checkpoint.tensors[name].read(np.dtype(F32)) for name in names}
        with np.load(folder / "golden.npz") as archive:
            tokens, expected, decodes = archive["long/tokens"], archive["long/logits"], 0
    else:
        config = model_config(json.loads((folder / "config.json").read_text()))
        arrays = {name: np.asarray(x) for name, x in init_random(config, jax.random.key(0), dtype=F32).items()}
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, 21).astype(np.int32)
        decodes = 1
        expected = run(config, arrays, tokens, None, decodes=decodes).logits
    found = run(config, arrays, tokens, sharding, decodes=decodes)

    def shape(x: jax.Array) -> tuple[int, ...]:
        return tuple(x.addressable_shards[0].data.shape)

    return {
        "difference": float(np.abs(found.logits - expected).max()),
        "sums": found.sums,
        "params": {name: shape(x) for name, x in found.params.items()},
        "states": [[shape(x) for x in jax.tree.leaves(state)] for state in found.kv],
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    sharding = Sharding(Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,)))
    print(json.dumps({folder: report(Path(folder), sharding) for folder in sys.argv[2:]}))


if __name__ == "__main__":
    main()
