"""The host's time on a tiny model, from flags to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.host_time import HostTimeOptions, Point, main
from llmjax.errors import ConfigError


def test_wrong_points_are_refused() -> None:
    assert Point.parse("16x32") == Point(16, 32)
    for text in ("16", "x32", "0x32", "16x1", "16x32x2", "ax32"):
        with pytest.raises(ConfigError, match=f"--points: '{text}' is not STREAMSxCONTEXT"):
            HostTimeOptions(points=(text,))
    with pytest.raises(ConfigError, match="--runs must be at least 1"):
        HostTimeOptions(runs=0)
    with pytest.raises(ConfigError, match="--evict-mib must not be negative"):
        HostTimeOptions(evict_mib=-1)
    with pytest.raises(ConfigError, match="--steps must be at least 1 each, not 0"):
        HostTimeOptions(steps=(1, 0))
    with pytest.raises(ConfigError, match="shape must be one of least, tiny"):
        HostTimeOptions(shape="huge")


@pytest.mark.slow
def test_the_host_time_of_a_tiny_model(
    tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--shape tiny --points 2x40 --steps 1,3 --dispatches 4 --runs 1 --evict-mib 1 --max-num-batched-tokens 16"
    files = ["--work-dir", str(tmp_path), "--output-json", str(tmp_path / "host.json")]
    assert main([*flags.split(), *files, "--compilation-cache-dir", compile_cache_dir]) == 0
    shown = capsys.readouterr().out
    assert "plan, ms" in shown and "deliver, ms" in shown
    written = json.loads((tmp_path / "host.json").read_text())
    one, three = written["figures"]
    assert written["shape"] == "tiny"
    assert one["steps"] == 1 and 2 < three["steps"] <= 3
    for figure in (one, three):
        assert figure["point"] == {"streams": 2, "context": 40}
        assert all(figure["host"][part] > 0 for part in ("plan", "send", "read", "deliver"))
        assert figure["host_per_step"] == pytest.approx(sum(figure["host"].values()) / figure["steps"])
