"""Figures of processors: newer ones replace older ones, and tables show what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machine import Machine
from benchmarks.points import parse_points
from benchmarks.records import FOLDER, Record, all_records, path_of, read_records, record, summary, whole
from llmjax.errors import ConfigError

MACHINE = Machine(cpu="A CPU @ 2 GHz", cores=2, memory_gib=24, system="Linux 6")


def figure(point: str = "decode16x32", date: str = "2026-01-02", ours: float = 0.01, **fields: object) -> Record:
    values = {"model": "m", "commit": "abc", "versions": {"b": "b 1.0"}, "seconds": {"us": ours, "a": 0.02, "b": 0.04}}
    return Record(**{**values, "point": point, "date": date, **fields})  # type: ignore[arg-type]


def test_newer_figures_replace_those_of_the_same_weights_settings_and_point(tmp_path: Path) -> None:
    record([figure(), figure("load"), figure(settings="--dtype float32")], MACHINE, MACHINE.cpu, tmp_path)
    later = figure(date="2026-02-03", ours=0.005)
    path = record([later], MACHINE, MACHINE.cpu, tmp_path)
    assert path == path_of(MACHINE.cpu, tmp_path) and path.name == "a-cpu-2-ghz.json"
    kept = read_records(path)
    assert kept.records == (later, figure("load"), figure(settings="--dtype float32"))
    assert (kept.chip, kept.machine, kept.date) == (MACHINE.cpu, str(MACHINE), "2026-02-03")
    record([figure(date="2026-03-01")], MACHINE, "another", tmp_path)
    assert [one.chip for one in all_records(tmp_path)] == ["another", MACHINE.cpu]


def test_speeds_and_ratios_are_those_of_one_comparison() -> None:
    one = figure()
    assert (one.speed("us"), one.speed("b"), one.speed("c")) == (1600, 400, None)
    assert one.ratio("us") == 2
    assert figure(seconds={"us": 1.0}).ratio("us") is None and figure(seconds={"a": 1.0}).ratio("us") is None
    assert figure("load").speed("us") is None


def test_tables_show_what_is_kept(tmp_path: Path) -> None:
    figures = [figure("load"), figure(weight_bytes=96_000_000, by_medians=1.5), figure(settings="--dtype float32")]
    record([*figures, figure("prefill512", seconds={"us": 0.1})], MACHINE, "Chip", tmp_path)
    chips = all_records(tmp_path)
    assert summary(chips, model="m", ours="us").splitlines()[2:] == [
        "| **Chip**: 16 streams | 1,600 | 800 | 400 | 2026-01-02 |",
        "| a prompt of 512 | 5,120 |  |  | 2026-01-02 |",
        "| start to first token, s | 0.01 | 0.02 | 0.04 | 2026-01-02 |",
    ]
    text = whole(chips, ours="us")
    assert "| m | decode, 16 streams after 32 | 1,600 | 800 | 400 | 2.00× | 1.50× | 9.6 | 2026-01-02, abc |" in text
    assert "| m, --dtype float32 | decode, 16 streams after 32 | 1,600 | 800 | 400 | 2.00× |  |  |" in text
    assert text.startswith("### Chip\n\n2 cores of A CPU @ 2 GHz") and text.endswith("Peers: b 1.0.")


@pytest.mark.parametrize("content", ["", "[]", '{"chip": "a"}', '{"chip": "a", "machine": "b", "records": [{"x": 1}]}'])
def test_a_wrong_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"chip\.json: no records of a processor"):
        read_records(path)


def test_files_of_the_repository_hold_one_figure_of_each() -> None:
    for path in FOLDER.glob("*.json"):
        found = read_records(path)
        assert path == path_of(found.chip)
        assert len({one.key for one in found.records}) == len(found.records) > 0
        assert all(seconds > 0 for one in found.records for seconds in one.seconds.values())


def test_points_are_known_by_their_keys() -> None:
    points = parse_points("decode1,decode16x1024,prefill512,ttft16x512,load")
    assert parse_points(",".join(point.key for point in points)) == points
