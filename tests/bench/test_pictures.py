"""Pictures of results: what is drawn, and the arithmetic of the intervals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.bench.metrics import RequestRecord, summarize
from llmjax.bench.pictures import Intervals, Points, Steps, comparison, curves, draw, interval, panels_of
from llmjax.bench.report import check_writable, draw_result
from llmjax.cli import main
from llmjax.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def result(*, slower: float = 1.0, count: int = 20) -> dict[str, Any]:
    records = [
        RequestRecord(
            start=i / 10,
            end=i / 10 + slower,
            prompt_tokens=8,
            output_tokens=3,
            chunk_times=[i / 10 + slower * part for part in (0.2 + i / 1000, 0.5, 1.0)],
        )
        for i in range(count)
    ]
    return summarize(records).as_json(detailed=True)


def test_a_result_s_distributions() -> None:
    first, gaps, course, whole = panels_of(result())
    assert isinstance(first, Steps) and isinstance(gaps, Steps) and isinstance(whole, Steps)
    assert first.values[""] == pytest.approx([200 + i for i in range(20)])
    assert len(gaps.values[""]) == 40 and gaps.values[""][1] == pytest.approx(500)
    assert isinstance(course, Points) and course.lines[""][3] == pytest.approx((0.3, 203))
    assert panels_of({"cold_startup_times": [2.0], "warm_startup_times": [1.0, 1.1]}) == [
        Steps("start", "s", {"cold": [2.0], "warm": [1.0, 1.1]})
    ]


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    ends = [interval(rng.normal(5.0, 2.0, 50).tolist()) for _ in range(200)]
    covered = sum(low <= 5.0 <= high for low, _, high in ends)
    assert 0.88 * 200 <= covered <= 200  # 95 %, and less for few values
    low, mean, high = interval([1.0, 2.0, 3.0, 4.0] * 25)
    half = 1.96 * np.std([1.0, 2.0, 3.0, 4.0]) / 10  # of a normal distribution
    assert (low, mean, high) == pytest.approx((2.5 - half, 2.5, 2.5 + half), abs=0.03)


def test_two_results_are_compared_by_their_requests() -> None:
    first, gaps, whole = comparison(result(), result(slower=2.0), names=("before", "after"))
    for panel in (first, gaps, whole):
        assert isinstance(panel, Intervals)
        assert panel.values["after"][0] > panel.values["before"][2]  # they do not overlap
    with pytest.raises(ConfigError, match="make both with --save-detailed"):
        comparison(result(), {"completed": 3}, names=("a", "b"))


def test_curves_go_up_in_load() -> None:
    runs = [
        {"request_throughput": x, "median_ttft_ms": 10 * x, "p99_ttft_ms": 20 * x, "max_concurrent_requests": x}
        | {"output_throughput": 100 * x}
        for x in (3, 1, 2)
    ]
    latency, gaps, throughput = curves(runs)
    assert isinstance(latency, Points) and latency.lines["p99"] == [(1, 20), (2, 40), (3, 60)]
    assert isinstance(gaps, Points) and gaps.lines["median"] == []  # no result has them
    assert isinstance(throughput, Points) and throughput.lines[""] == [(1, 100), (2, 200), (3, 300)]


def test_png_and_svg_are_written(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(json.dumps(result()))
    stem = str(tmp_path / "run.png")
    draw_result(result(slower=2.0), title="a run", stem=stem, compare=str(tmp_path / "before.json"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    drawn = ElementTree.parse(tmp_path / "run.svg").getroot()
    assert drawn.tag == f"{SVG}svg" and len(list(drawn.iter(f"{SVG}path"))) > 100
    draw(curves([]), title="nothing", stem=str(tmp_path / "v1.5"))
    assert (tmp_path / "v1.5.svg").exists()  # no ending of theirs


def test_what_could_not_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plot: no folder"):
        check_writable(None, plot=str(tmp_path / "absent" / "x"))
    with pytest.raises(ConfigError, match="No such file"):
        check_writable(None, compare=str(tmp_path / "absent.json"))


def test_perplexities_by_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"text": "book.txt", "text_tokens": 100, "convention": "windows of 50", "standard_error": 0.1}
    for name, perplexity, size in (("bf16", 10.0, 2**30), ("int8", 10.1, 2**29), ("int4", 11.0, 2**28)):
        content = {**fields, "perplexity": perplexity, "weight_bytes": size}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = [str(tmp_path / f"{name}.json") for name in ("bf16", "int8", "int4")]
    assert main(["eval", "plot", *files, "--plot", str(tmp_path / "p")]) == 0
    assert {"bf16", "int8", "int4"} <= {*comments(tmp_path / "p.svg")}
    (tmp_path / "int8.json").write_text(json.dumps({**fields, "text_tokens": 9, "perplexity": 1.0, "weight_bytes": 1}))
    assert main(["eval", "plot", *files, "--plot", str(tmp_path / "p")]) == 1
    assert "int8 and bf16 differ in text_tokens" in capsys.readouterr().err


def comments(path: Path) -> list[str]:
    """The texts of a picture, which matplotlib notes beside the glyphs that it draws."""
    return [
        line.strip().removeprefix("<!-- ").removesuffix(" -->")
        for line in path.read_text().splitlines()
        if "<!--" in line
    ]
