"""Figures of sweeps: what they show is computed without matplotlib, and drawn where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.bench.axes import axis_label
from llmjax.bench.parameters import path_name
from llmjax.bench.sweep_plot import PlotOptions, Point, draw, figures
from llmjax.bench.sweep_plot_pareto import ParetoOptions, Speed, frontier, speeds
from llmjax.bench.sweep_rows import Bins, Condition, read_rows
from llmjax.cli import main
from llmjax.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"max-num-seqs": seqs, "dtype": dtype, "request_throughput": rate + 0.2 * run, "p99_e2el_ms": seqs * rate + run}
    for dtype in ("float32", "bfloat16")
    for seqs in (1, 2)
    for rate in (4, 2)
    for run in (0, 1)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of a sweep, a file for each dtype."""
    for dtype in ("float32", "bfloat16"):
        path = tmp_path / "e" / dtype / "summary.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps([row for row in ROWS if row["dtype"] == dtype]))
    return tmp_path


def test_runs_are_read_with_infinite_numbers(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps([{"request_rate": "inf", "label": "info", "list": [1]}]))
    found = read_rows(folder)
    assert len(found) == 17 and found[-1] == {"request_rate": float("inf"), "label": "info", "list": [1]}


def test_curves_are_means_of_what_has_one_x() -> None:
    options = PlotOptions(curve_by=["max_num_seqs"], fig_by=["dtype"], bin_by=["request_throughput%1"])
    one, other = figures(ROWS, options)
    drawn = "p99_e2el_ms-over-request_throughput-curve=max_num_seqs-request_throughput%1"
    assert (one.name, other.name) == (f"{drawn}-dtype=float32", f"{drawn}-dtype=bfloat16")
    assert one.title == "p99 end-to-end latency (ms) over request throughput (requests/s)\ndtype=float32"
    assert one.rows == one.columns == [()]
    assert one.panels == {
        ((), ()): {
            "max_num_seqs=1": [Point(2, 2.5, 2, 3), Point(4, 4.5, 4, 5)],
            "max_num_seqs=2": [Point(2, 4.5, 4, 5), Point(4, 8.5, 8, 9)],
        }
    }


def test_rows_and_columns_are_panels() -> None:
    options = PlotOptions(row_by=["dtype"], col_by=["max_num_seqs"], filter_by=["request_throughput>4"], fig_name="x")
    (figure,) = figures([*ROWS, {"dtype": "auto", "request_throughput": 5, "p99_e2el_ms": 7}], options)
    rows = [(("dtype", name),) for name in ("float32", "bfloat16", "auto")]
    columns = [(("max_num_seqs", text),) for text in ("1", "2", "–")]
    assert (figure.name, figure.rows, figure.columns) == ("x", rows, columns)
    assert len(figure.panels) == 5
    assert figure.panels[rows[2], columns[2]] == {"": [Point(5, 7, 7, 7)]}
    assert figure.panels[rows[0], columns[1]] == {"": [Point(4.2, 9, 9, 9)]}


def test_x_may_be_a_text_and_runs_without_a_value_are_left_out() -> None:
    rows = [*ROWS, {"dtype": "float32"}, {"dtype": "auto", "p99_e2el_ms": float("nan")}]
    (figure,) = figures(rows, PlotOptions(var_x="dtype", filter_by=["max_num_seqs!=2"]))
    assert figure.panels[(), ()] == {"": [Point("float32", 3.5, 2, 5), Point("bfloat16", 3.5, 2, 5)]}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a<3", True),
        ("a<2", False),
        ("a<=2", True),
        ("a >= 2.0", True),
        ("a>2", False),
        ("a==2.0", True),
        ("a!=2", False),
        ("a==x", False),
        ("b==x y", True),
        ("b=='x y'", True),
        ("b!=x y", False),
        ("c==true", True),
        ("c==True", True),
        ("c==1", False),
        ("d==1", False),
        ("d!=1", True),
        ("d<1", False),
        ("e-f>1", True),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    assert Condition.of(text).holds({"a": 2, "b": "x y", "c": True, "e_f": 3}) is holds


def test_bins() -> None:
    assert Bins.of("a-b%0.5").applied({"a_b": 1.7, "c": 1}) == {"a_b": 1.5, "c": 1}
    assert Bins.of("a%10").applied({"a": float("inf")}) == {"a": float("inf")}
    assert Bins.of("a%10").applied({"b": 1}) == {"b": 1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--filter-by", "a=3"], "--filter-by must be NAME==VALUE"),
        (["--filter-by", "a<x"], "--filter-by must be NAME==VALUE"),
        (["--filter-by", "p99_e2el_ms>1000"], "--filter-by leaves no result"),
        (["--filter-by", "dtype<3"], "dtype is 'bfloat16' in a result, where a number is needed"),
        (["--bin-by", "a%0"], "--bin-by must be NAME%SIZE"),
        (["--bin-by", "a"], "--bin-by must be NAME%SIZE"),
        (["--var-y", "dtype"], "dtype is 'bfloat16' in a result"),
        (["--curve-by", "color"], "no result has 'color'; they have: dtype, max-num-seqs, p99_e2el_ms, request_thr"),
        (["--scale-x", "cubic"], "--scale-x must be one of linear"),
    ],
)
def test_what_cannot_be_drawn_says_so(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sweep", "plot", str(folder), "--dry-run", *flags]) == 1
    assert capsys.readouterr().err.startswith(f"llmjax: error: {message}")


def test_what_is_no_result_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results of a sweep"):
        read_rows(tmp_path)
    for text in ("{", "{}", "[1]"):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ConfigError, match="is not JSON" if text == "{" else "a list of objects"):
            read_rows(tmp_path)


@pytest.mark.parametrize("command", ["plot", "plot_pareto"])
def test_without_matplotlib_it_says_so(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "sweep", command, str(folder)]) == 1
    assert capsys.readouterr().err.endswith(f"sweep {command} needs matplotlib\n  hint: pip install 'llmjax[plot]'\n")


def test_figures_are_named_or_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "sweep", "plot", str(folder), "--fig-by", "dtype", "--col-by", "max_num_seqs", "--fig-dir", "f"]
    drawn = "p99_e2el_ms-over-request_throughput-col=max_num_seqs"
    paths = [folder / "f" / f"{path_name(f'{drawn}-dtype={dtype}')}.png" for dtype in ("bfloat16", "float32")]
    assert main([*line, "--dry-run"]) == 0
    assert capsys.readouterr().out == "".join(f"{path}: 1 x 2\n" for path in paths)
    assert not any(path.exists() for path in paths)
    pytest.importorskip("matplotlib")
    assert main([*line, "--scale-x", "sqrt", "--scale-y", "log", "--fig-name", "FIGURE"]) == 0
    paths = [folder / "f" / f"FIGURE-dtype={dtype}.png" for dtype in ("bfloat16", "float32")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert main(["bench", "sweep", "plot", str(folder / "e"), "--var-x", "dtype", "--row-by", "dtype"]) == 0
    assert (folder / "e" / "p99_e2el_ms-over-dtype-row=dtype.png").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--var-x", "max_num_seqs"],
        ["--var-y", "max_num_seqs"],
        ["--curve-by", "dtype"],
        ["--row-by", "dtype"],
        ["--col-by", "dtype"],
        ["--filter-by", "max_num_seqs<2"],
        ["--bin-by", "request_throughput%1"],
        ["--scale-x", "log"],
    ],
)
def test_figures_of_other_things_have_other_names(
    folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "sweep", "plot", str(folder), "--dry-run"]
    assert main(line) == main([*line, *flags]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one.partition(": ")[0] != other.partition(": ")[0]


def test_a_picture_has_a_title_units_and_whole_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("llmjax.bench.sweep_plot.save", lambda picture, path: drawn.append(picture))
    rows = [{"max_concurrency": n, "mean_ttft_ms": 10.5 * n, "dtype": "bf16"} for n in (1, 2, 4, 8)]
    for scale, ticks in (("linear", None), ("log", [1, 2, 4, 8])):
        options = PlotOptions(var_x="max-concurrency", var_y="mean_ttft_ms", scale_x=scale, fig_by=["dtype"])
        (figure,) = figures(rows, options)
        draw(figure, options, tmp_path / "x.png")
        (ax,) = drawn[-1].axes
        title = "mean time to first token (ms) over max concurrency\ndtype=bf16"
        assert drawn[-1].get_suptitle() == title
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("max concurrency", "mean time to first token (ms)")
        assert all(float(tick).is_integer() for tick in ax.get_xticks())
        assert ticks is None or [text.get_text() for text in ax.get_xticklabels()] == [str(tick) for tick in ticks]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("p99_e2el_ms", "p99 end-to-end latency (ms)"),
        ("median_tpot_ms", "median time per output token (ms)"),
        ("request-rate", "request rate (requests/s)"),
        ("total_token_throughput", "total token throughput (tokens/s)"),
        ("host_ms_per_step", "host ms per step"),
        ("kv_cache_memory_bytes", "kv cache memory (bytes)"),
        ("dtype", "dtype"),
    ],
)
def test_axes_say_units(name: str, label: str) -> None:
    assert axis_label(name) == label


RUNS: list[dict[str, Any]] = [
    {"output_throughput": 100, "max_concurrency": 1},
    {"output_throughput": 300, "max_concurrency": 4, "max_concurrent_requests": 3},
    {"output_throughput": 240, "max_concurrency": None, "max_concurrent_requests": 4},
    {"output_throughput": 400, "max-concurrency": 8, "tensor-parallel-size": 2, "dp": 2},
    {"output_throughput": 900, "users": 3, "devices": 9},
]


def test_speeds_and_their_front() -> None:
    found = speeds(RUNS, ParetoOptions())
    assert found == [Speed(100, 100), Speed(75, 300), Speed(60, 240), Speed(50, 100)]
    assert frontier(found) == [Speed(75, 300), Speed(100, 100)]
    assert frontier([Speed(2, 1), Speed(1, 1), Speed(2, 1), Speed(2, 0)]) == [Speed(2, 1)]
    named = ParetoOptions(user_count_var="users", gpu_count_var="devices")
    assert speeds(RUNS[-1:], named) == [Speed(300, 100)]
    with pytest.raises(ConfigError, match="no result has 'max_concurrency'"):
        speeds(RUNS[-1:], ParetoOptions())
    with pytest.raises(ConfigError, match="no output_throughput"):
        speeds([{}], ParetoOptions())


def test_the_front_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(RUNS))
    path = tmp_path / "pareto" / "PARETO.png"
    assert main(["bench", "sweep", "plot_pareto", str(tmp_path), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{path}: 2 of 5 runs are at the front\n" and not path.exists()
    pytest.importorskip("matplotlib")
    assert main(["bench", "sweep", "plot_pareto", str(tmp_path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "sweep", "plot_pareto", str(tmp_path), "--user-count-var", "users", "--dry-run"]) == 0
    assert str(path) not in capsys.readouterr().out.splitlines()[-1]
