"""Models that several processes divide give the tokens that one device gives; a rank is started as users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_model import Shape, write_random_model
from llmjax import LLM
from llmjax.engine.group import free_port
from llmjax.errors import ConfigError
from tests.engine.on_devices import OPTIONS

ROOT = Path(__file__).parents[2]
SECONDS = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, Shape(256, 384, 1, 8, 4, 515), max_position_embeddings=64)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    return generated(model, 1)


def generated(model: str, devices: int, **settings: Any) -> dict[str, Any]:
    """What ``on_devices`` finds, in a process of its own."""
    case = json.dumps({"model": model, "devices": [devices], "settings": {"quantization": "q80", **settings}})
    command = [sys.executable, "-m", "tests.engine.on_devices", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    ((found,),) = json.loads(done.stdout.splitlines()[-1])
    return dict(found)


@contextmanager
def rank(number: int, model: str, devices: int, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """``llmjax serve`` with a rank that does not serve."""
    command = [sys.executable, "-m", "serve", "--model", model, "--node-rank", str(number)]
    options = OPTIONS | {"quantization": "q80", "tensor_parallel_size": devices} | settings
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tokens"] == expected["tokens"]
    for values, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert [token for token, _ in values] == [token for token, _ in wanted]
        np.testing.assert_allclose([x for _, x in values], [x for _, x in wanted], atol=2e-3)
    assert found["page_mentions"] and not found["page_copies"]


def test_two_processes_of_two_devices(model: str, expected: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "nnodes": 2,
        "master_port": free_port("127.0.0.1"),
        "master_secret": "word",
        "distributed_timeout_seconds": 200,
    }
    with rank(1, model, 4, **settings) as other:
        check(generated(model, 4, **settings), expected)
        _, said = other.communicate(timeout=SECONDS)
        assert other.returncode == 0 and "rank 0 has ended" in said


@pytest.mark.slow
def test_a_process_for_each_of_three_devices(model: str, expected: dict[str, Any]) -> None:
    check(generated(model, 3, multi_process=True), expected)


def test_other_settings_are_one_line_on_every_rank(model: str) -> None:
    settings: dict[str, Any] = {"nnodes": 2, "master_port": free_port("127.0.0.1"), "distributed_timeout_seconds": 200}
    with rank(1, model, 2, **settings, max_logprobs=3) as other:
        with pytest.raises(ConfigError, match=r"^rank 1 \(127.0.0.1\) has max_logprobs 3, and rank 0 has 20: start"):
            LLM(model, **OPTIONS, quantization="q80", tensor_parallel_size=2, **settings)  # type: ignore[arg-type]
        _, said = other.communicate(timeout=SECONDS)
    assert other.returncode == 1
    assert said.splitlines()[-1].startswith("llmjax: error: rank 1 (127.0.0.1) has max_logprobs 3, and rank 0 has 20")


def test_requests_go_to_rank_0(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^node_rank 1: requests go to rank 0; start this one with llmjax serve$"):
        LLM(model, nnodes=2, node_rank=1, tensor_parallel_size=2)
