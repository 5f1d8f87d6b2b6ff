"""Adapters of models that several devices divide: each key of adapters, and experts by parts, as a whole, and in the
host's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 2e-4
CASES: dict[str, dict[str, Any]] = {
    "matrices, gains, embeddings and a head": {"names": ["plain", "dora", "embeddings", "saved"], "devices": 2},
    "three devices and biases": {"names": ["biases"], "devices": 3},
    "parts of experts": {"names": ["qwen3-moe"], "devices": 2},
    "whole experts": {"names": ["qwen3-moe"], "devices": 2, "settings": {"enable_expert_parallel": True}},
    "experts in the host's memory": {
        "names": ["qwen3-moe"],
        "devices": 2,
        "settings": {"num_experts_offload_per_rank": 5},
    },
    "latent attention": {"names": ["deepseek-latent"], "devices": 2},
    "experts whose gates and ups take turns": {"names": ["gpt-oss"], "devices": 2},
    "recurrent layers": {"names": ["qwen3-next"], "devices": 2},
}


@pytest.mark.slow
def test_devices_that_divide_a_model_divide_its_adapters() -> None:
    command = [sys.executable, "-m", "tests.engine.adapters.on_devices", *map(json.dumps, CASES.values())]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(zip(CASES, json.loads(done.stdout), strict=True))
    assert {case: far for case, far in found.items() if far > TOLERANCE} == {}
