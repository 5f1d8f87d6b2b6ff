"""Times of embeddings, in a table; the engine is a real one, in its process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.embeddings import OURS, Taken, main, rows, texts_of
from tests.pooled_models import write_with_tokenizer


@pytest.mark.slow
def test_a_row_for_each_number_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_with_tokenizer("bert", tmp_path, ends=True)
    main([str(model), "--counts", "1", "3", "--rounds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if f"| {OURS} |" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == ["1", "3"]
    for _, _, wall, of_ours, cpu, _, cosine in cells:
        assert float(wall) > 0 and float(cpu) >= 0 and of_ours == "1.00x"
        assert float(cosine) == pytest.approx(1, abs=1e-4)


def test_other_engines_are_shown_as_multiples() -> None:
    best = {OURS: Taken(0.1, 0.2, np.zeros(1)), "onnx": Taken(0.25, 0.3, np.zeros(1))}
    assert rows(32, best, 0.99998)[1] == "| 32 | onnx | 250.0 | 2.50x | 300.0 | 1.50x | 0.99998 |"


def test_texts() -> None:
    assert texts_of(3, seed=1) == texts_of(3, seed=1) != texts_of(3, seed=2)
    assert all(4 <= len(text.split()) <= 60 for text in texts_of(50, seed=0))


@pytest.mark.parametrize("peer", ["vllm=python", "onnx", "onnx="])
def test_peers_that_are_not_known(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "--peer", peer])
    assert "must be NAME=PYTHON" in capsys.readouterr().err


def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    model = write_with_tokenizer("bert", tmp_path, ends=True)
    with pytest.raises(SystemExit, match="onnx has ended"):  # whose library is not there
        main([str(model), "--peer", f"onnx={sys.executable}", "--counts", "1"])
