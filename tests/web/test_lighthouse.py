"""Lighthouse's marks for the page: performance, accessibility, best practices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import Running
from tests.web.conftest import NAMES

pytestmark = [pytest.mark.slow, pytest.mark.alone]

FOLDER = Path(__file__).parents[2] / "build" / "lighthouse"
LOWEST = 0.95


def test_marks(server: Running, tmp_path: Path) -> None:
    program = FOLDER / "node_modules" / ".bin" / "lighthouse"
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if not program.exists() or chromium is None:
        pytest.skip(f"needs Chromium, and Lighthouse: npm install --prefix {FOLDER} lighthouse")
    sandbox = "" if os.getuid() else " --no-sandbox"
    report = tmp_path / "report.json"
    options = [
        "--quiet",
        "--output=json",
        f"--output-path={report}",
        f"--chrome-flags=--headless --disable-gpu{sandbox}",
    ]
    environment = {**os.environ, "CHROME_PATH": chromium}
    subprocess.run([program, f"{server.url}/", *options], env=environment, check=True, timeout=110)
    marks = {name: part["score"] for name, part in json.loads(report.read_text())["categories"].items()}
    assert marks.keys() >= {"performance", "accessibility", "best-practices"}
    assert {name: mark for name, mark in marks.items() if mark < LOWEST} == {}
