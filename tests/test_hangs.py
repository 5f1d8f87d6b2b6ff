"""A hanging test fails and shows where it stands; one that a busy machine keeps waiting does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hangs import IDLE_SHARE, LONGEST, WAITING_SHARE, Limit, computed_seconds, waited_seconds
from tests.waiting import until

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
        self.now = self.computed = self.waited = 0.0

    def limit(self, seconds: float) -> Limit:
        return Limit(
            seconds=seconds, clock=lambda: self.now, computed=lambda: self.computed, waited=lambda: self.waited
        )

    def when_late(self, limit: Limit, share: Callable[[float], float], waits: float) -> tuple[float, str]:
        """When a test is too late that gets a share of a core at each time, and waits for one for a share of the time;
        and why."""
        while self.now < 10_000:
            self.now += 10
            self.computed += 10 * share(self.now)
            self.waited += 10 * waits
            why = limit.too_late()
            if why is not None:
                return self.now, why
        raise AssertionError("never")


@pytest.mark.parametrize(
    ("share", "waits", "when", "why"),
    [
        (lambda now: 1.0, 0.0, 120, "120 s of computing"),
        (lambda now: 0.25, 0.75, 480, "120 s of computing"),
        (lambda now: 0.0, 0.0, 120, "stood still"),
        (lambda now: IDLE_SHARE / 2, WAITING_SHARE / 2, 120, "stood still"),
        (lambda now: 0.25 if now <= 100 else 0.0, 0.0, 220, "stood still"),
        (lambda now: 1.5 * IDLE_SHARE, 0.0, LONGEST * 120, f"within {LONGEST * 120} s"),
        (lambda now: IDLE_SHARE / 2, 1.0, LONGEST * 120, f"within {LONGEST * 120} s"),
    ],
    ids=["alone", "a quarter of a core", "hangs", "polls", "hangs later", "nearly still", "starves"],
)
def test_when_a_test_is_too_late(share: Callable[[float], float], waits: float, when: float, why: str) -> None:
    machine = Machine()
    late, said = machine.when_late(machine.limit(120), share, waits)
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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_threads_that_wait_for_a_processor_are_counted() -> None:
    """Each takes turns with others on one core, here and in another process."""
    before = waited_seconds()
    core = min(os.sched_getaffinity(0))
    work = f"import os, time\nos.sched_setaffinity(0, [{core}])\nwhile time.process_time() < 0.3: pass\ninput()"
    command = [sys.executable, "-c", work]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    until(lambda: waited_seconds() - before > 0.3)
    for worker in workers:
        worker.communicate(b"\n")


def run_of(folder: Path, conftest: str, tests: str) -> subprocess.CompletedProcess[str]:
    """pytest on tests that may take two seconds."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_hanging.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_a_failure_that_takes_long_to_tell_ends_no_other_test(tmp_path: Path) -> None:
    slow = f"{CONFTEST}\ndef pytest_runtest_makereport(item, call):\n    time.sleep(3 if call.excinfo else 0)\n"
    run = run_of(tmp_path, f"import time\n{slow}", "def test_fails():\n    assert 0\n\ndef test_ends():\n    pass\n")
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "stood still" not in run.stdout


def test_a_hang_fails_with_stacks_and_the_next_test_runs(tmp_path: Path) -> None:
    run = run_of(tmp_path, CONFTEST, HANGING)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "it has stood still for 2 s" in run.stdout
    assert "process.wait()" in run.stdout and "time.sleep" not in run.stderr
    assert 'File "<string>", line 1 in <module>' in run.stdout  # the other process's stack
