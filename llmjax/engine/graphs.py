"""A dispatch as one CUDA graph, and the test at start that a graph brings the tokens of plain launches.

XLA captures what it calls command buffers: runs of kernels, Pallas' included, and with CONDITIONAL and WHILE also the
branches of the sampler and the loop over several steps, so that a dispatch is one launch and the host is never asked
which way to go. CONDITIONAL is not among XLA's defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np

from llmjax.config import EngineConfig
from llmjax.engine.batch import MAX_STOPS, NO_STOP, BatchLayout, Bucket
from llmjax.engine.compiler import StepCompiler
from llmjax.engine.programs import Executable
from llmjax.engine.request import EngineRequest, Sequence, SequenceTimes
from llmjax.engine.scheduler import Row, StepPlan
from llmjax.errors import ConfigError
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.rows import ROW_WORDS, request_sampling

logger = logging.getLogger(__name__)

COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
GRAPHS: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": COMMANDS})
LAUNCHES: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})

# What the rows of the test ask for: every branch of the sampler is taken in some dispatch and left out in another.
ROWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
)
DISPATCHES = (False, False, True, True, False)  # whether rows ask for what ROWS says, or are all greedy


def with_graphs(compiler: StepCompiler, config: EngineConfig, *, decode_steps: int) -> StepCompiler:
    """The compiler that the configuration asks for: where there are CUDA graphs, one that uses them.

    Args:
        compiler: of plain programs.
        decode_steps: decode steps that a dispatch may take as a graph.

    Raises:
        ConfigError: graphs are insisted on where there are none.
    """
    if not compiler.platform.is_cuda:
        if config.cuda_graphs == "on":
            raise ConfigError(f"cuda_graphs on needs an NVIDIA GPU, and the device is {compiler.platform.device}")
        return compiler
    launches = replace(compiler, options=LAUNCHES)
    if config.cuda_graphs == "off":
        return launches
    graphs = replace(compiler, options=GRAPHS, decode_steps=decode_steps)
    if config.cuda_graphs == "auto" and (why := difference(graphs, replace(graphs, options=LAUNCHES))):
        logger.warning("CUDA graphs are off and decoding is slower: %s", why)
        return launches
    return graphs


def difference(compiler: StepCompiler, reference: StepCompiler) -> str | None:
    """Why the programs of one compiler cannot stand for those of another; None: they sample the same tokens.

    Both run the same few dispatches, from a new state each.

    Args:
        reference: of the same buckets; what its programs sample is right.
    """
    decode = min((b for b in compiler.layouts if b.decode), key=lambda b: (abs(b.rows - len(ROWS)), b.rows))
    mixed = min((b for b in compiler.layouts if not b.decode), key=lambda b: b.tokens)
    with ThreadPoolExecutor() as threads:
        programs, right = ([threads.submit(c.compile, b) for b in (decode, mixed)] for c in (compiler, reference))
    tokens, expected = [], []
    for bucket, program, other in zip((decode, mixed), programs, right, strict=True):
        try:
            tokens.append(_tokens(program.result(), compiler, bucket))
        except jax.errors.JaxRuntimeError as error:
            return f"the test at start failed: {str(error).splitlines()[0]}"
        expected.append(_tokens(other.result(), reference, bucket))
    wrong = sum(int((a != b).sum()) for a, b in zip(tokens, expected, strict=True))
    total = sum(part.size for part in expected)
    return f"{wrong} of {total} tokens of the test at start were wrong" if wrong else None


def _tokens(program: Executable, compiler: StepCompiler, bucket: Bucket) -> np.ndarray:
    """i32 [dispatches, steps, rows], as the program samples them from a new state; -1: none."""
    state, found = compiler.make_state(), []
    for packed in _batches(compiler, compiler.layouts[bucket]):
        state, output = program(compiler.weights, state, packed)
        found.append(np.asarray(output.tokens))
    return np.stack(found)


def _batches(compiler: StepCompiler, layout: BatchLayout) -> Iterator[np.ndarray]:
    """The packed batches of DISPATCHES: sequences that begin with one token and go on."""
    plan, bucket = compiler.kv_plan, layout.bucket
    dispatches = DISPATCHES[: plan.max_model_len]
    steps = max(1, min(bucket.steps, plan.max_model_len // len(dispatches)))
    span = -(-steps * len(dispatches) // plan.page_size)  # pages of a row
    pages = min(group.num_pages for group in plan.groups) - 1
    rows = max(1, min(bucket.rows, bucket.tokens, len(ROWS), pages // span))
    tables = np.zeros((layout.num_slots, plan.pages_per_sequence), np.int32)
    # Where there are few pages, a single row overwrites its own.
    tables[:rows, :span] = 1 + np.arange(rows * span).reshape(rows, span) % pages
    sequences = [_sequence(i, token=i % compiler.model.config.vocab_size) for i in range(rows)]
    settings = np.zeros((2, layout.num_slots, ROW_WORDS), np.int32)  # all greedy; as ROWS says
    for sequence in sequences:
        settings[1, sequence.slot] = request_sampling(
            sequence.request.params, vocab_size=compiler.model.config.vocab_size, seed=sequence.seed
        ).words
    stops = np.full((layout.num_slots, MAX_STOPS), NO_STOP, np.int32)
    for i, varied in enumerate(dispatches):
        rows_now = [Row(sequence, start=i * steps, count=1, samples=True, steps=steps) for sequence in sequences]
        yield layout.pack(
            StepPlan(rows_now), tables=[tables] * layout.num_groups, sampling=settings[int(varied)], stops=stops
        )


def _sequence(index: int, *, token: int) -> Sequence:
    request = EngineRequest(
        request_id=str(index),
        prompt_token_ids=[token],
        params=ROWS[index],
        max_tokens=1 << 20,
        stop_token_ids=frozenset(),
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=index, seed=index, tokens=[token], times=times, slot=index)
