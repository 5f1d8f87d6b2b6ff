"""Teams of threads: under sanitizers, and how many wakes and changes of shared memory a call costs, with up to 64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "native" / "phases.cc"
HEADERS = Path(__file__).parents[2] / "kernels" / "cpu" / "src"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.slow
def test_a_team_runs_phases_in_order_and_at_a_known_cost(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "phases"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{HEADERS}"]
    built = subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr
