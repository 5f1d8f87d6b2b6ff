"""The benchmark of GPUs, at sizes for a try-out on any machine, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import gpu
from benchmarks.gpu import PAGE, batch_of, free_path, main
from benchmarks.gpu_figures import Figure, Limits, Work, head, many_times, row_of, tied
from benchmarks.gpu_models import MODELS, Reads, Setup
from benchmarks.machine import commit
from llmjax import platforms
from llmjax.errors import LLMJaxError


@pytest.mark.exhaustive
def test_small_sizes_run_everywhere(
    tmp_path: Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "results" / "small.json"
    work = ["--work-dir", str(tmp_path), "--output", str(output)]
    assert main(["--small", "--shapes", "tiny-moe", "--formats", "bfloat16", "--offload", "3", *work]) == 0
    found = json.loads(output.read_text())
    assert found["card"] == "cpu"
    assert found["commit"] == commit()
    assert found["limits"]["bytes_per_second"] > 0
    names = [figure["name"] for figure in found["figures"]]
    setup = "tiny-moe, bfloat16, 3 experts offloaded"
    points = ("decode, 1 x 48", "decode, 2 x 48", "prefill of 64", "weights loaded to first token")
    assert names[-4:] == [f"{setup}: {point}" for point in points]
    assert all(figure["seconds"] > 0 for figure in found["figures"])
    kernels = (
        "1 x 256 by 256, bf16",
        "decode, 2 x 64, bfloat16",
        "decode, 3 x 20 beside 100, int8",
        "experts, 8 rows: ",
        "KV of 8 tokens, int8",
    )
    for start in kernels:
        assert any(name.startswith(start) for name in names), start
    assert setup in capsys.readouterr().out


def test_a_long_request_has_more_pages_than_those_beside_it() -> None:
    short, long = PAGE + 4, 6 * PAGE + 4
    batch, num_pages = batch_of([short, short, long], 1)
    assert num_pages == 2 + 2 + 7
    assert batch.page_table.tolist() == [[1, 2, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10, 11]]
    assert batch.kv_index.tolist() == [2 * PAGE + 3, 4 * PAGE + 3, 11 * PAGE + 3]
    assert batch.kv_len.tolist() == [short, short, long]
    assert batch.query_start.tolist() == [0, 1, 2, 3]
    assert batch.decode
    prompt, _ = batch_of([17], 17)
    assert prompt.kv_index.tolist() == list(range(PAGE, PAGE + 17))
    assert not prompt.decode


@pytest.mark.parametrize("flags", [["--only", "kernel"], ["--shapes", "llama-9b"]])
def test_unknown_parts_and_shapes(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "unknown: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "cards,reason", [(None, "nvidia-smi does not run"), ("a card", "device 'cuda' is not available")]
)
def test_without_a_card_it_measures_nothing(
    cards: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "nvidia_cards", lambda: cards)
    monkeypatch.setattr(platforms, "nvidia_cards", lambda: cards)
    with pytest.raises((SystemExit, LLMJaxError)) as error:
        main(["--only", "kernels"])
    assert reason in capsys.readouterr().err + str(error.value)


def test_the_bound_is_the_larger_of_reading_and_computing() -> None:
    limits = Limits(bytes_per_second=100, flops_per_second=1000)
    assert limits.seconds(Work(bytes=200, flops=1000)) == 2
    assert limits.seconds(Work(bytes=200, flops=4000)) == 4


def test_a_step_begins_with_what_the_one_before_it_gave() -> None:
    x, added = jnp.arange(4.0), jnp.full(4, 2.0)
    call = many_times(lambda state, added: state + added, jnp.copy(x), added, times=3)
    assert [call()[1], call()[1]] == [7, 13]
    kept = many_times(lambda x, added: tied(x, {"a": x @ added, "b": added}), jnp.copy(x), added, times=3)
    assert kept().tolist() == x.tolist()


def test_a_line_of_the_table() -> None:
    figure = Figure("a product", "a kernel", 0.5, Work(bytes=25e9, flops=1e12), tokens=10)
    cells = [cell.strip() for cell in row_of(figure, Limits(1e11, 1e13)).strip("|").split("|")]
    assert cells == ["a product", "a kernel", "500", "20", "50", "2", "50%"]
    titles, rule = head().splitlines()
    assert len(titles) == len(rule) == len(row_of(figure, Limits(1e11, 1e13)))


def test_experts_that_a_step_reads() -> None:
    shape = MODELS["tiny-moe"]  # 2 of 8 experts
    reads = Reads(shape, dense_bytes=1000, expert_bytes=800)
    assert reads.work(1).bytes == pytest.approx(1000 + 200)
    assert reads.work(2).bytes == pytest.approx(1000 + 200 + 150)
    assert reads.work(1000, kv_bytes=7).bytes == pytest.approx(1807)
    assert reads.work(3).flops == 2 * 3 * shape.active_numbers


def test_names_say_what_differs() -> None:
    assert str(Setup("llama-8b", "q4_k")) == "llama-8b, q4_k"
    assert str(Setup("llama-8b", "q4_k", "off", 2)) == "llama-8b, q4_k, graphs off, 2 experts offloaded"


def test_results_are_not_written_over(tmp_path: Path) -> None:
    for name in ("nvidia-h100-2026-01-02-abc.json", "nvidia-h100-2026-01-02-abc-2.json"):
        path = free_path(tmp_path, "NVIDIA H100-2026-01-02-abc")
        assert path == tmp_path / name
        path.touch()
