"""Engines on the golden checkpoints, shared by all tests, and a plain full-sequence run to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax import LLM, models
from llmjax.checkpoint import open_checkpoint
from llmjax.engine.tiers import offload
from llmjax.kernels.attention import RaggedBatch
from llmjax.models.layers.state import make_stacks
from tests.checkpoints import GOLDEN

CHARACTERS = Path(__file__).parent / "golden" / "characters"
CONTEXT = 64  # context length of the golden checkpoints
SOON = {"xla_backend_optimization_level": 0}  # compiles faster; engines' own programs are optimized


class Plain:
    """A model run over whole sequences: one request, one prefill, fresh pages, no engine.

    Args:
        path: checkpoint in Hugging Face layout.
        overrides: settings that replace those in its config.json.
    """

    def __init__(self, path: Path, **overrides: Any) -> None:
        checkpoint = open_checkpoint(path, overrides=overrides)
        config = checkpoint.model_config()
        graph, shapes = models.abstract_model(config, dtype=jnp.float32, activation_dtype=jnp.float32)
        self.params = {name: jnp.asarray(checkpoint.tensors[name].read(np.dtype("float32"))) for name in shapes}
        self.vocab_size = config.vocab_size

        @partial(jax.jit, compiler_options=SOON)
        def logits(params: Any, tokens: jax.Array, length: jax.Array, prompt_len: jax.Array) -> jax.Array:
            kv = make_stacks(
                config.states,
                num_pages=dict.fromkeys(config.spans, 2),
                page_size=CONTEXT,
                dtype=jnp.dtype("float32"),
            )
            position = jnp.arange(CONTEXT, dtype=jnp.int32)
            batch = RaggedBatch(
                query_start=jnp.stack([jnp.int32(0), length]),
                kv_len=length[None],
                page_table=jnp.ones((1, 1), jnp.int32),
                kv_index=jnp.where(position < length, CONTEXT + position, 0),
            )
            model = models.merge(graph, params)
            result = model(tokens, position, kv, (batch,) * len(config.spans), prompt_len=prompt_len)
            return model.logits(result.hidden)

        self._logits = logits

    def logits(self, tokens: list[int], *, prompt_len: int = 0) -> np.ndarray:
        """Logits after each of the n tokens, f32 [n, V]; the first ``prompt_len`` tokens are the prompt."""
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        lengths = np.int32(len(tokens)), np.int32(prompt_len)
        return np.asarray(self._logits(self.params, padded, *lengths))[: len(tokens)]

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """f64 [n, V], log_softmax of ``logits``."""
        logits = self.logits(tokens).astype(np.float64)
        return (
            logits
            - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True))
            - logits.max(-1, keepdims=True)
        )

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely token, ``count`` times."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, prompt_len=len(prompt))[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def plain() -> Callable[[str], Plain]:
    """``plain(family)`` runs a golden checkpoint without the engine."""
    return cache(lambda name: Plain(GOLDEN / name))


@pytest.fixture(scope="session")
def plain_model() -> type[Plain]:
    """``plain_model(path, **overrides)`` runs any checkpoint without the engine."""
    return Plain


@pytest.fixture(scope="session")
def _engines(compile_cache_dir: str) -> Iterator[Callable[..., LLM]]:
    made: dict[Any, LLM] = {}

    def get(name: str, *, text: bool = False, **settings: Any) -> LLM:
        options = {
            "dtype": "float32",
            "page_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "kv_cache_memory_bytes": 2**20,
            "compilation_cache_dir": compile_cache_dir,
            **({"tokenizer": str(CHARACTERS)} if text else {"skip_tokenizer_init": True}),
            **settings,
        }
        key = (name, repr(sorted(options.items())))
        if key not in made:
            made[key] = LLM(str(GOLDEN / name), **options)
        return made[key]

    yield get
    for llm in made.values():
        llm.close()


@pytest.fixture
def engine_of(_engines: Callable[..., LLM]) -> Iterator[Callable[..., LLM]]:
    """``engine_of(family, text=False, **settings)``: one engine per settings and session, with an empty prefix cache.

    Afterwards no engine that the test used may hold a page or a request.
    """
    used: list[LLM] = []

    def get(name: str, **settings: Any) -> LLM:
        llm = _engines(name, **settings)
        if llm not in used:
            llm.engine.kv.reset_prefix_cache()
            used.append(llm)
        return llm

    yield get
    for llm in used:
        while not llm.engine.idle:
            llm.engine.step()
        llm.engine.kv.check()
        stats = llm.kv_stats()
        assert (stats.used, stats.free + stats.cached) == (0, stats.total)
        assert llm._frontend.num_requests == 0


@pytest.fixture(scope="module")
def patience() -> Iterator[None]:
    """Has requests wait for pages from disk and other servers, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "FETCH_SECONDS", 300.0)
        patch.setattr(offload, "CLOSE_SECONDS", 300.0)
        yield
