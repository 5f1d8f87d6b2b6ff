"""Pages that one process pulls from another, as a command."""

from __future__ import annotations

import pytest

from benchmarks.page_pull import main
from llmjax.errors import ConfigError


@pytest.mark.parametrize("name", ["megabytes", "page-kib", "rounds"])
def test_nothing_to_measure(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name} must be at least 1, not 0$"):
        main([f"--{name}", "0"])


@pytest.mark.slow
def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax.experimental.transfer")
    monkeypatch.setattr("benchmarks.page_pull.UNKNOWN_SECONDS", 2.0)
    main(["--megabytes", "1", "--page-kib", "64", "--rounds", "1"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("16 pages of 64 KiB; ")
    assert [line.split(":")[0] for line in said[1:3]] == ["over TCP", "jax.experimental.transfer"]
    assert all(" GB/s, " in line for line in said[1:3])
    assert "the pages are not there (any more), after " in said[3]
    assert said[4].startswith("a name that nobody gives, jax.experimental.transfer: ")
