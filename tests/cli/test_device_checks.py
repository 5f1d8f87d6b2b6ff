"""What ``llmjax doctor`` finds out about a device, and that nothing a plug-in does ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

from llmjax.cli import device_checks
from llmjax.cli.device_checks import CHECKS, NOTHING_WORKS, Outcome, Wrong, run_checks
from tests.stand_in_plugin import ROOT, build, needs_stand_in, registered

BEGIN = 'import json, os, signal, sys, time\nfirst = int(sys.argv[1])\nprint("noise", flush=True)\n'
STEP = """
def step(number, **found):
    name = f"check {number}"
    print(json.dumps({"begin": name}), flush=True)
    if number == BAD:
        ACT()
    outcome = dict(name=name, seconds=0.1, error=None, detail="", meaning="", needed=True)
    print(json.dumps(outcome), flush=True)
for number in range(first, LAST):
    step(number)
"""


def outcomes(act: str, *, bad: int = 2, seconds: float = 60.0) -> list[Outcome]:
    """What comes of a process in which one check does something else; it has as many as there are."""
    script = BEGIN + STEP.replace("BAD", str(bad)).replace("LAST", str(len(CHECKS))).replace("ACT()", act)
    return list(run_checks([sys.executable, "-c", script], seconds=seconds))


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended (SIGKILL)"),
        ('sys.exit("out of registers")', "its process ended (status 1): out of registers"),
    ],
)
def test_a_check_that_ends_its_process_has_failed_and_the_others_go_on(act: str, error: str) -> None:
    found = outcomes(act)
    assert len(found) == len(CHECKS)
    assert [i for i, outcome in enumerate(found) if outcome.error] == [2]
    assert (found[2].name, found[2].error, found[2].meaning) == (CHECKS[2].name, error, CHECKS[2].meaning)


def test_a_check_that_does_not_answer_has_failed() -> None:
    last = len(CHECKS) - 1
    found = outcomes("time.sleep(600)", bad=last, seconds=5.0)
    assert (found[last].error, len(found)) == ("no answer within 5 s", len(CHECKS))


def test_a_device_that_cannot_be_opened_is_one_finding() -> None:
    (found,) = run_checks([sys.executable, "-c", "import sys; sys.exit('no device 7')"])
    assert (found.name, found.error, found.needed) == ("open", "its process ended (status 1): no device 7", True)
    assert found.meaning == NOTHING_WORKS


def check(name: str) -> str:
    (one,) = (check for check in CHECKS if check.name == name)
    return one.run(jax.devices("cpu")[:1])


@pytest.mark.parametrize("name", ["compile and run", "conditional", "products of bfloat16", "donation"])
def test_what_works(name: str) -> None:
    check(name)


def test_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Wrong, match="says nothing of bytes_limit and bytes_in_use"):
        check("memory of the device")
    monkeypatch.setattr(mlir, "_platforms_with_donation", ["other"])
    monkeypatch.setattr("llmjax.kernels.devices.take_donations", lambda platform: None)
    with pytest.raises(Wrong, match="the result is a copy"), pytest.warns(UserWarning, match="not usable"):
        check("donation")


def test_sums_in_less_than_f32_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = jax.lax.dot_general

    def rounded(x: jax.Array, y: jax.Array, dims: object, **_: object) -> jax.Array:
        wide = exact(x, y, dims, preferred_element_type=np.float32)  # type: ignore[arg-type]
        return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)

    monkeypatch.setattr(jax.lax, "dot_general", rounded)
    with pytest.raises(Wrong, match="sums of 1024 products: an error of"):
        check("products of bfloat16")


def test_wrong_entries_are_counted() -> None:
    with pytest.raises(Wrong, match=r"x: 1 of 4 entries are wrong, the first at \[2\]"):
        device_checks._same(np.array([1, 2, 4, 4]), np.array([1, 2, 3, 4]), "x")
    with pytest.raises(Wrong, match=r"x is float64\(2,\), not float32\(2,\)"):
        device_checks._same(np.zeros(2), np.zeros(2, np.float32), "x")


@needs_stand_in
@pytest.mark.slow
def test_a_plugin_is_examined(tmp_path: Path) -> None:
    environment = registered(tmp_path, build(tmp_path), devices=3)
    command = [sys.executable, "-m", "llmjax", "doctor", "--json", "--device", "gcu", "--kv-cache-memory-bytes", "1GiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=500)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert [name for name in found if name.startswith("device: ")] == [f"device: {check.name}" for check in CHECKS]
    failed = [name for name, finding in found.items() if name.startswith("device") and "works" not in finding["value"]]
    assert failed[1:] == ["device: memory of the device"]  # the first are the devices
    assert found["device: collectives"]["value"] == "works, 3 devices"
    assert found["used"]["value"].startswith("gcu: ")
    assert found["types"]["value"].startswith("bfloat16 weights, bfloat16 KV cache")
    assert found["attention"]["value"] == "XLA"
