"""Where a step's time goes, on a tiny model, from flags to the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.random_model import SHAPES, write_random_model
from benchmarks.step_time import Line, StepTimeOptions, main, table_of
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.recording import WORK


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="--steps must be at least 1, not 0"):
        StepTimeOptions(steps=0)


def test_the_table_adds_up() -> None:
    busy = dict.fromkeys(WORK, 0.0) | {"products": 0.004, "attention": 0.002}
    line = Line(name="1 streams", wall=0.010, busy=busy, calling=0.009, host=0.001, calls=62, phases=300)
    table = table_of([line], EngineConfig(model="m"))
    shown = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert shown == {
        "": "1 streams", "step": "10.00", "products": "4.00", "attention": "2.00", "waits": "3.00", "outside": "1.00",
        "kernels": "60%", "host": "1.00", "calls": "62", "phases": "300",
    }  # fmt: skip


@pytest.mark.slow
def test_the_step_of_a_tiny_model(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_model(tmp_path, SHAPES["tiny"], max_position_embeddings=512)
    flags = f"--model {tmp_path} --streams 1,2 --context 8 --prompt 16 --steps 40 --runs 1 --max-num-batched-tokens 16"
    assert main([*flags.split(), "--compilation-cache-dir", compile_cache_dir]) == 0
    shown = capsys.readouterr().out
    lines = [line.split("|") for line in shown.splitlines() if line.startswith("|")]
    assert [line[1].strip() for line in lines[2:]] == ["1 streams", "2 streams", "prompt of 16"]
    heads = [head.strip() for head in lines[0]]
    assert all(float(line[heads.index("step")]) > 0 and int(line[heads.index("calls")]) > 0 for line in lines[2:]), (
        shown
    )
