"""Forward and heads: chained in one dispatch, and split over two."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import models
from llmjax.engine.batch import BatchLayout
from llmjax.engine.device_state import NO_TOKEN, DeviceState
from llmjax.engine.graphs import _batches, _set_up
from llmjax.engine.heads import ends, sample, score
from llmjax.engine.programs import StepCompiler
from llmjax.engine.step import begin, forward
from llmjax.platforms import use_compilation_cache
from tests.engine.compilers import TOP, compiler_of


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3-next"))]
)
def compiler(request: pytest.FixtureRequest, compile_cache_dir: str) -> StepCompiler:
    use_compilation_cache(compile_cache_dir)
    return compiler_of(request.param, kv_cache_memory_bytes=2**19)


class Split:
    """A step in two dispatches: the hidden states come to the host's hands in between.

    Args:
        layout: of its bucket.
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
                else score(model, hidden, batch, vocab_size=state.sampler.vocab_size, max_logprobs=TOP)
            )
            return *sample(model, state, ends(hidden, batch), max_logprobs=TOP), scores

        self.first, self.second = first, second


@pytest.mark.parametrize("decode", [True, False])
def test_two_dispatches_do_what_one_does(decode: bool, compiler: StepCompiler) -> None:
    """In every dispatch of the graphs' test, which takes and leaves out every branch of the heads."""
    layout = next(x for b, x in compiler.layouts.items() if b.decode is decode and (b.rows == 4 or not decode))
    program, split = compiler.compile(layout.bucket), Split(compiler, layout)
    chained, parted = _set_up(compiler, layout), _set_up(compiler, layout)
    sampled = set()
    for packed in _batches(compiler, layout):
        chained, expected = program(compiler.weights, chained, packed)
        parted, hidden = split.first(compiler.weights, parted, packed)
        assert hidden.shape[0] == layout.bucket.tokens
        parted, found, scores = split.second(compiler.weights, parted, hidden, packed)
        np.testing.assert_array_equal(found.tokens, expected.tokens[0])
        sampled |= set(np.asarray(found.tokens).tolist())
        for mine, its in zip(jax.tree.leaves(found.logprobs), jax.tree.leaves(expected.logprobs), strict=True):
            np.testing.assert_allclose(mine, its[0], atol=1e-5)
        for mine, its in zip(jax.tree.leaves(scores), jax.tree.leaves(expected.prompt_logprobs), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-5)
    assert len(sampled - {NO_TOKEN}) > 3
    for mine, its in zip(jax.tree.leaves(parted), jax.tree.leaves(chained), strict=True):
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, its, atol=1e-5)
        else:
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v2",  # one record a token, on a CPU without a kernel of its own
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "mamba2", "lfm2", "gemma3", "llama")),
    ],
)
def test_what_layers_keep_is_changed_in_place(name: str, compile_cache_dir: str) -> None:
    use_compilation_cache(compile_cache_dir)
    compiler = compiler_of(name, decode_steps=4)
    arrays = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(compiler.state_shapes.kv)}
    assert len(arrays) <= 3
    for bucket in compiler.layouts:
        if bucket.rows in (1, 4) and bucket.tokens != 2:
            compiled = compiler.compile(bucket)
            text = compiled.as_text()
            for shape in arrays:
                assert f"[{shape}]" in text
                assert not re.findall(rf"\[{shape}\]\S* copy\(", text), bucket
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes >= compiler.state_bytes
