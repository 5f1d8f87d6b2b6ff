"""Pictures: drawn where matplotlib is, refused in time where it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.plot import Bars, Line, draw
from llmjax.bench.pyplot import check_plot
from llmjax.errors import ConfigError


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = [Bars("t", "tokens/s", {"a": 1.0, "b": 2000.0}), Line("u", "streams", "ms", [1, 2, 4], [1, 1, 2])]
    draw(panels, title="title", path=str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--plot: .*xyz"):
        draw(panels, title="title", path=str(tmp_path / "p.xyz"))
    with pytest.raises(ConfigError, match="--plot: no folder"):
        check_plot(str(tmp_path / "no" / "p.png"))


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_plot(None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib; pip install 'llmjax"):
        check_plot("p.png")
