"""Finding devices: what people read when there is none, and what the memory pool of a card is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from llmjax import platforms
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.platforms import nvidia_cards, select_platform


@pytest.fixture
def no_platforms_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(
    ("plugin", "cards", "message"),
    [
        (None, None, "JAX has no plug-in for NVIDIA GPUs; install llmjax with it, pip install 'llmjax[cuda]'"),
        ("plug-in 1.2", None, "plug-in 1.2 finds no driver, and nvidia-smi does not run; see docs/cuda.md"),
        ("plug-in 1.2", "H100, 580.1, 81559 MiB", "though nvidia-smi lists H100, 580.1, 81559 MiB: "),
    ],
)
def test_cuda_that_is_not_there(
    plugin: str | None,
    cards: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    no_platforms_named: None,
) -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a card")
    monkeypatch.setattr(platforms, "cuda_plugin", lambda: plugin)
    monkeypatch.setattr(platforms, "nvidia_cards", lambda: cards)
    monkeypatch.setattr(platforms, "_size_pool", lambda config: None)
    with pytest.raises(ConfigError) as caught:
        select_platform(EngineConfig(device="cuda"))
    assert str(caught.value).startswith("device 'cuda' is not available (there is: cpu)")
    assert message in str(caught.value)


def test_a_variable_that_leaves_cuda_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "cuda_plugin", lambda: "plug-in 1.2")
    monkeypatch.setattr(platforms, "_size_pool", lambda config: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ConfigError, match="JAX_PLATFORMS=cpu leaves it out"):
        select_platform(EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            "echo 'NVIDIA H100, 580.65.06, 81559 MiB'; echo 'NVIDIA L4, 580.65.06, 23034 MiB'",
            "NVIDIA H100, 580.65.06, 81559 MiB; NVIDIA L4, 580.65.06, 23034 MiB",
        ),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None),
        ("true", None),
    ],
)
def test_what_nvidia_smi_says(script: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvidia_cards() == found


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_cards() is None
    with pytest.raises(FileNotFoundError):
        subprocess.run(["nvidia-smi"], check=True)


@pytest.fixture
def pool_options() -> Iterator[None]:
    before = jax.config.jax_pjrt_client_create_options
    yield
    jax.config.update("jax_pjrt_client_create_options", before)


def test_the_pool_of_a_card_is_the_share_that_is_asked_for(pool_options: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "cuda_plugin", lambda: "plug-in 1.2")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    select_platform(EngineConfig(device="cpu", gpu_memory_utilization=0.7))
    assert jax.config.jax_pjrt_client_create_options is None
    select_platform(EngineConfig(gpu_memory_utilization=0.7))
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.7}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    select_platform(EngineConfig(gpu_memory_utilization=0.6))
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.7}  # left to the variable


@pytest.mark.parametrize(("platform", "available"), [("gpu", 60), ("gcu", 30)])
def test_available_memory(platform: str, available: int) -> None:
    """A CUDA pool is the share already; other devices say all they have."""
    stats = {"bytes_limit": 100, "bytes_in_use": 40}
    device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    assert replace(select_platform(EngineConfig()), device=device).available_memory(0.7) == available
    silent = SimpleNamespace(platform=platform, memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory it has; set kv_cache_memory_bytes"):
        replace(select_platform(EngineConfig()), device=silent).available_memory(0.7)
