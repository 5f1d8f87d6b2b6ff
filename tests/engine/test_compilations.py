"""After the warm-up nothing compiles, whatever requests ask for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.engine.device.edits import StateEditor
from llmjax.engine.programs.compilations import CompileCounter
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.jax_api

LLAMA = GOLDEN / "llama"

NUM_REQUESTS = 500


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of features; each one is off more often than on."""

    def maybe(value: Any, off: Any, share: float = 0.25) -> Any:
        return value if rng.random() < share else off

    max_tokens = int(rng.integers(1, 9))
    return SamplingParams(
        n=maybe(int(rng.integers(2, 4)), 1, 0.1),
        temperature=float(rng.choice([0, 0.7, 2])),
        top_p=maybe(0.8, 1.0),
        top_k=maybe(int(rng.integers(1, 20)), 0),
        min_p=maybe(0.05, 0.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(-0.5, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        seed=maybe(5, None),
        max_tokens=max_tokens,
        min_tokens=maybe(int(rng.integers(0, max_tokens)), 0),
        stop=maybe(["ab", "c"], []),
        stop_token_ids=maybe([9, 30], []),
        ignore_eos=bool(rng.random() < 0.5),
        logprobs=maybe(int(rng.integers(0, 6)), None),
        prompt_logprobs=maybe(int(rng.integers(0, 6)), None, 0.1),
        logit_bias=maybe({7: 3.0, 50: -100.0}, None),
        allowed_token_ids=maybe(list(range(5, 60)), None, 0.1),
        bad_words=maybe(["a", "bc", "def"], []),
    )


def test_what_penalties_and_biases_need_is_compiled_before_an_engine_is_ready(
    compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not compiled by the thread that serves."""
    compiling: set[str] = set()
    spec = StateEditor._spec

    def watched(*arguments: Any) -> Any:
        compiling.add(threading.current_thread().name)
        return spec(*arguments)

    monkeypatch.setattr(StateEditor, "_spec", watched)
    llm = LLM(
        str(LLAMA),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,
        skip_tokenizer_init=True,
        compilation_cache_dir=compile_cache_dir,
    )
    llm.engine.runner.wait_ready()
    assert compiling and all(name.startswith("compile") for name in compiling)
    compiling.clear()
    params = SamplingParams(max_tokens=3, presence_penalty=1.0, logit_bias={3: 1.0})
    llm.generate([5, 6], params, use_tqdm=False)
    assert threading.current_thread().name not in compiling  # threads of other tests' engines may be at work
    llm.close()


@pytest.fixture
def compiled_here() -> Iterator[list[float]]:
    """The compilations of this thread: those of other tests' engines may be at work."""
    found: list[float] = []
    here = threading.current_thread()

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == CompileCounter.EVENT and threading.current_thread() is here:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_the_warm_up(engine_of: Callable[..., LLM], compiled_here: list[float]) -> None:
    llm = engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)
    llm.warm_up()
    rng = np.random.default_rng(11)
    lengths = rng.choice([1, 2, 3, 9, 17, 33, 50], NUM_REQUESTS)
    prompts = [rng.integers(3, 96, length).tolist() for length in lengths]
    params = [random_params(rng) for _ in prompts]
    compiled_here.clear()
    steps = llm.stats.steps
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert compiled_here == []
    assert len(outputs) == NUM_REQUESTS
    assert all(output.finished and len(o.token_ids) >= 1 for output in outputs for o in output.outputs)
    assert llm.stats.steps - steps > 100
    assert llm.stats.preemptions > 0
    assert {p.bucket for p in llm.engine.runner.programs.ready} == set(llm.engine.runner.programs.buckets)
    # Both count: something new compiles.
    before = llm.engine.compilations.count
    jnp.arange(7) * np.pi
    assert compiled_here and llm.engine.compilations.count > before


START = """
import json, sys
import jax
counts = {}
def listen(event, duration, **_):
    counts[event] = counts.get(event, 0) + 1
jax.monitoring.register_event_duration_secs_listener(listen)
from llmjax import LLM, SamplingParams
llm = LLM(
    sys.argv[1], dtype="float32", page_size=4, max_num_seqs=1, max_num_batched_tokens=16,
    kv_cache_memory_bytes=2**20, skip_tokenizer_init=True, compilation_cache_dir=sys.argv[2],
)
llm.warm_up()
params = SamplingParams(max_tokens=6, presence_penalty=1.0, logit_bias={3: 1.0}, ignore_eos=True)
outputs = llm.generate([[5, 6], [7] * 9], params, use_tqdm=False)
llm.close()
tokens = [output.outputs[0].token_ids for output in outputs]
print(json.dumps({"counts": counts, "tokens": tokens, "flax": "flax" in sys.modules}))
"""


def test_a_second_start_traces_lowers_and_compiles_nothing(tmp_path: Path) -> None:
    """This holds for the step, the edits of slots, and the state. Nor is what only tracing needs imported."""

    def start() -> dict[str, Any]:
        command = [sys.executable, "-c", START, str(LLAMA), str(tmp_path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    first, second = start(), start()
    compiling = {event for event in first["counts"] if event.startswith("/jax/core/compile/")}
    assert len(compiling) == 3  # it is traced, lowered and compiled
    assert {event: second["counts"].get(event, 0) for event in compiling} == dict.fromkeys(compiling, 0)
    assert second["tokens"] == first["tokens"]
    assert first["flax"] and not second["flax"]
