"""Forward and heads: chained in one dispatch, and split over two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import models
from llmjax.engine.device.batch import BatchLayout
from llmjax.engine.device.device_state import NO_TOKEN, DeviceState
from llmjax.engine.device.heads import ends, few_rows, sample, score
from llmjax.engine.device.step import begin, forward
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.graphs import _batches, _set_up
from llmjax.jax_settings import use_compilation_cache
from tests.engine.compilers import TOP, compiler_of
from tests.levels import at_levels


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3-next"))]
)
def compiler(request: pytest.FixtureRequest, compile_cache_dir: str) -> StepCompiler:
    use_compilation_cache(compile_cache_dir)
    return compiler_of(request.param, kv_cache_memory_bytes=2**20)  # pages for four rows of each


class Split:
    """A step in two dispatches: the hidden states are returned to the host in between.

    Args:
        layout: the batch layout of the step's bucket.
    """

    def __init__(self, compiler: StepCompiler, layout: BatchLayout) -> None:
        names, graph = tuple(compiler.model.params), compiler.model.graph

        def merged(weights: Any) -> models.CausalLM:
            return models.merge(graph, dict(zip(names, weights, strict=True)))

        @partial(jax.jit, donate_argnums=1)
        def first(weights: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, jax.Array]:
            return forward(merged(weights), *begin(state, packed, layout=layout))

        @partial(jax.jit, donate_argnums=1)
        def second(weights: Any, state: DeviceState, hidden: jax.Array, packed: jax.Array) -> Any:
            model = merged(weights)
            state, batch = begin(state, packed, layout=layout)
            scores = (
                None
                if layout.bucket.decode
                else score(model, state, hidden, batch, vocab_size=state.sampler.vocab_size, max_logprobs=TOP)
            )
            return *sample(model, state, ends(hidden, batch), max_logprobs=TOP), scores

        self.first, self.second = first, second


@pytest.mark.parametrize("decode", [True, False])
def test_two_dispatches_do_what_one_does(decode: bool, compiler: StepCompiler) -> None:
    """Compares them in every dispatch of the graphs' test, which takes and skips every branch of the heads."""
    layout = next(x for b, x in compiler.layouts.items() if b.decode is decode and (b.rows == 4 or not decode))
    program, split = compiler.compile(layout.bucket), Split(compiler, layout)
    chained, parted = _set_up(compiler, layout), _set_up(compiler, layout)
    sampled, counts = set(), set()
    for packed in _with_fewer_rows(compiler, layout):
        chained, expected = program(compiler.weights, chained, packed)
        parted, hidden = split.first(compiler.weights, parted, packed)
        assert hidden.shape[0] == layout.bucket.tokens
        parted, found, scores = split.second(compiler.weights, parted, hidden, packed)
        tokens = np.asarray(found.tokens)
        np.testing.assert_array_equal(tokens, expected.tokens[0])
        samples = tokens != NO_TOKEN
        sampled |= set(tokens.tolist())
        counts.add(int(samples.sum()))
        for mine, its in zip(jax.tree.leaves(found.logprobs), jax.tree.leaves(expected.logprobs), strict=True):
            np.testing.assert_allclose(np.asarray(mine)[samples], np.asarray(its)[0, samples], atol=1e-5)
        for mine, its in zip(jax.tree.leaves(scores), jax.tree.leaves(expected.prompt_logprobs), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-5)
    assert len(sampled - {NO_TOKEN}) > 3
    assert counts == ({4} if decode else {0, 1, 4}) and few_rows(4) == 1
    for mine, its in zip(jax.tree.leaves(parted), jax.tree.leaves(chained), strict=True):
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, its, atol=1e-5)
        else:
            np.testing.assert_array_equal(mine, its)


def _with_fewer_rows(compiler: StepCompiler, layout: BatchLayout) -> Iterator[np.ndarray]:
    """The graphs' batches; of mixed ones also those in which all rows but one are in the middle of their prompts, and
    then all rows."""
    yield from _batches(compiler, layout)
    if layout.bucket.decode:
        return
    for i, packed in enumerate(_batches(compiler, layout)):
        steps = layout.parts(packed)["steps"]
        steps[np.arange(len(steps)) != i % 4] = 0
        yield packed
    steps[:] = 0
    yield packed


IN_PLACE = [
    ("deepseek-v2", "auto", 4),  # one record a token, on a CPU without a kernel of its own
    ("deepseek-v2", "int8", 1),
    ("gemma3", "auto", 4),  # windows, one head of keys and values
    ("gemma3", "int8", 1),
    ("llama", "fp8", 4),
    ("lfm2", "auto", 1),
    ("mamba2", "auto", 1),
    ("mamba2", "auto", 4),
    ("qwen3-next", "auto", 4),
]


@pytest.mark.parametrize(
    "name,kv,slots",
    at_levels(
        IN_PLACE, fast=IN_PLACE[:1], slow=[("gemma3", "int8", 1), ("llama", "fp8", 4), ("qwen3-next", "auto", 4)]
    ),
)
def test_what_layers_keep_is_changed_in_place(name: str, kv: str, slots: int, compile_cache_dir: str) -> None:
    use_compilation_cache(compile_cache_dir)
    # Pages for more sequences than a step has rows: a copy would be larger than all else that a step needs.
    many = {"max_num_seqs": 2048, "kv_cache_memory_bytes": 2**26, "kv_cache_dtype": kv}
    compiler = compiler_of(name, slots=slots, decode_steps=4, **many)
    leaves = jax.tree.leaves(compiler.state_shapes.kv)
    arrays = {",".join(map(str, leaf.shape)) for leaf in leaves}
    assert len(leaves) == len(arrays) <= 3
    for bucket in compiler.layouts:
        if not bucket.decode or (slots > 1 and bucket.rows in (1, slots)):
            compiled = compiler.compile(bucket)
            text, memory = compiled.as_text(), compiled.memory_analysis()
            for shape in arrays:
                assert f"[{shape}]" in text
                assert not re.findall(rf"\[{shape}\]\S* copy\(", text), bucket
            assert memory.alias_size_in_bytes >= compiler.state_bytes
            assert memory.temp_size_in_bytes < min(leaf.size * leaf.dtype.itemsize for leaf in leaves) // 2
