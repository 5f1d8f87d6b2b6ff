"""Lighthouse's marks for the chat page and for the first page of the documentation.

The documentation's speed has no mark here: its theme reads the index of the search, 0.8 MB, as soon as a page opens.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import Running

pytestmark = [pytest.mark.slow, pytest.mark.alone]

FOLDER = Path(__file__).parents[2] / "build" / "lighthouse"
LOWEST = 0.95


def low_marks(url: str, *, chromium: str, report: Path) -> dict[str, float]:
    """The marks of a page, for performance, accessibility and best practices among others, that are too low."""
    program = FOLDER / "node_modules" / ".bin" / "lighthouse"
    if not program.exists():
        pytest.skip(f"needs Lighthouse: npm install --prefix {FOLDER} lighthouse")
    sandbox = "" if os.getuid() else " --no-sandbox"
    options = [
        "--quiet",
        "--output=json",
        f"--output-path={report}",
        f"--chrome-flags=--headless --disable-gpu{sandbox}",
    ]
    environment = {**os.environ, "CHROME_PATH": chromium}
    subprocess.run([program, url, *options], env=environment, check=True, timeout=110)
    marks = {name: part["score"] for name, part in json.loads(report.read_text())["categories"].items()}
    assert marks.keys() >= {"performance", "accessibility", "best-practices"}
    return {name: mark for name, mark in marks.items() if mark < LOWEST}


def test_marks(server: Running, chromium_path: str, tmp_path: Path) -> None:
    assert low_marks(f"{server.url}/", chromium=chromium_path, report=tmp_path / "report.json") == {}


def test_marks_of_the_documentation(documentation: str, chromium_path: str, tmp_path: Path) -> None:
    low = low_marks(f"{documentation}/index.html", chromium=chromium_path, report=tmp_path / "report.json")
    assert low.keys() <= {"performance"}
