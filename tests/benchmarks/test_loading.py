"""Loading, measured: what is written, what is kept, and that memory stays bounded."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loading import BLOCKS, COLUMNS, ROWS, Loading, load, main, write_synthetic
from llmjax.checkpoint import GGUFFile
from llmjax.checkpoint.gguf.model import ConvertedTensor

READABLE = sorted(name for name, block in BLOCKS.items() if block.layout is not None and block.format is not None)
WEIGHTS = ROWS * COLUMNS


def load_alone(path: Path) -> Loading:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(load, (path,))


@pytest.mark.parametrize("name", READABLE)
def test_synthetic_blocks_are_finite_weights(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.gguf"
    write_synthetic(path, name, 1)
    (tensor,) = GGUFFile.open(path).tensors.values()
    source = ConvertedTensor(tensor.name, tensor).row_source()
    assert source is not None and (source.size_out, source.format.size_in) == (ROWS, COLUMNS)
    weights = np.empty((16, COLUMNS), np.float32)
    source.quantized_rows(32, 48).dequantize(weights)
    assert np.isfinite(weights).all() and weights.std() > 0


def test_loading_needs_little_beside_what_it_keeps(tmp_path: Path) -> None:
    """Bytes as Linux counts them for a process that does nothing else; the file has 9 matrices of 19 MB."""
    path = tmp_path / "s.gguf"
    write_synthetic(path, "Q4_K", 9 * WEIGHTS * 144 // 256)
    found = load_alone(path)
    assert found.file_bytes == 9 * WEIGHTS * 144 // 256
    assert found.file_bytes <= found.kept_bytes < 1.05 * found.file_bytes
    assert found.extra_bytes < found.file_bytes / 2  # a second copy of the file or of the result would be all of it
    assert found.seconds > 0


@pytest.mark.slow
def test_the_table_has_a_row_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.gguf"
    write_synthetic(path, "Q8_0", 1)
    main([str(path), "--synthetic", "Q4_0", "--gigabytes", "0.01", "--folder", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert rows[0].startswith("| s.gguf | 0.04 | ") and rows[1].startswith("| Q4_0, synthetic | 0.02 | ")
    with pytest.raises(SystemExit, match="--synthetic Q8_1: not a quantized type that can be read"):
        main(["--synthetic", "Q8_1", "--folder", str(tmp_path)])
