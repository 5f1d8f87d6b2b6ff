"""``llmjax generate`` and ``bench latency`` on the real default model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from llmjax.cli import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "--file", "b"], "prompts come from arguments or from a file, not from both"),
        (["a", "--system", "b"], "--system goes with --chat"),
        (["a", "--temperature", "-1"], "temperature must be a number in [0, inf), not -1.0"),
        (["a", "--max-tokens", "many"], "--max-tokens must be an integer, not 'many'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *argv, "--model", "/nowhere"]) == 1
    assert capsys.readouterr().err == f"llmjax: error: {message}\n"


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", "/nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llmjax: error: ")
    assert "/nowhere" in error
    assert error.count("\n") == 1


@pytest.mark.real_model
def test_streamed_and_batched_text_agree_and_latency_is_measured(
    smollm2_path: Path,
    compile_cache_dir: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ["--model", str(smollm2_path), "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    engine += ["--max-model-len", "256", "--compilation-cache-dir", compile_cache_dir]
    sampling = ["--temperature", "0", "--max-tokens", "8", "--chat"]
    question = "What is the capital of France?"

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n"))
    assert main(["generate", *engine, *sampling]) == 0
    streamed = capsys.readouterr().out.strip()
    assert "Paris" in streamed

    assert main(["generate", question, "Say hello.", "--json", *engine, *sampling]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert [row["prompt"].count("<|im_start|>assistant") for row in rows] == [1, 1]
    answer = rows[0]["outputs"][0]
    assert answer["text"].strip() == streamed
    assert answer["finish_reason"] in ("stop", "length")
    assert len(answer["token_ids"]) <= 8

    result = tmp_path / "latency.json"
    shape = ["--batch-size", "2", "--input-len", "16", "--output-len", "6", "--num-iters", "2"]
    assert main(["bench", "latency", *engine, *shape, "--num-iters-warmup", "1", "--output-json", str(result)]) == 0
    fields = json.loads(result.read_text())
    assert (fields["completed"], fields["failed"], fields["compilations"]) == (4, 0, 0)
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (64, 24)
    assert len(fields["latencies"]) == 2
    assert fields["max_concurrent_requests"] == 2
    assert fields["host_ms_per_step"] > 0
    assert fields["mean_ttft_ms"] < fields["mean_e2el_ms"]
