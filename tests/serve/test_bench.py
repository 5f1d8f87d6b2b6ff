"""``llmjax bench serve`` against real servers, by every API that it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.cli import main
from tests.serve.conftest import Running

LENGTHS = ["--num-prompts", "3", "--num-warmups", "0", "--random-vocab-size", "250", "--input-len", "8"]


def bench(server: Running, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The result that a run saves."""
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
    assert main(["bench", "serve", "--base-url", server.url, *LENGTHS, *saved, *flags]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (found["completed"], found["failed"], found["errors"]) == (3, 0, [""] * 3)
    return found


@pytest.mark.parametrize("backend", ["vllm", "openai-chat", "openai-responses"])
def test_answers(running: Running, tmp_path: Path, backend: str) -> None:
    """Random tokens go as texts where the API takes these."""
    flags = ["--backend", backend, "--output-len", "5", "--ignore-eos", "--metadata", "commit=abc", "--label", "run"]
    found = bench(running, tmp_path, *flags, "--goodput", "e2el:1e9", "--logprobs", "1")
    assert found["output_lens"] == [5] * 3 and found["total_output_tokens"] == 15
    if backend == "vllm":
        assert found["input_lens"] == [8] * 3
    assert all(ttft > 0 for ttft in found["ttfts"]) and all(found["generated_texts"])
    assert found["mean_ttft_ms"] > 0 and found["median_tpot_ms"] > 0 and found["p99_e2el_ms"] > 0
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert (found["commit"], found["label"], found["model_id"]) == ("abc", "run", "tiny-llama")
    assert found["endpoint_type"] == found["backend"] == backend.replace("vllm", "openai")
    assert found["request_rate"] == "inf"


def test_ids_of_requests_and_results_in_lines(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = ["bench", "serve", "--base-url", running.url, *LENGTHS, "--output-len", "2", "--request-id-prefix", "mine-"]
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100"]
    append = ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "runs.jsonl"]
    with caplog.at_level("INFO", logger="llmjax.serve.access"):
        for _ in range(2):
            assert main([*line, *ramp, *append]) == 0
        with running.http() as http:
            http.get("/v1/models")  # answered later: the lines of the others have been written
    runs = [json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["completed"] for run in runs] == [3, 3]
    assert runs[0]["ramp_up_strategy"] == "linear"
    lines = [json.loads(message) for message in caplog.messages if message.startswith("{")]
    ids = [entry["request_id"] for entry in lines]
    assert sorted(id for id in ids if id.startswith("mine-")) == [
        "mine-0",
        "mine-0",
        "mine-1",
        "mine-1",
        "mine-2",
        "mine-2",
    ]


def test_a_trace_is_sent_at_its_times(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 20, "output_length": 2, "hash_ids": [1, at]} for at in (0, 30, 200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--dataset-name", "timed_trace", "--dataset-path", str(path), "--timed-trace-sec-multiplier", "0.001"]
    found = bench(running, tmp_path, *flags)
    starts = [start - found["start_times"][0] for start in found["start_times"]]
    assert starts[1] >= 0.025 and starts[2] >= 0.195
    assert (found["input_lens"], found["output_lens"]) == ([20] * 3, [2] * 3)
