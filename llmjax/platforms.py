"""PJRT devices: which one to use, what it is good at, how much memory it has."""

from __future__ import annotations

import logging
import os
import platform as host
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from kernels.qtensor import CPU_TILE, CUDA_TILE
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import bind_process, check_threads
from llmjax.errors import ConfigError

logger = logging.getLogger(__name__)

CACHE_DIR = Path.home() / ".cache" / "llmjax"


@dataclass(frozen=True)
class Platform:
    """The device that runs the model, and the types it runs it in."""

    device: jax.Device
    dtype: jnp.dtype  # weights and KV
    activation_dtype: jnp.dtype  # between layers

    @property
    def is_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.device.platform == "gpu"

    def kv_dtype(self, name: str) -> jnp.dtype:
        """The type that a ``kv_cache_dtype`` names."""
        if name == "auto":
            return self.dtype
        return jnp.dtype(
            {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name)
        )

    @property
    def weight_tile(self) -> int:
        """Rows of quantised matrices to interleave, as the device's kernels read them."""
        return {"cpu": CPU_TILE, "gpu": CUDA_TILE}.get(self.device.platform, 1)

    @property
    def quantized_activations(self) -> str:
        """What products with quantised matrices round activations to unless the configuration says (`QTensor`)."""
        return "int8" if self.is_cpu else "float"

    def free_memory(self) -> int:
        """Bytes that are free on the device (on a CPU: in the machine)."""
        if self.is_cpu:
            return _free_host_memory()
        stats = self.device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            raise ConfigError(f"{self.device} does not say how much memory it has; set kv_cache_memory_bytes")
        return stats["bytes_limit"] - stats["bytes_in_use"]


def select_platform(config: EngineConfig) -> Platform:
    """Finds the device that the configuration asks for; ties the process to cores and memory first.

    Raises:
        ConfigError: no such platform, device, core or NUMA node.
    """
    bind_process(config)
    name = {"auto": None, "cuda": "gpu"}.get(config.device, config.device)
    try:
        devices = jax.devices(name) if name else jax.devices()
    except RuntimeError as error:
        available = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ConfigError(f"device {config.device!r} is not available (there is: {available}): {error}") from error
    index = 0
    if config.device_ids:
        if "," in config.device_ids.strip(","):
            raise ConfigError(f"device_ids {config.device_ids!r}: more than one device is not supported yet")
        number = config.device_ids.strip(",").strip()
        if not number.isdecimal():
            raise ConfigError(f"device_ids must be a device's number, not {config.device_ids!r}")
        index = int(number)
        if index >= len(devices):
            raise ConfigError(f"device_ids names device {index}; there are {len(devices)}")
    device = devices[index]
    cpu = device.platform == "cpu"
    if cpu:
        check_threads(config)
    if config.dtype == "auto":
        dtype = jnp.dtype(jnp.bfloat16 if not cpu or cpu_is_fast_at_bfloat16() else jnp.float32)
    else:
        dtype = jnp.dtype(config.dtype)
    # Small operations on a CPU are faster in f32 and cost no bandwidth there, so only the weights are narrow.
    return Platform(device=device, dtype=dtype, activation_dtype=jnp.dtype(jnp.float32) if cpu else dtype)


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs in ``directory`` (None: the user's cache; "off": nowhere)."""
    if directory == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    path = Path(directory) if directory else CACHE_DIR / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cpu_is_fast_at_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AMX or AVX-512 BF16)."""
    if host.system() != "Linux" or not Path("/proc/cpuinfo").exists():
        return False
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return not {"amx_bf16", "avx512_bf16"}.isdisjoint(line.split())
    return False


def _free_host_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
