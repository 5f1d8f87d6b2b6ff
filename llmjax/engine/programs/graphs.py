"""CUDA graphs: runs a dispatch as one graph, after a test at start that a graph samples the tokens of plain launches.

XLA captures what it calls command buffers: runs of kernels, Pallas' included, and with CONDITIONAL and WHILE also the
branches of the sampler and the loop over several steps, so that a dispatch is one launch and the host is never asked
which way to go. CONDITIONAL is not among XLA's defaults.

Steps of long prompts are not graphs. What they compute takes longer than starting it, and before a graph starts whose
arguments lie elsewhere than at its last run, XLA puts their addresses into each of its nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import numpy as np

from llmjax.config import EngineConfig
from llmjax.engine.core.layer_states import TableChanges
from llmjax.engine.core.request import EngineRequest, Sequence, SequenceTimes
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.device.batch import BatchLayout, Bucket
from llmjax.engine.device.device_state import NO_TOKEN, DeviceState
from llmjax.engine.device.edits import StateEditor
from llmjax.engine.device.heads import few_rows
from llmjax.engine.device.rows import NewRow, row_words
from llmjax.engine.device.slots import SlotEdits
from llmjax.engine.programs.cache import Executable, ProgramSpec
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.errors import ConfigError
from llmjax.platforms import Platform
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.settings import request_sampling

logger = logging.getLogger(__name__)

COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# Else each step would first put the weights of queries, keys and values in one matrix.
ALONE = {"xla_gpu_dot_merger_threshold_mb": "0"}
GRAPHS: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": COMMANDS, **ALONE})
LAUNCHES: Mapping[str, str] = MappingProxyType({"xla_gpu_enable_command_buffer": "", **ALONE})

# What the rows of the test ask for, each something else in each dispatch: every branch of the sampler is taken in some
# dispatch, even by a single row, and left out in another.
ROWS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, repeat_last_n=2, logprobs=1),
    SamplingParams(temperature=0.0, logit_bias={0: 100.0}, logprob_token_ids=[0, 1]),
    SamplingParams(temperature=0.0),
)
BIASED = 3  # index in ROWS; its token is almost certain
BAN = (0, 1)  # the second is forbidden after the first
LOGPROB_ERROR = 0.1  # error of products that XLA computes in another order, in bfloat16


@dataclass(frozen=True)
class _Dispatch:
    """One dispatch of the test.

    Attributes:
        first: index in ROWS of what the first row that samples asks for; None: all rows are greedy.
        ends: all rows are biased, and their token ends them.
        sampling: how many of the last rows sample, the others being in the middle of their prompts; None: all do.
    """

    first: int | None
    ends: bool = False
    sampling: int | None = None


def _dispatches(few: int) -> tuple[_Dispatch, ...]:
    """The dispatches of the test.

    Args:
        few: rows up to which ``heads.sample`` computes only those that sample; 0: it always computes all.
    """
    every = (None, *range(len(ROWS)), None)
    some = [_Dispatch(which, sampling=min(few, len(ROWS))) for which in every] if few else []
    nothing = [_Dispatch(None, sampling=0)] if few else []
    return (*map(_Dispatch, every), *some, *nothing, _Dispatch(BIASED, ends=True))


def check_graphs(config: EngineConfig, platform: Platform) -> None:
    """Checks the setting before anything is loaded.

    Raises:
        ConfigError: graphs are required where there are none.
    """
    if config.cuda_graphs not in ("on", "full"):
        return
    said = f"cuda_graphs {config.cuda_graphs}"
    if not platform.is_cuda:
        raise ConfigError(f"{said} needs an NVIDIA GPU, and the device is {platform.device}")
    if platform.mesh:
        raise ConfigError(f"{said}: steps that {len(platform.devices)} devices divide cannot be graphs yet")


def with_graphs(compiler: StepCompiler, config: EngineConfig, *, decode_steps: int) -> StepCompiler:
    """The compiler that the configuration asks for: where there are CUDA graphs, one that uses them.

    Args:
        compiler: compiles programs without graphs.
        decode_steps: decode steps that a dispatch may take as a graph.
    """
    if not compiler.platform.is_cuda:
        return compiler
    launches = replace(compiler, options=LAUNCHES)
    if config.cuda_graphs == "off" or compiler.platform.mesh:
        return launches
    prompts = None if config.cuda_graphs == "full" else LAUNCHES
    graphs = replace(compiler, options=GRAPHS, prompt_options=prompts, decode_steps=decode_steps)
    if config.cuda_graphs == "auto" and (why := kept_difference(graphs, replace(graphs, options=LAUNCHES))):
        logger.warning("CUDA graphs are off and decoding is slower: %s", why)
        return launches
    return graphs


class _Differs(Exception):
    """The reason why programs differ, raised because what is raised is not kept."""


def kept_difference(compiler: StepCompiler, reference: StepCompiler) -> str | None:
    """`difference`, unless a start before has found none between the same programs."""

    def check() -> None:
        if why := difference(compiler, reference):
            raise _Differs(why)

    def tested() -> Iterator[ProgramSpec]:
        return (c.spec(bucket) for c in (compiler, reference) for bucket in _tested(compiler))

    try:
        compiler.cache.found_of(tested, "no difference between graphs and launches", check)
    except _Differs as found:
        return str(found)
    return None


def difference(compiler: StepCompiler, reference: StepCompiler) -> str | None:
    """Compares the programs of two compilers: the reason why one cannot stand for the other, or None if they sample the
    same tokens, with the same log-probabilities.

    Both run the same few dispatches, from a new state each.

    Args:
        reference: a compiler with the same buckets, whose programs are known to sample correctly.
    """
    buckets = _tested(compiler)
    with ThreadPoolExecutor() as threads:
        programs, right = ([threads.submit(c.compile, b) for b in buckets] for c in (compiler, reference))
    wrong = total = 0
    error = 0.0
    for bucket, program, other in zip(buckets, programs, right, strict=True):
        try:
            results = _results(program.result(), compiler, bucket)
        except jax.errors.JaxRuntimeError as failure:
            return f"the test at start failed: {str(failure).splitlines()[0]}"
        expected = _results(other.result(), reference, bucket)
        for (tokens, logprobs), (right_tokens, right_logprobs) in zip(results, expected, strict=True):
            wrong, total = wrong + int((tokens != right_tokens).sum()), total + tokens.size
            error = max(error, _largest_difference(logprobs, right_logprobs))
    if wrong:
        return f"{wrong} of {total} tokens of the test at start were wrong"
    if not error <= LOGPROB_ERROR:
        return f"log-probabilities of the test at start were off by up to {error:.3g}"
    return None


def _tested(compiler: StepCompiler) -> tuple[Bucket, Bucket]:
    """The buckets of the test: of decodes, and of prompts."""
    decode = min((b for b in compiler.layouts if b.decode), key=lambda b: (abs(b.rows - len(ROWS)), b.rows))
    prompts = [b for b in compiler.layouts if not b.decode and not b.drafts]
    graphs = [b for b in prompts if compiler.options_of(b) == compiler.options]
    # The smallest whose rows may be more than a few.
    mixed = min(
        graphs or prompts,
        key=lambda b: (b.tokens <= few_rows(b.rows), b.tokens),
    )
    return decode, mixed


_Result = tuple[np.ndarray, list[np.ndarray]]  # tokens i32 [steps, rows], -1: none; log-probabilities of those


def _results(program: Executable, compiler: StepCompiler, bucket: Bucket) -> list[_Result]:
    """The result of each dispatch, sampled from a new state."""
    layout = compiler.layouts[bucket]
    state, found = _set_up(compiler, layout), []
    for packed in _batches(compiler, layout):
        state, output = program(compiler.weights, state, packed)
        tokens = np.asarray(output.tokens)
        sampled = tokens != NO_TOKEN  # what else is computed may be anything
        scores = output.logprobs
        logprobs = [np.asarray(part)[sampled] for part in (scores.logprob, scores.top_logprobs, scores.scored)]
        if output.prompt_logprobs is not None:
            real = sampled.any(0).sum()  # a token each
            scores = output.prompt_logprobs
            logprobs += [np.asarray(part)[:real] for part in (scores.logprob, scores.top_logprobs)]
        found.append((tokens, logprobs))
    return found


def _largest_difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference: NaN where only one value is NaN, infinite where only one is infinite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) if a.shape == b.shape else np.zeros(1, bool)
        if not same.all():
            largest = max(largest, float(np.abs(a - b)[~same].max())) if a.shape == b.shape else np.inf
    return largest


def _set_up(compiler: StepCompiler, layout: BatchLayout) -> DeviceState:
    """A new state whose slots have the bias of ROWS, and the ban, and pages for the rows of the test."""
    state = compiler.make_state()
    vocab_size = compiler.model.config.vocab_size
    sampling = request_sampling(ROWS[BIASED], vocab_size=vocab_size, seed=0, bad_words=[BAN])
    slots, editor = SlotEdits(state.sampler.vocab_size), StateEditor(state)
    test, plan = _Test.of(compiler, layout), compiler.kv_plan
    for slot in range(test.rows):
        for edit in slots.begin(slot, sampling, prompt=[], output=[]):
            state = editor.apply(state, edit)
    tables = np.zeros(state.rows.page_tables.shape, np.int32)
    # Where there are few pages, a single row overwrites its own.
    pages = min(group.num_pages for group in plan.groups) - 1
    tables[:, : test.rows, : test.span] = 1 + np.arange(test.rows * test.span).reshape(test.rows, -1) % pages
    page_tables = jax.device_put(tables, compiler.platform.everywhere)
    return replace(state, rows=replace(state.rows, page_tables=page_tables))


@dataclass(frozen=True)
class _Test:
    """The size of the test with one program."""

    dispatches: tuple[_Dispatch, ...]
    steps: int  # decode steps of each dispatch
    rows: int
    span: int  # number of pages of a row

    @classmethod
    def of(cls, compiler: StepCompiler, layout: BatchLayout) -> _Test:
        plan, bucket = compiler.kv_plan, layout.bucket
        few = 0 if bucket.decode else few_rows(bucket.rows)
        dispatches = _dispatches(few)[: plan.max_model_len]
        steps = max(1, min(bucket.steps, plan.max_model_len // len(dispatches)))
        span = -(-steps * len(dispatches) // plan.page_size)
        pages = min(group.num_pages for group in plan.groups) - 1
        rows = max(1, min(bucket.rows, bucket.tokens, few + len(ROWS), pages // span))
        return cls(dispatches, steps, rows, span)


def _batches(compiler: StepCompiler, layout: BatchLayout) -> Iterator[np.ndarray]:
    """The packed batches of the test: sequences that begin with one token and go on. Their slots get new settings in
    each."""
    test, vocab_size = _Test.of(compiler, layout), compiler.model.config.vocab_size
    greedy = request_sampling(SamplingParams(temperature=0.0), vocab_size=vocab_size, seed=0)
    for i, dispatch in enumerate(test.dispatches):
        plan, new = StepPlan([]), []
        first = 0 if dispatch.sampling is None else max(0, test.rows - dispatch.sampling)  # the first row that samples
        for slot in range(test.rows):
            sampling = greedy
            sequence = _sequence(
                slot, token=slot % vocab_size, scored=not layout.bucket.decode, stops=[0] if dispatch.ends else []
            )
            if dispatch.first is not None:
                which = BIASED if dispatch.ends else (dispatch.first + slot - first) % len(ROWS)
                bans = [BAN] if which == BIASED else []
                sampling = request_sampling(ROWS[which], vocab_size=vocab_size, seed=slot, bad_words=bans)
            row = Row(sequence, start=i * test.steps, count=1, samples=slot >= first, steps=test.steps)
            plan.rows.append(row)
            new.append(NewRow(slot=slot, length=row.start, words=row_words(sequence, sampling)))
        yield layout.pack(plan, new=new, tables=TableChanges.none())


def _sequence(index: int, *, token: int, scored: bool, stops: Iterable[int]) -> Sequence:
    """Args: scored: the prompt's log-probabilities are asked for."""
    request = EngineRequest(
        request_id=index,
        prompt_token_ids=[token],
        params=SamplingParams(prompt_logprobs=1 if scored else None),
        max_tokens=1 << 20,
        stop_token_ids=frozenset(stops),
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=index, seed=index, tokens=[token], times=times, slot=index)
