"""The programs that sample under masks: when they are compiled, and what waits for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from llmjax import LLM, SamplingParams
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.device.batch import Bucket, make_buckets
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.masked import MaskedPrograms
from llmjax.engine.programs.threads import CompileThreads
from llmjax.errors import CompileError
from llmjax.sampling.structured import StructuredOutputsParams
from tests.checkpoints import GOLDEN

BUCKETS = make_buckets(max_num_seqs=4, max_num_batched_tokens=64)
LARGEST = Bucket(tokens=64, rows=4, decode=False)
LLAMA = GOLDEN / "llama"
CHARACTERS = Path(__file__).parents[1] / "golden" / "characters"
SECONDS = 60.0


class Compiler:
    """Makes programs that say after which bucket they run; notes what is compiled, in order."""

    largest = LARGEST
    generates = True
    layouts = dict.fromkeys(BUCKETS)

    def __init__(self, *refused: Bucket) -> None:
        self.made: list[Bucket] = []
        self.refused = refused

    def compile_masked(self, bucket: Bucket) -> Callable[[], Bucket]:
        self.made.append(bucket)
        if bucket in self.refused:
            raise ValueError("no such\ninstruction")
        return lambda: bucket


@pytest.fixture
def masked() -> Iterator[Callable[..., tuple[MaskedPrograms, threading.Event]]]:
    """Programs whose steps compile until the event is set."""
    made: list[tuple[MaskedPrograms, CompileThreads, threading.Event]] = []

    def make(compiler: Compiler) -> tuple[MaskedPrograms, threading.Event]:
        threads, go_on = CompileThreads(1), threading.Event()
        threads.submit(go_on.wait, SECONDS)
        programs = MaskedPrograms(compiler, compiler.compile_masked, threads=threads)  # type: ignore[arg-type]
        made.append((programs, threads, go_on))
        return programs, go_on

    yield make
    for programs, threads, go_on in made:
        go_on.set()
        threads.close()
        programs.close()


def test_steps_come_first_then_what_holds_every_plan(masked: Callable[..., Any]) -> None:
    compiler = Compiler()
    programs, go_on = masked(compiler)
    assert not programs.can_sample() and not programs.ready(LARGEST) and compiler.made == []
    go_on.set()
    while not programs.can_sample(seconds=SECONDS):
        pass
    assert compiler.made == [LARGEST]
    assert programs.ready(Bucket(tokens=16, rows=4, decode=False))  # it looks at rows alone
    assert not programs.ready(Bucket(tokens=4, rows=4, decode=True))


def test_who_wants_masks_does_not_wait_for_steps(masked: Callable[..., Any]) -> None:
    compiler = Compiler()
    programs, _ = masked(compiler)
    programs.prepare()
    programs.prepare()
    assert programs.can_sample(seconds=SECONDS)
    programs.wait_all()
    decode = [Bucket(tokens=n, rows=n, decode=True) for n in (1, 2, 4)]
    assert compiler.made == [LARGEST, *decode]
    assert all(programs.ready(bucket) for bucket in BUCKETS)


def test_a_program_that_does_not_compile(masked: Callable[..., Any]) -> None:
    """The largest one's place cannot be taken."""
    small = Bucket(tokens=2, rows=2, decode=True)
    programs, _ = masked(Compiler(small))
    programs.wait_all()
    assert programs.can_sample() and not programs.ready(small)
    programs, _ = masked(Compiler(LARGEST))
    with pytest.raises(CompileError, match=r"tokens=64, .* does not compile: ValueError: no such$"):
        programs.wait_all()
    with pytest.raises(CompileError, match="no such"):
        programs.can_sample()


@pytest.fixture
def held(compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, SimpleNamespace]]:
    """An engine whose masked programs are not compiled before ``go_on``, and fail if ``broken`` is set."""
    gate = SimpleNamespace(go_on=threading.Event(), broken=False, threads=set())
    compile_masked = StepCompiler.compile_masked

    def waiting(compiler: StepCompiler, bucket: Bucket) -> Any:
        gate.threads.add(threading.current_thread().name)
        assert gate.go_on.wait(SECONDS)
        if gate.broken:
            raise ValueError("no such instruction")
        return compile_masked(compiler, bucket)

    monkeypatch.setattr(StepCompiler, "compile_masked", waiting)
    llm = LLM(
        str(LLAMA),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,
        tokenizer=str(CHARACTERS),
        compilation_cache_dir=compile_cache_dir,
    )
    yield llm, gate
    gate.go_on.set()
    llm.close()


def submit(llm: LLM, form: StructuredOutputsParams | None = None) -> int:
    frontend = llm._frontend
    params = SamplingParams(max_tokens=8, seed=1, temperature=1.0, ignore_eos=form is None, structured_outputs=form)
    constraint = None if form is None else frontend.requests.checked(params)
    request = EngineRequest(
        request_id=llm.client.new_id(),
        prompt_token_ids=[5, 6, 7],
        params=params,
        max_tokens=8,
        stop_token_ids=frozenset() if form is None else frozenset(llm.info.eos_token_ids),
        grammar=None if constraint is None else constraint.grammar,
        matcher=None if constraint is None else constraint.matcher,
    )
    llm.client.submit(request)
    return request.request_id


def run(llm: LLM, request_id: int) -> tuple[list[int], EngineOutput]:
    """Steps until a request ends."""
    tokens: list[int] = []
    for _ in range(10_000):
        for output in llm.client.outputs():
            if output.request_id == request_id:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens, output
    raise AssertionError("the request does not end")


FORM = StructuredOutputsParams(regex="[a-e]{6}")


def test_others_pass_a_request_that_waits_for_its_program(held: tuple[LLM, SimpleNamespace]) -> None:
    llm, gate = held
    waiting, dropped = submit(llm, FORM), submit(llm, FORM)
    assert llm.client.outputs() == []  # nothing to compute: back after a moment, for messages
    tokens, last = run(llm, submit(llm))
    assert len(tokens) == 8 and last.finish_reason == "length"
    assert llm.engine.scheduler.num_waiting == 2 and not llm.engine.idle
    llm.client.abort(dropped)
    assert llm.engine.scheduler.num_waiting == 1
    gate.go_on.set()
    tokens, last = run(llm, waiting)
    assert last.finish_reason == "stop" and re.fullmatch("[a-e]{6}", llm.tokenizer.decode(tokens))
    assert gate.threads and all(name.startswith("compile") for name in gate.threads)


def test_requests_learn_that_there_will_be_no_program(held: tuple[LLM, SimpleNamespace]) -> None:
    llm, gate = held
    gate.broken = True
    waiting = submit(llm, FORM)
    gate.go_on.set()
    _, last = run(llm, waiting)
    assert isinstance(last.error, CompileError) and "does not compile" in str(last.error)
    with pytest.raises(CompileError):
        submit(llm, FORM)
    assert len(run(llm, submit(llm))[0]) == 8


def test_nothing_of_the_layers_goes_through_it(engine_of: Callable[..., LLM]) -> None:
    """Passing it would cost more than sampling does."""
    compiler = engine_of("llama").engine.runner._masked._compiler
    head, state, *_ = compiler.masked_spec(LARGEST).arguments
    assert set(compiler.masked_spec(LARGEST).static["names"]) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert len(head) == 3 and not jax.tree.leaves(state.kv)
