"""Engines in processes of their own: llmjax through the whole way, and engines that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.comparison import OURS, Contender, Rounds, compare, prompts_of
from benchmarks.engines.interface import EngineOptions
from benchmarks.engines.process import EngineFailed, EngineProcess
from benchmarks.points import parse_points
from benchmarks.random_model import SHAPES, write_random_model

ROUNDS = Rounds(rounds=1, runs=1, new_tokens=3, vocab_size=512, text=list(range(300, 310)))


def options(work_dir: Path, model: str, **settings: object) -> EngineOptions:
    return EngineOptions(
        model=model, work_dir=str(work_dir), threads=2, max_streams=2, max_tokens=64, settings=settings
    )


@pytest.mark.slow
def test_a_comparison_from_processes_to_times(tmp_path: Path, compile_cache_dir: str) -> None:
    write_random_model(tmp_path / "tiny", SHAPES["tiny"], max_position_embeddings=128)
    ours = Contender(
        OURS,
        sys.executable,
        options(
            tmp_path,
            str(tmp_path / "tiny"),
            skip_tokenizer_init=True,
            max_num_batched_tokens=16,
            kv_cache_memory_bytes=2**20,
            compilation_cache_dir=compile_cache_dir,
        ),
    )
    without = Contender("vllm", sys.executable, options(tmp_path, "m.gguf"))  # this interpreter has no vllm
    lines: list[str] = []
    decode, ttft = points = parse_points("decode2x4,ttft2x8")
    standing, failed = compare([ours, without], points, ROUNDS, log=lines.append)
    assert len(standing.answer) == 32
    assert (len(standing.times[decode].one), len(standing.times[decode].more)) == (1, 1)
    assert standing.times[ttft].one[0] > 0
    assert not standing.failures
    assert not failed.times
    (failure,) = failed.failures
    assert failure.startswith("vllm: ModuleNotFoundError: No module named")
    assert failure in lines


def test_our_own_failure_ends_the_comparison(tmp_path: Path) -> None:
    ours = Contender(OURS, sys.executable, options(tmp_path, str(tmp_path / "nowhere.gguf")))
    with pytest.raises(EngineFailed, match=r"llmjax: CheckpointError: .*nowhere\.gguf"):
        compare([ours], parse_points("load"), ROUNDS, log=lambda line: None)


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="vllm: cannot start /nowhere/python: No such file"):
        EngineProcess("vllm", python="/nowhere/python", options=options(tmp_path, "m.gguf"))
    with pytest.raises(EngineFailed, match="vllm: the process ended; see "):
        EngineProcess("vllm", python="/bin/true", options=options(tmp_path, "m.gguf"))


def test_prompts_are_equal_for_all_engines_and_new_for_each_run() -> None:
    (point,) = parse_points("decode2x16")
    first, again, other = (prompts_of(point, ROUNDS, *seed) for seed in ((0, 0), (0, 0), (0, 1)))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [16, 16]
    assert all(0 <= token < ROUNDS.vocab_size for prompt in first for token in prompt)
