"""The benchmark of some minutes on a card: its ranks and budgets, and all of its parts at tiny shapes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import card, card_parts, card_tests
from benchmarks.card import CUT, ENDED, FAILED, FINDINGS, PARTS, Part, State, findings, main, report, run

OPTIONS: Any = SimpleNamespace(device="cpu", smoke=True, vllm=None)


def test_every_part_is_measured_by_a_function_and_says_what_it_answers() -> None:
    assert [part.name for part in PARTS] == list(card_parts.PARTS)
    assert all(part.minutes > 0 and part.question for part in PARTS)
    worth = {part.name: place for place, part in enumerate(PARTS)}
    assert worth["doctor"] < worth["limits"] < worth["decode-bf16"] < worth["decode-q4_k"] < worth["tuning"]


def test_a_later_call_goes_on_with_what_has_not_ended(tmp_path: Path) -> None:
    parts = [Part(name, 1, "?") for name in ("a", "b", "c", "d")]
    state = State.of(tmp_path, "commit cuda")
    for name, how in (("a", ENDED), ("b", CUT), ("c", FAILED)):
        state.note(name, how)
    assert [part.name for part in State.of(tmp_path, "commit cuda").ranked(parts)] == ["d", "b", "c"]
    assert [part.name for part in State.of(tmp_path, "another cuda").ranked(parts)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("seconds", "how", "said"), [(60, ENDED, ["0", "1", "2"]), (0.5, CUT, ["0"])])
def test_a_part_is_ended_with_its_budget_and_what_it_found_stays(
    seconds: float, how: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is a program that writes three findings; where the budget is short, it never gets past the first."""
    pause = "import threading; threading.Event().wait()" if how == CUT else "pass"
    line = '{"part": "p", "name": str(i), "said": "x"}'
    program = f"import json, sys\nfor i in range(3):\n    f = open(sys.argv[1], 'a')\n    f.write(json.dumps({line})"
    program += f" + chr(10)); f.close()\n    {pause}\n"
    start = card.subprocess.Popen
    waited = []

    def popen(command: list[str], **options: Any) -> Any:
        process = start([sys.executable, "-c", program, str(tmp_path / FINDINGS)], **options)
        while how == CUT and not (tmp_path / FINDINGS).exists():
            waited.append(process.poll())
            time.sleep(0.01)
        return process

    monkeypatch.setattr(card.subprocess, "Popen", popen)
    assert run(Part("p", 1, "?"), tmp_path, seconds, OPTIONS) == how
    assert [entry["name"] for entry in findings(tmp_path)] == said


def test_what_was_found_twice_counts_once_and_half_a_line_not_at_all(tmp_path: Path) -> None:
    """What two implementations took is two findings, even if they have one name."""
    lines = [{"part": "p", "name": "a", "said": "1"}, {"part": "p", "name": "b", "said": "2"}]
    text = "\n".join(map(json.dumps, [*lines, {**lines[0], "said": "3"}])) + '\n{"part": "p", "na'
    (tmp_path / FINDINGS).write_text(text)
    assert [(entry["name"], entry["said"]) for entry in findings(tmp_path)] == [("b", "2"), ("a", "3")]
    figures = [{"part": "p", "name": "f", "by": way, "seconds": n} for n, way in enumerate(("x", "y", "x"))]
    (tmp_path / FINDINGS).write_text("".join(json.dumps(entry) + "\n" for entry in figures))
    assert [(entry["by"], entry["seconds"]) for entry in findings(tmp_path)] == [("y", 1), ("x", 2)]


def test_the_report_sets_figures_beside_the_limits_of_the_card(tmp_path: Path) -> None:
    def figure(part: str, name: str, seconds: float, moved: float, computed: float) -> dict[str, Any]:
        work = {"bytes": moved, "flops": computed}
        return {"part": part, "name": name, "by": "XLA", "seconds": seconds, "tokens": 1, "work": work}

    found = [
        figure("limits", "copies", 1.0, 1e12, 0),
        figure("limits", "products, bf16", 1.0, 0, 1e14),
        figure("decode-bf16", "bf16: decode, 1 x 512", 0.02, 1.6e10, 1e9),
        {"part": "tests", "name": "tests/a.py::b", "said": "failed"},
    ]
    (tmp_path / FINDINGS).write_text("".join(json.dumps(entry) + "\n" for entry in found))
    state = State(tmp_path / "x", "", {"limits": ENDED, "decode-bf16": CUT})
    lines = list(report(tmp_path, state))
    (row,) = (line for line in lines if "bf16: decode, 1 x 512" in line)
    assert "80%" in row and "| 50 |" in row.replace("  ", " ").replace("  ", " ").replace("  ", " ")
    assert "* tests/a.py::b: failed" in lines
    assert any("decode-bf16: cut" in line for line in lines) and any("tuning: not begun" in line for line in lines)


def test_tests_that_were_begun_and_did_not_end_are_named(tmp_path: Path) -> None:
    notes = tmp_path / "n.jsonl"
    entries = [
        *({"there": name} for name in "abcde"),
        *({"begun": name} for name in "abcd"),
        {"ended": "a", "how": "passed", "seconds": 1},
        {"ended": "b", "how": "failed", "seconds": 1},
        {"ended": "d", "how": "failed", "seconds": 1},
    ]
    notes.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    said = list(card_tests.summary(notes, tmp_path / "log"))
    assert said[0] == ("tests", f"1 passed, 2 failed, 0 skipped; log in {tmp_path / 'log'}")
    rest = [("b", "failed"), ("d", "failed"), ("c", "begun and not ended"), ("tests not begun", "1")]
    assert said[1:] == rest  # each by a name of its own: of findings with one name the last counts


def test_wrong_calls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        ([], "--minutes says how long"),
        (["--minutes", "1", "--device", "cpu"], "add --smoke"),
        (["--minutes", "1", "--device", "cpu", "--smoke", "--only", "x"], "unknown: x; there are doctor"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--results", str(tmp_path)])
        assert why in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "tuning" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_all_of_it_runs_at_tiny_shapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So that no typo takes minutes of a card: every part ends, and every part finds something."""
    assert main(["--device", "cpu", "--smoke", "--minutes", "24", "--results", str(tmp_path)]) == 0, capfd.readouterr()
    found = list(findings(tmp_path))
    assert {entry["part"] for entry in found} == {part.name for part in PARTS}
    assert all(entry["seconds"] > 0 for entry in found if "work" in entry)
    assert main(["--device", "cpu", "--smoke", "--minutes", "1", "--results", str(tmp_path)]) == 0
    assert len(list(findings(tmp_path))) == len(found)
