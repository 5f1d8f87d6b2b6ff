"""``llmjax doctor``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

from llmjax.cli import main
from llmjax.cli.doctor import _block_sizes, _environment, _rebuild
from llmjax.kernels.cpu.library import AGAIN, library


def report(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, str | None]]]:
    status = main(["doctor", "--json", *flags])
    return status, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_says_what_would_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    flags = ("--cpu", "--dtype", "float32", "--download-dir", str(tmp_path), "--compilation-cache-dir", str(tmp_path))
    _, found = report(capsys, *flags)
    assert str(jax.devices("cpu")[0]) in str(found["used"]["value"])
    assert found["types"]["value"] == "float32 weights, float32 KV cache, float32 between layers"
    reason = "not built" if library() is None else "slower from 129 rows on"
    assert str(found["products, 512 rows"]["value"]).startswith(f"XLA (C++: {reason}")
    assert f"jax {jax.__version__}" in str(found["versions"]["value"])
    assert str(found["models"]["value"]).startswith(f"{tmp_path}: 0 MiB used")


def test_advises(capsys: pytest.CaptureFixture[str]):
    status, found = report(capsys, "--cpu", "--compilation-cache-dir", "off")
    assert status == 1
    assert "starting takes longer" in str(found["compiled programs"]["advice"])


def test_says_the_command_that_mends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmjax.platforms.nvidia_cards", lambda: "NVIDIA H100, 550.65.06, 81559 MiB")
    monkeypatch.setattr("llmjax.platforms.cuda_plugin", lambda: None)
    monkeypatch.setattr("llmjax.jax_settings.size_pool", lambda share: None)
    monkeypatch.setattr("llmjax.cli.doctor.MIN_FREE_DISK", 0)
    assert main(["doctor", "--fix", "--download-dir", str(tmp_path), "--compilation-cache-dir", "off"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{sys.executable} -m pip install 'jax[cuda12]'" in lines  # the driver is older than 580
    assert "# compiled programs: leave out --compilation-cache-dir off: starting takes longer" in lines
    assert not any("versions" in line for line in lines)  # what is well


def test_the_kernels_are_compiled_after_a_compiler_is_installed(monkeypatch: pytest.MonkeyPatch):
    there = {"apt-get"}
    monkeypatch.setattr("shutil.which", lambda program: program if program in there else None)
    build = f"{sys.executable} -m llmjax.kernels.cpu.build"
    missing = f"not built; {AGAIN}"
    assert _rebuild(missing) == f"sudo apt-get install --yes g++ && {build}"
    there.add("c++")
    assert _rebuild(missing) == build
    assert _rebuild("the system refuses it") is None and _rebuild(None) is None


def test_device_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    status, found = report(capsys, "--device", "gcu")
    assert status == 1
    assert "device 'gcu' is not available (there is: cpu)" in str(found["device: open"]["value"])
    assert "docs/plugins.md" in str(found["device: open"]["value"])


@pytest.mark.parametrize(
    ("cards", "plugin", "advice"),
    [
        ("NVIDIA H100, 580.65.06, 81559 MiB", None, "JAX's plug-in is missing: pip install 'jax[cuda13]'"),
        (None, "jax-cuda13-plugin 1.2", "nvidia-smi does not run: install NVIDIA's driver, 580 or newer"),
        (None, "jax-cuda12-plugin 1.2", "nvidia-smi does not run: install NVIDIA's driver, 525 or newer"),
        ("NVIDIA H100, 580.65.06, 81559 MiB", "jax-cuda13-plugin 1.2", "--device cuda says why"),
    ],
)
def test_what_a_card_needs(
    cards: str | None,
    plugin: str | None,
    advice: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("llmjax.platforms.nvidia_cards", lambda: cards)
    monkeypatch.setattr("llmjax.platforms.cuda_plugin", lambda: plugin)
    monkeypatch.setattr("llmjax.jax_settings.size_pool", lambda share: None)
    status, found = report(capsys)
    assert status == 1
    assert found["NVIDIA cards"]["value"] == (cards or "no driver")
    assert advice in str(found["NVIDIA cards"]["advice"])
    assert found["CUDA plug-in"]["value"] == (plugin or "none")
    _, found = report(capsys, "--device", "cpu")  # then the card does not matter
    assert found["NVIDIA cards"]["advice"] is None


def test_a_broken_table_is_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmjax.kernels.cuda.tuned.FOLDER", tmp_path)
    (tmp_path / "a-card-of-the-doctor-s.json").write_text("{")
    finding = _block_sizes("a card of the doctor's")
    assert "a-card-of-the-doctor-s.json: Expecting" in finding.value
    assert "benchmarks.tune_gpu" in str(finding.advice)


def test_people_read_a_table(capsys: pytest.CaptureFixture[str]):
    main(["doctor", "--cpu"])
    assert "kernels" in capsys.readouterr().out


def test_what_a_report_of_a_bug_says(capsys: pytest.CaptureFixture[str]):
    # Advice does not fail it.
    assert main(["collect-env", "--json", "--cpu", "--compilation-cache-dir", "off"]) == 0
    found = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert {"versions", "python", "environment", "devices", "cores", "kernels"} <= found
    variables = {"XLA_FLAGS": "--a", "JAX_PLATFORMS": "cpu", "JAX_API_KEY": "x", "HOME": "/h", "LD_LIBRARY_PATH": "/l"}
    assert _environment(variables).value == "JAX_PLATFORMS=cpu LD_LIBRARY_PATH=/l XLA_FLAGS=--a"
