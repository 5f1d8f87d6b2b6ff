"""From measured seconds to the figures of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.comparison import OURS, Contender, Standing, Times
from benchmarks.engines.interface import EngineOptions
from benchmarks.peer_report import Setup, agreement, best_peer, figures_of, publish, ratio, records_of
from benchmarks.points import Point, parse_points

SETUP = Setup(model="m.gguf", weight_bytes=100_000_000, threads=2, rounds=1, runs=2, new_tokens=10)
DECODE, TTFT, LOAD = parse_points("decode4,ttft2x512,load")


def standing(name: str, answer: list[int], times: dict[Point, Times]) -> Standing:
    options = EngineOptions(model="m.gguf", work_dir="/", threads=2, max_streams=4, max_tokens=256)
    return Standing(Contender(name, "python", options), answer=answer, times=times)


OUR_STANDING = standing(
    OURS,
    [1, 2, 3],
    {DECODE: Times([0.2, 0.1], [0.3, 0.5]), TTFT: Times([2.0, 1.0]), LOAD: Times([3.0])},
)
SLOW = standing("vllm", [1, 2, 4], {DECODE: Times([0.1], [2.1]), TTFT: Times([1.5]), LOAD: Times([30.0])})
# Failed in the middle of a decode point, and before it was started again.
BROKEN = standing("llama.cpp", [], {DECODE: Times([0.1], []), TTFT: Times([4.0]), LOAD: Times()})
STANDINGS = [OUR_STANDING, SLOW, BROKEN]


def test_figures_are_those_of_the_fastest_runs() -> None:
    ours, theirs = (f for f in figures_of(STANDINGS, [DECODE], SETUP))
    assert (ours.engine, theirs.engine) == (OURS, "vllm")
    assert ours.seconds == pytest.approx((0.3 - 0.1) / 10)
    assert ours.tokens_per_second == pytest.approx(4 / 0.02)
    assert ours.median == pytest.approx((0.4 - 0.15) / 10)
    assert ours.weight_bytes_per_second == pytest.approx(1e8 / 0.02)
    assert theirs.seconds == pytest.approx(0.2)
    first, *_ = figures_of(STANDINGS, [TTFT], SETUP)
    assert (first.seconds, first.tokens_per_second, first.weight_bytes_per_second) == (1.0, 1024.0, None)
    assert first.median == 1.5


def test_a_difference_below_noise_is_no_figure() -> None:
    noisy = standing(OURS, [], {DECODE: Times([0.3], [0.2])})
    assert figures_of([noisy], [DECODE], SETUP) == []
    noisy = standing(OURS, [], {DECODE: Times([0.1, 0.6], [0.3, 0.2, 0.3])})
    assert [figure.median for figure in figures_of([noisy], [DECODE], SETUP)] == [None]


def test_the_ratio_is_to_the_best_peer() -> None:
    figures = figures_of(STANDINGS, [DECODE, TTFT, LOAD], SETUP)
    best = best_peer(figures, TTFT)
    assert best is not None and best.engine == "vllm"
    assert [ratio(figures, point) for point in (DECODE, TTFT, LOAD)] == pytest.approx([10.0, 1.5, 10.0])
    assert ratio([figure for figure in figures if figure.engine == OURS], LOAD) is None


def test_agreement_counts_the_common_start() -> None:
    assert [agreement(s, OUR_STANDING) for s in STANDINGS] == [3, 2, 0]


def test_the_report_holds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN.failures.append("llama.cpp: the process ended")
    publish(STANDINGS, [DECODE, LOAD], SETUP, output_json=str(tmp_path / "r.json"), plot=None)
    shown = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert ["decode, 4 streams after 32", OURS, "200.0", "20.0", "25.0", "5.0", "", ""] in lines
    assert ["decode, 4 streams after 32", "vllm", "20.0", "200.0", "200.0", "0.5", "10.00×", "8.00×"] in lines
    assert ["start to first token", "vllm", "", "30,000", "30,000", "", "10.00×", "10.00×"] in lines
    assert ["decode, 4 streams after 32", "llama.cpp", "–", "–", "–", "–", "–", "–"] in lines
    assert "llama.cpp: the process ended" in shown
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["ratio_to_best_peer"] == pytest.approx({DECODE.name: 10.0, LOAD.name: 10.0})
    assert content["engines"]["llama.cpp"]["failures"] == ["llama.cpp: the process ended"]
    assert content["weight_bytes"] == SETUP.weight_bytes


def test_records_are_of_points_that_we_have() -> None:
    found = records_of(STANDINGS, [DECODE, TTFT, LOAD], SETUP, model="m", settings="--dtype float32")
    assert [(one.point, one.model, one.settings) for one in found] == [
        (point.key, "m", "--dtype float32") for point in (DECODE, TTFT, LOAD)
    ]
    decode, ttft, _ = found
    assert decode.seconds == pytest.approx({OURS: 0.02, "vllm": 0.2}) and decode.weight_bytes == SETUP.weight_bytes
    assert decode.by_medians == pytest.approx(8.0)
    assert ttft.seconds == {OURS: 1.0, "vllm": 1.5, "llama.cpp": 4.0} and ttft.by_medians == 1.0
    assert records_of(STANDINGS[1:], [DECODE], SETUP, model="m", settings="") == []
