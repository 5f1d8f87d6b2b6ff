"""Times of a tokenizer, in a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tokenizer import main

CHARACTERS = Path(__file__).parents[1] / "engine" / "golden" / "characters"


def test_a_row_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(CHARACTERS), "--characters", "50"])
    *_, line = capsys.readouterr().out.splitlines()
    name, load, text, run, *times = [cell.strip() for cell in line.strip("|").split("|")]
    assert name == str(CHARACTERS) and run[0] == run[-1] and run[0] in "'\""
    assert min(map(float, (load, text, *times))) >= 0
    with pytest.raises(SystemExit, match="nowhere"):
        main(["/nowhere"])
