"""Engines and devices of one machine: the arrangements, the report about them, and all of it on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling_devices import (
    DeviceOptions,
    Figure,
    data_parallel_words,
    devices,
    engine_config,
    engines,
    tensor_parallel_words,
)
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError


def test_two_engines_have_the_threads_and_streams_of_one() -> None:
    config = engine_config(EngineConfig(model="m", threads=5), DeviceOptions(streams=7))
    thread, process, several, half = engines(config).values()
    assert (half.threads, half.data_parallel_size, half.max_num_seqs) == (2, 1, 4)
    assert (thread.engine_process, process.engine_process) == ("thread", "process")
    assert (process.threads, several.threads) == (4, 4)  # of all engines
    assert (process.data_parallel_size, several.data_parallel_size) == (1, 2)
    assert (process.max_num_seqs, several.max_num_seqs) == (7, 4)
    assert not config.enable_prefix_caching
    with pytest.raises(ConfigError, match="2 engines need as many threads; there is 1"):
        engines(config.replace(threads=1))


def test_devices_are_in_one_engine() -> None:
    found = devices(EngineConfig(model="m"), [1, 3])
    assert [(name, one.tensor_parallel_size, one.data_parallel_size) for name, one in found.items()] == [
        ("1 device", 1, 1),
        ("3 devices", 3, 1),
    ]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="others are compared with 1"):
        DeviceOptions(devices=(2, 3))
    with pytest.raises(ConfigError, match="--streams must be at least 2"):
        DeviceOptions(streams=1)
    assert DeviceOptions(devices=(0,)).counts == []


def test_ratios_are_of_the_fastest_rounds() -> None:
    one = Figure(name="1 engine", rates=[90, 100], delay_ms=0.5)
    two = Figure(name="2 engines", rates=[97, 80], delay_ms=0.62)
    half = Figure(name="one of 2 engines", rates=[50, 30], delay_ms=0.5)
    said = data_parallel_words([Figure(name="t", rates=[1], delay_ms=0.4), one, two, half])
    assert said == [
        "2 engines bring 0.97 of one engine in a process (≥ 0.95), and 0.97 of 2 × one of them by itself",
        "a token takes +0.22 ms more to its user than from an engine on a thread (≤ 0.3)",
    ]
    assert tensor_parallel_words([one, two, two], [1, 2, 5]) == [
        "2 engines decode with 0.97 of one device's speed (≥ 0.65)",
        "2 engines decode with 0.97 of one device's speed",
    ]


@pytest.mark.exhaustive
def test_a_tiny_model(tmp_path: Path, compile_cache_dir: str) -> None:
    """In a process of its own, for JAX is to have as many threads as are asked for."""
    flags = "--shape tiny --streams 2 --prompt 8 --new-tokens 8 --rounds 1 --devices 1,2 --threads 2 --dtype float32"
    engine = "--max-num-batched-tokens 16 --kv-cache-memory-bytes 1MiB"
    files = ["--work-dir", str(tmp_path), "--output-json", str(tmp_path / "s.json")]
    command = [sys.executable, "-m", "benchmarks.scaling_devices", *flags.split(), *engine.split(), *files]
    done = subprocess.run(
        [*command, "--compilation-cache-dir", compile_cache_dir], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "2 engines × 1 thread" in done.stdout and "2 devices decode with" in done.stdout
    assert "a follower knows of a step of 2 rows after" in done.stdout and "70B (39.7 GB):" in done.stdout
    found = json.loads((tmp_path / "s.json").read_text())
    assert [len(found[part]) for part in ("data_parallel", "tensor_parallel")] == [4, 2]
    assert all(figure["rates"][0] > 0 for part in ("data_parallel", "tensor_parallel") for figure in found[part])
    assert all(figure["delay_ms"] > 0 for figure in found["data_parallel"])
