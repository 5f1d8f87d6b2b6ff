"""Finding devices: what people read when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from llmjax import jax_settings, platforms
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.library import Library
from llmjax.kernels.devices import platform_of
from llmjax.kernels.qtensor import INT8_DECODES, INT8_VECTORS
from llmjax.platforms import devices_of, nvidia_cards, select_platform


@pytest.fixture
def no_platforms_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(
    ("plugin", "cards", "message"),
    [
        (None, None, "JAX has no plug-in for NVIDIA GPUs; pip install 'jax[cuda13]' (drivers older than 580"),
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
    monkeypatch.setattr(jax_settings, "size_pool", lambda share: None)
    with pytest.raises(ConfigError) as caught:
        select_platform(EngineConfig(device="cuda"))
    assert str(caught.value).startswith("device 'cuda' is not available (there is: cpu)")
    assert message in str(caught.value)


def test_a_variable_that_leaves_cuda_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "cuda_plugin", lambda: "plug-in 1.2")
    monkeypatch.setattr(jax_settings, "size_pool", lambda share: None)
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


@pytest.mark.parametrize("variable", ["gpu", "cuda"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_variable_that_names_a_card_that_is_not_there(device: str, variable: str) -> None:
    """JAX then ends in a bare assertion, or an error of its own."""
    script = f"""
from llmjax import jax_settings, platforms
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
platforms.nvidia_cards = lambda: None
try:
    platforms.select_platform(EngineConfig(device={device!r}))
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "JAX_PLATFORMS": variable, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if not done.stdout and not done.returncode:
        pytest.skip("there is a card")
    assert done.stdout.startswith(f"device '{device}' is not available (there is: none): "), done.stderr
    assert "leaves it out" not in done.stdout


@pytest.mark.parametrize(("platform", "available"), [("cuda", 60), ("gcu", 30)])
def test_available_memory(platform: str, available: int) -> None:
    """A CUDA pool is the share already; other devices say all they have."""
    stats = {"bytes_limit": 100, "bytes_in_use": 40}
    device = SimpleNamespace(memory_stats=lambda: stats)
    assert replace(select_platform(EngineConfig()), device=device, name=platform).available_memory(0.7) == available
    silent = SimpleNamespace(memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory it has; set kv_cache_memory_bytes"):
        replace(select_platform(EngineConfig()), device=silent, name=platform).available_memory(0.7)


def test_a_device_is_of_the_platform_that_its_client_is_registered_under(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = object(), object()
    monkeypatch.setattr(platforms.xla_bridge, "backends", lambda: {"cpu": own, "gcu": other})
    assert platform_of(SimpleNamespace(client=own, platform="cpu")) == "cpu"
    assert platform_of(SimpleNamespace(client=other, platform="cpu")) == "gcu"  # whatever it calls itself
    described = SimpleNamespace(client=None, platform="gpu")
    assert platform_of(described) == "cuda"


def test_a_plugin_is_found_whatever_the_case_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(platforms.xla_bridge, "backends", lambda: {"cpu": None, "METAL": None})
    monkeypatch.setattr(jax, "devices", lambda name: asked.append(name) or ["a device"])
    assert devices_of("metal") == ["a device"] and asked == ["METAL"]


def test_a_plugin_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"'metal' is not available .*docs/plugins.md says how plug-ins are found"):
        devices_of("metal")


@pytest.mark.parametrize(("name", "own", "tile"), [("cpu", True, 16), ("cuda", True, 32), ("gcu", False, 1)])
def test_what_a_plugin_does_not_get(name: str, own: bool, tile: int) -> None:
    platform = replace(select_platform(EngineConfig(device="cpu")), name=name)
    assert (platform.has_own_kernels, platform.weight_tile) == (own, tile)
    assert (platform.is_cpu, platform.is_cuda) == (name == "cpu", name == "cuda")


@pytest.mark.parametrize(
    ("flags", "isas", "forced", "dtype"),
    [
        ("avx2 avx512_bf16", "generic avx2 avx512 avx512vnni avx512bf16", None, "bfloat16"),
        ("avx2 avx512_bf16", "generic avx2 avx512 avx512vnni avx512bf16", "avx2", "bfloat16"),
        ("avx2 avx512_bf16", "generic avx2 avx512 avx512vnni avx512bf16", "generic", "float32"),
        ("avx2", "generic avx2", None, "bfloat16"),
        ("sse4_2", "generic", None, "float32"),
        ("avx2 avx512_bf16", None, None, "bfloat16"),
        ("avx2 amx_bf16", None, None, "bfloat16"),
        ("avx2 avx512f", None, None, "float32"),
    ],
)
def test_the_type_of_weights_follows_the_kernels_or_without_them_the_cpu(
    flags: str, isas: str | None, forced: str | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse2\n")
    kernels = None if isas is None else Library(isas=tuple(isas.split()), usable=tuple(isas.split()), forced=forced)
    monkeypatch.setattr(platforms, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platforms, "library", lambda: kernels)
    monkeypatch.setattr(platforms.host, "system", lambda: "Linux")
    assert select_platform(EngineConfig(device="cpu")).dtype == dtype


def test_8_bit_floats_are_for_cards_that_multiply_them() -> None:
    config = EngineConfig(activations="fp8")
    with pytest.raises(ConfigError, match=r"activations fp8 needs an NVIDIA GPU of compute capability 8\.9 or newer"):
        select_platform(replace(config, device="cpu"))
    for capability, known in (("8.0", False), ("8.9", True), ("9.0", True), ("12.0", True)):
        card = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a card")
        if known:
            assert platforms._quantized_activations(config, card, cpu=False) == "fp8"
            continue
        with pytest.raises(ConfigError, match=r"the device is a card, of 8\.0"):
            platforms._quantized_activations(config, card, cpu=False)


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16"])
@pytest.mark.parametrize(
    ("dtype", "activations", "cache", "rounded"),
    [
        ("auto", "auto", "bfloat16", "int8"),
        ("bfloat16", "auto", "bfloat16", "int8"),
        ("float16", "float", "float16", "float"),
        ("float32", "auto", "float32", "float"),
        ("float32", "int8", "float32", "int8"),
    ],
)
def test_types_of_a_cpu_follow_from_what_is_asked_for(
    flags: str,
    dtype: str,
    activations: str,
    cache: str,
    rounded: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: fpu {flags} sse2\n")
    monkeypatch.setattr(platforms, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platforms, "library", lambda: SimpleNamespace(best="avx2"))
    found = select_platform(EngineConfig(device="cpu", dtype=dtype, activations=activations))
    assert (found.kv_dtype("auto"), found.quantized_activations) == (cache, rounded)
    assert found.kv_dtype("fp8") == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("dtype", "activations", "invariant", "rounded"),
    [
        ("auto", "auto", False, INT8_DECODES),
        ("auto", "auto", True, INT8_VECTORS),
        ("auto", "int8", False, "int8"),
        ("auto", "int8", True, INT8_VECTORS),
        ("auto", "float", True, "float"),
        ("float32", "auto", True, "float"),
    ],
)
def test_tiles_round_prompts_in_another_way_unless_rows_must_not_depend_on_others(
    dtype: str, activations: str, invariant: bool, rounded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "library", lambda: SimpleNamespace(best="amx"))
    config = EngineConfig(device="cpu", dtype=dtype, activations=activations, batch_invariant=invariant)
    assert select_platform(config).quantized_activations == rounded


def test_batch_invariant_is_refused_where_nothing_makes_it_true() -> None:
    card = SimpleNamespace(platform="gpu", device_kind="a card")
    with pytest.raises(ConfigError, match="batch_invariant is for CPUs so far"):
        platforms._quantized_activations(EngineConfig(batch_invariant=True), cast(Any, card), cpu=False)


def test_an_engine_takes_no_more_than_its_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "free_memory", lambda: 100)
    monkeypatch.setattr(platforms, "own_memory", lambda: 30)
    whole = select_platform(EngineConfig(device="cpu"))
    shares = [replace(whole, host_memory=bytes) for bytes in (None, 50, 500, 10)]
    assert [share.free_memory() for share in shares] == [100, 20, 100, 0]
