"""Golden checkpoints, and a minimal engine that runs a model over pages the way the real one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.qtensor import QTensor
from llmjax.models import ModelConfig, abstract_model, merge, model_config
from llmjax.models.layers.state import LastTokens, make_stacks
from tests.checkpoints import GOLDEN

PAGE = 4  # tokens a page: small, so that every prompt spans many
# What models say is compared, not what XLA makes of it, which tests of engines do; so a family takes half as long.
SOON = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Case:
    """A prompt and the logits Hugging Face computes at some of its positions."""

    tokens: np.ndarray  # i32 [n]
    at: np.ndarray  # [m]
    logits: np.ndarray  # f32 [m, V]


@dataclass(frozen=True)
class Golden:
    """One tiny checkpoint."""

    config: dict[str, Any]
    params: dict[str, np.ndarray]
    cases: dict[str, Case]
    greedy: np.ndarray  # i32 [65], a token and Hugging Face's greedy continuation


@dataclass
class Request:
    """A request's tokens and where its pages lie."""

    tokens: Sequence[int]
    tables: list[np.ndarray]  # per group of layers, i32 [P]
    prompt_len: int  # how many of the tokens are the prompt
    done: int = 0  # tokens already in the pages


@dataclass
class Stepper:
    """Packs chunks of requests into padded steps over shuffled pages.

    Args:
        dtype, activation_dtype: see ``abstract_model``.
    """

    config: ModelConfig
    params: Mapping[str, Any]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    max_len: int = 48
    num_pages: int = 64
    seed: int = 0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        graphdef, shapes = abstract_model(self.config, dtype=self.dtype, activation_dtype=self.activation_dtype)
        assert {name: like.shape for name, like in shapes.items()} == {n: p.shape for n, p in self.params.items()}
        given = self.params
        self.weights = {
            name: given[name] if isinstance(given[name], QTensor) else jnp.asarray(given[name], like.dtype)
            for name, like in shapes.items()
        }
        self.kv = make_stacks(
            self.config.states,
            num_pages=dict.fromkeys(self.config.spans, self.num_pages),
            page_size=PAGE,
            dtype=self.activation_dtype,
        )
        rng = np.random.default_rng(self.seed)
        self.free = [list(rng.permutation(np.arange(1, self.num_pages))) for _ in self.config.spans]

        @partial(jax.jit, donate_argnums=1, compiler_options=SOON)
        def step(params: Any, kv: Any, tokens: Any, positions: Any, batches: Any, prompt_len: Any) -> Any:
            model = merge(graphdef, params)
            out = model(tokens, positions, kv, batches, prompt_len=prompt_len)
            return model.logits(out.hidden), out.kv

        self.jitted = step

    def add(self, tokens: Sequence[int], *, prompt_len: int | None = None) -> Request:
        pages = self.max_len // PAGE
        tables = [np.array([free.pop() for _ in range(pages)], np.int32) for free in self.free]
        prompt_len = len(tokens) if prompt_len is None else prompt_len
        self.requests.append(Request(tokens=tokens, tables=tables, prompt_len=prompt_len))
        return self.requests[-1]

    def step(self, work: Sequence[tuple[Request, int]], *, bucket: int, rows: int) -> list[np.ndarray]:
        """Runs the next tokens of some requests together.

        Args:
            work: requests and how many of their tokens to run.
            bucket, rows: tokens and requests the step is padded to.

        Returns:
            Logits f32 [count, V] for each entry of ``work``.
        """
        tokens, positions = np.full(bucket, -1, np.int32), np.full(bucket, 7, np.int32)
        prompts = np.zeros(bucket, np.int32)
        starts, lengths = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        groups = range(len(self.config.spans))
        tables = [np.zeros((rows, self.max_len // PAGE), np.int32) for _ in groups]
        kv_index = [np.zeros(bucket, np.int32) for _ in groups]
        for row, (request, count) in enumerate(work):
            first = starts[row]
            starts[row + 1 :] = first + count
            lengths[row] = request.done + count
            place = np.arange(request.done, request.done + count)
            tokens[first : first + count] = request.tokens[request.done : request.done + count]
            positions[first : first + count] = place
            prompts[first : first + count] = request.prompt_len
            for group, span in enumerate(self.config.spans):
                table = request.tables[group]
                kv_index[group][first : first + count] = table[place // PAGE] * PAGE + place % PAGE
                tables[group][row] = table
                if isinstance(span, LastTokens):  # pages before the window of this step's first token are gone
                    tables[group][row, : max(0, request.done - span.window + 1) // PAGE] = 0
            request.done += count
        batches = tuple(
            RaggedBatch(query_start=starts, kv_len=lengths, page_table=tables[group], kv_index=kv_index[group])
            for group in groups
        )
        batches = jax.tree.map(jnp.asarray, batches)
        arrays = (jnp.asarray(tokens), jnp.asarray(positions), batches, jnp.asarray(prompts))
        logits, self.kv = self.jitted(self.weights, self.kv, *arrays)
        logits = np.asarray(logits)
        return [logits[starts[row] : starts[row + 1]] for row in range(len(work))]


@pytest.fixture(scope="session")
def golden() -> Callable[..., Golden]:
    """Reads a golden checkpoint: ``golden(name)``."""

    def read(name: str) -> Golden:
        folder = GOLDEN / name
        with np.load(folder / "golden.npz") as archive:
            names = {key.split("/")[0] for key in archive}
            cases = {
                case: Case(*(archive[f"{case}/{part}"] for part in ("tokens", "at", "logits")))
                for case in sorted(names)
            }
        checkpoint = open_checkpoint(folder)
        # DeepSeek V3.2's indexers choose among the tokens of sequences longer than those that are served.
        params = {
            name: tensor.read(np.dtype(np.float32))
            for name, tensor in checkpoint.tensors.items()
            if ".indexer." not in name or checkpoint.config["index_topk"] < checkpoint.config["max_position_embeddings"]
        }
        greedy = np.load(folder / "greedy.npy")
        return Golden(config=checkpoint.config, params=params, cases=cases, greedy=greedy)

    return read


@pytest.fixture(scope="session")
def golden_keys() -> Callable[[str, str], dict[str, Any]]:
    """The config.json keys that a case of a golden checkpoint changes."""
    return lambda name, case: json.loads((GOLDEN / name / f"{case}.json").read_text())


@pytest.fixture(scope="session")
def stepper() -> Callable[..., Stepper]:
    """Makes a Stepper of a config.json dict and its weights."""

    def make(
        config: Mapping[str, Any], params: Mapping[str, Any], *, max_model_len: int | None = None, **kw: Any
    ) -> Any:
        return Stepper(model_config(config, max_model_len=max_model_len), params, **kw)

    return make
