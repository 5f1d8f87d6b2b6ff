"""Programs in JavaScript, ``tests/serve/clients``, that are run against a server where Node and their packages are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parent / "clients"


def run_program(script: str, *arguments: str, package: str) -> None:
    """Runs a program, which says "done" at its end; skips the test where there is no Node, or no such package."""
    node = shutil.which("node")
    if node is None or not (CLIENTS / "node_modules" / package).exists():
        pytest.skip(f"needs Node and {package}: npm install --prefix {CLIENTS}")
    done = subprocess.run([node, script, *arguments], cwd=CLIENTS, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
