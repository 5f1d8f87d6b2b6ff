"""Thread against process: the load that both get, and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.boundary import Run, main, plan_of, table_of
from llmjax.bench.metrics import RequestRecord, summarize
from llmjax.errors import ConfigError
from tests.serve.conftest import write_llama, write_tokenizer


def test_both_get_the_streams_that_are_asked_for() -> None:
    plan = plan_of(["model", "--max-concurrency", "3", "--metric-percentiles", "50"], streams=8)
    assert (plan.load.max_concurrency, plan.engine.max_num_seqs, plan.engine.model) == (8, 8, "model")
    assert plan.report.metric_percentiles == (50.0, 99.0)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="--base-url: both servers are started"):
        plan_of(["--base-url", "http://127.0.0.1:1"], streams=8)
    with pytest.raises(ConfigError, match="--rounds must be at least 1, not 0"):
        main(["model", "--rounds", "0"])


def test_table_has_a_line_a_measurement() -> None:
    record = RequestRecord(start=0.0, end=0.4, prompt_tokens=4, output_tokens=3, chunk_times=(0.1, 0.2, 0.4))
    runs = [Run(round=1, place=place, result=summarize([record])) for place in ("thread", "process")]
    console = Console(file=io.StringIO(), width=160)
    console.print(table_of(runs, title="t"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[1] for row in cells[2:]] == ["thread", "process"]
    # 3 tokens in 0.4 s; pieces 100 and 200 ms apart.
    assert cells[2][2:] == ["7.5", "150.00", "199.00", "100.00", "100.00", "0"]


@pytest.mark.slow
def test_both_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], compile_cache_dir: str) -> None:
    write_llama(tmp_path, vocab=write_tokenizer(tmp_path))
    load = ["--input-len", "8", "--output-len", "16", "--num-prompts", "4", "--random-vocab-size", "50", "--ignore-eos"]
    engine = ["--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", str(2**20)]
    where = ["--compilation-cache-dir", compile_cache_dir, "--output-json", str(tmp_path / "out.json")]
    assert main([str(tmp_path), "--streams", "2", "--rounds", "1", *load, *engine, *where]) == 0
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["engine"], run["completed"], run["total_output_tokens"]) for run in runs] == [
        ("thread", 4, 64),
        ("process", 4, 64),
    ]
    assert all(run["output_throughput"] > 0 and run["p99_itl_ms"] > 0 for run in runs)
    assert "p99 ITL, ms" in capsys.readouterr().out
