"""A hanging test fails and shows where it stands; one that a busy machine keeps waiting does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hangs import IDLE_SHARE, LONGEST, Limit, computed_seconds

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = """
from tests import hangs
from tests.hangs import pytest_timeout_set_timer

def pytest_configure(config):
    hangs.configure(config)
"""

HANGING = """
import subprocess, sys, time

def test_waits_for_a_process_that_waits():
    script = "import faulthandler, time; faulthandler.enable(); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.wait()

def test_comes_to_its_end():
    pass
"""


class Machine:
    """A test that gets a share of a core."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0

    def limit(self, seconds: float) -> Limit:
        return Limit(seconds=seconds, clock=lambda: self.now, computed=lambda: self.computed)

    def when_late(self, limit: Limit, share: Callable[[float], float]) -> tuple[float, str]:
        """When a test is too late that gets a share of a core at each time, and why."""
        while self.now < 10_000:
            self.now += 10
            self.computed += 10 * share(self.now)
            why = limit.too_late()
            if why is not None:
                return self.now, why
        raise AssertionError("never")


@pytest.mark.parametrize(
    ("share", "when", "why"),
    [
        (lambda now: 1.0, 120, "120 s of computing"),
        (lambda now: 0.25, 480, "120 s of computing"),
        (lambda now: 0.0, 120, "stood still"),
        (lambda now: IDLE_SHARE / 2, 120, "stood still"),
        (lambda now: 0.25 if now <= 100 else 0.0, 220, "stood still"),
        (lambda now: 1.5 * IDLE_SHARE, LONGEST * 120, f"within {LONGEST * 120} s"),
    ],
    ids=["alone", "a quarter of a core", "hangs", "polls", "hangs later", "nearly still"],
)
def test_when_a_test_is_too_late(share: Callable[[float], float], when: float, why: str) -> None:
    machine = Machine()
    late, said = machine.when_late(machine.limit(120), share)
    assert late == when and why in said


def test_a_process_that_nobody_waited_for_does_not_look_like_a_hang() -> None:
    machine = Machine()
    limit = machine.limit(120)
    machine.now, machine.computed = 60, 50
    assert limit.too_late() is None
    machine.now, machine.computed = 120, 20  # its 40 seconds are gone from the sum
    assert limit.too_late() is None
    machine.now = 230
    assert limit.too_late() is None
    machine.now = 240
    assert limit.too_late() == "it has stood still for 120 s"


def test_processes_that_have_ended_and_that_run_are_counted() -> None:
    before = computed_seconds()
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert computed_seconds() - before >= 0.28  # in ticks of 10 ms
        process.stdin.write(b"\n")
    assert computed_seconds() - before >= 0.28


def test_a_hang_fails_with_stacks_and_the_next_test_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "it has stood still for 2 s" in run.stdout
    assert "process.wait()" in run.stdout and "time.sleep" not in run.stderr
    assert 'File "<string>", line 1 in <module>' in run.stdout  # the other process's stack
