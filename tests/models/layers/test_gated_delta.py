"""Gated delta net against Hugging Face's (golden/make_gated_delta.py), whatever way tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmjax.kernels.attention import KVLayout, RaggedBatch
from llmjax.models import RMS
from llmjax.models.layers.context import Context
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.state import Recurrent, RecurrentState
from llmjax.models.modules.gated_delta import GatedDeltaModule
from llmjax.models.modules.parameter import axes_of, named

F32 = jnp.dtype(jnp.float32)
SPEC = GatedDelta(key_heads=2, value_heads=6, key_dim=8, value_dim=12, width=4, activation="silu", norm=RMS(1e-5))
ROWS, BUCKET, SLOTS = 3, 32, 5
LONGEST = 100  # tokens of a page, which is all of a sequence here


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "gated_delta.npz") as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def run(golden: dict[str, np.ndarray]) -> Any:
    """One compiled step: (inputs, state, batch) to (outputs, state)."""
    graph, state = nnx.split(GatedDeltaModule(SPEC, golden["x"].shape[1], dtype=F32))
    flat = {}
    for path, parameter in nnx.to_flat_state(state):
        value = golden[".".join(path)]
        assert parameter.get_value().shape == value.shape
        flat[path] = named(jnp.asarray(value), axes_of(parameter))
    module: GatedDeltaModule = nnx.merge(graph, nnx.from_flat_state(flat))
    return jax.jit(lambda n, state, batch: module(n, Context(rotation=None, state=state, batch=batch)))


class Step:
    """Sequences in slots of a state that began as noise."""

    def __init__(self, run: Any, golden: dict[str, np.ndarray]) -> None:
        self.run, self.x = run, golden["x"]
        self.state = jax.tree.map(
            lambda leaf: leaf + 7.0, SPEC.state.make(num_pages=SLOTS, page_size=LONGEST, dtype=F32)
        )
        self.done = np.zeros(SLOTS, int)

    def __call__(self, work: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Outputs of the next tokens; ``work``: slots and how many tokens each."""
        n = np.full((BUCKET, self.x.shape[1]), 3.0, np.float32)
        starts, lengths, slots = (np.zeros(size, np.int32) for size in (ROWS + 1, ROWS, ROWS))
        for row, (slot, count) in enumerate(work):
            begin, done = starts[row], self.done[slot]
            n[begin : begin + count] = self.x[done : done + count]
            starts[row + 1 :] = begin + count
            self.done[slot] += count
            lengths[row], slots[row] = self.done[slot], slot
        batch = RaggedBatch(
            query_start=jnp.asarray(starts),
            kv_len=jnp.asarray(lengths),
            page_table=jnp.asarray(slots)[:, None],
            kv_index=jnp.zeros(BUCKET, jnp.int32),
        )
        out, self.state = self.run(jnp.asarray(n), self.state, batch)
        assert np.isfinite(out).all()
        return [np.asarray(out)[starts[row] : starts[row + 1]] for row in range(len(work))]


@pytest.mark.parametrize("chunk", [23, 1, 2, 5])
def test_chunks(run: Any, golden: dict[str, np.ndarray], chunk: int) -> None:
    step, parts = Step(run, golden), []
    while step.done[2] < 23:
        parts += step([(2, min(chunk, 23 - int(step.done[2])))])
    np.testing.assert_allclose(np.concatenate(parts), golden["y"], rtol=0, atol=2e-4)


def test_rows_among_each_other(run: Any, golden: dict[str, np.ndarray]) -> None:
    step = Step(run, golden)
    parts: dict[int, list[np.ndarray]] = {1: [], 3: [], 4: []}
    for work in ([(4, 7)], [(4, 1), (1, 9)], [(1, 1), (4, 1), (3, 20)], [(3, 1), (1, 2)], [(4, 14), (1, 1)]):
        for (slot, _), out in zip(work, step(work), strict=True):
            parts[slot].append(out)
    for slot, outs in parts.items():
        found = np.concatenate(outs)
        assert len(found) == step.done[slot]
        np.testing.assert_allclose(found, golden["y"][: len(found)], rtol=0, atol=2e-4)


def test_a_slot_that_is_used_again_starts_anew(run: Any, golden: dict[str, np.ndarray]) -> None:
    step = Step(run, golden)
    step([(1, 12)])
    step.done[1] = 0
    np.testing.assert_allclose(step([(1, 23)])[0], golden["y"], rtol=0, atol=2e-4)


def test_state() -> None:
    assert SPEC.state == Recurrent(recent=(3, 2 * 16 + 72), memory=(6, 8, 12))
    state = SPEC.state.make(num_pages=4, page_size=16, dtype=F32)
    assert isinstance(state, RecurrentState)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == 4 * SPEC.state.page_bytes(
        KVLayout.of(F32, page_size=16)
    )
