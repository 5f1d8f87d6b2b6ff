"""Golden checkpoints on a mesh of two devices; run as a module by test_sharding.py, since a process has one number of
devices. Prints the largest difference to Hugging Face's logits and where things lie, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from llmjax.checkpoint import open_checkpoint
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.sharding import Axes, Sharding, sharded
from llmjax.models import abstract_model, merge

F32 = jnp.dtype(jnp.float32)
PAGE = 8


def run(folder: Path, sharding: Sharding) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.model_config()
    graph, _ = abstract_model(config, dtype=F32, activation_dtype=F32)
    params = {
        name: jax.device_put(checkpoint.tensors[name].read(np.dtype(F32)), sharding.placed(Axes(axes)))
        for name, axes in zip(graph.names, graph.axes, strict=True)
    }
    with np.load(folder / "golden.npz") as archive:
        tokens, expected = archive["long/tokens"], archive["long/logits"]
    count = -(-len(tokens) // PAGE)
    kv = []
    for spec in config.layers:
        pages = spec.mixer.state.make(num_pages=1 + count, page_size=PAGE, dtype=F32)
        axes = spec.mixer.state.axes(pages)
        kv.append(pages.with_data(jax.device_put(pages.data, sharding.placed(axes.data))))
    batch = RaggedBatch(
        query_start=jnp.array([0, len(tokens)], jnp.int32),
        kv_len=jnp.array([len(tokens)], jnp.int32),
        page_table=1 + jnp.arange(count, dtype=jnp.int32)[None],
        kv_index=PAGE + jnp.arange(len(tokens), dtype=jnp.int32),
    )

    @jax.jit
    def step(params: Any, kv: Any, tokens: jax.Array) -> Any:
        model = merge(graph, params)
        result = model(tokens, jnp.arange(len(tokens)), kv, (batch,) * len(config.spans))
        return model.logits(result.hidden), result.kv

    with sharded(sharding):
        lowered = step.lower(params, tuple(kv), jnp.asarray(tokens))
    logits, kv = lowered.compile()(params, tuple(kv), jnp.asarray(tokens))
    return {
        "difference": float(np.abs(np.asarray(logits) - expected).max()),
        "sums": lowered.as_text().count("stablehlo.all_reduce"),
        "o_proj": params["model.layers.0.self_attn.o_proj.weight"].addressable_shards[0].data.shape,
        "pages": kv[0].data.addressable_shards[0].data.shape,
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    sharding = Sharding(Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,)))
    print(json.dumps({folder: run(Path(folder), sharding) for folder in sys.argv[1:]}))


if __name__ == "__main__":
    main()
