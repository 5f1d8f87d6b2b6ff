"""Which tests and files a JUnit file says are slow, and how two runs differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.test_times import changes, main, read, slowest

HEAD = '<?xml version="1.0"?><testsuites><testsuite name="pytest">'
TAIL = "</testsuite></testsuites>"


def written(path: Path, *cases: tuple[str, str, float]) -> Path:
    lines = [f'<testcase classname="{file}" name="{name}" time="{seconds}"/>' for file, name, seconds in cases]
    path.write_text(HEAD + "".join(lines) + TAIL)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return written(tmp_path / "old.xml", ("a", "one", 3.0), ("a", "two", 1.0), ("b", "one", 3.5))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return written(tmp_path / "new.xml", ("a", "one", 0.5), ("a", "two", 1.0), ("c", "one", 2.0))


def test_tests_and_files_are_added_up(old: Path) -> None:
    run = read(old)
    assert [(test.name, test.seconds) for test in slowest(run.tests, 2)] == [("b::one", 3.5), ("a::one", 3.0)]
    assert [(file.name, file.seconds, file.tests) for file in slowest(run.files, 9)] == [("a", 4.0, 2), ("b", 3.5, 1)]
    assert run.seconds == 7.5


def test_changes_have_what_only_one_run_knows(old: Path, new: Path) -> None:
    before, after = read(old), read(new)
    assert changes(before.tests, after.tests, 9) == [("b::one", 3.5, 0.0), ("a::one", 3.0, 0.5), ("c::one", 0.0, 2.0)]
    assert changes(before.files, after.files, 1) == [("b", 3.5, 0.0)]


def test_tables_are_printed(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(old), "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3 tests in 2 files take 8 s in all" in shown
    assert "b::one" in shown and "a::one" not in shown
    assert main([str(old), str(new)]) == 0
    shown = capsys.readouterr().out
    assert "3 tests took 8 s, 3 take 4 s" in shown and "-3.50" in shown and "+2.00" in shown


@pytest.mark.parametrize("text", ["", "<testsuites/>", '<testcase classname="a" time="1"/>', "plain"])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.xml").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run.xml")])
    assert "run.xml" in capsys.readouterr().err
