"""The sweeps on a tiny model, from flags to tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scaling import ScalingOptions, engine_config, main, step_seconds
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.outputs import CompletionOutput, RequestMetrics, RequestOutput


def output(first: float, finished: float, tokens: int) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=0.0, first_token_time=first, finished_time=finished)
    answer = CompletionOutput(index=0, text="", token_ids=[0] * tokens)
    return RequestOutput("0", None, [1], [answer], finished=True, metrics=metrics)


def test_a_step_is_timed_between_the_tokens_of_all_streams() -> None:
    assert step_seconds([output(1.0, 3.0, 5), output(1.5, 3.5, 5)]) == pytest.approx((3.5 - 1.5) / 4)


def test_all_streams_and_the_longest_request_fit() -> None:
    options = ScalingOptions(streams=(1, 128), context=(256,), prefill=(1000,), new_tokens=16)
    config = engine_config(EngineConfig(model="m", max_num_seqs=4), options)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (128, 1024, 1001)
    assert config.enable_prefix_caching
    options = ScalingOptions(streams=(64,), stream_prompt=2048, context=(0,), prefill=(0,))
    assert engine_config(EngineConfig(model="m", page_size=16), options).max_num_batched_tokens == 1024


def test_wrong_sweeps_are_refused() -> None:
    with pytest.raises(ConfigError, match="--context: every length must be above the 32"):
        ScalingOptions(context=(16,))
    with pytest.raises(ConfigError, match="--runs must be at least 1"):
        ScalingOptions(runs=0)


@pytest.mark.slow
def test_the_sweeps_of_a_tiny_model(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The engine's shapes are those of test_engine_process.py, so that each compiles once.
    flags = "--shape tiny --streams 1,2 --context 64 --prefill 4,8 --new-tokens 3 --runs 1"
    engine = "--max-num-batched-tokens 16 --kv-cache-memory-bytes 1MiB"
    files = ["--work-dir", str(tmp_path), "--output-json", str(tmp_path / "s.json")]
    assert main([*flags.split(), *engine.split(), *files, "--compilation-cache-dir", compile_cache_dir]) == 0
    shown = capsys.readouterr().out
    assert "decode after 8 tokens" in shown and "decode of one stream" in shown
    sweeps = json.loads((tmp_path / "s.json").read_text())["sweeps"]
    assert [[m["x"] for m in sweep["measurements"]] for sweep in sweeps] == [[1, 2], [64], [4, 8]]
    assert [[m["tokens"] for m in sweep["measurements"]] for sweep in sweeps] == [[1, 2], [1], [4, 8]]
    assert all(m["seconds"] > 0 for sweep in sweeps for m in sweep["measurements"])
