"""PJRT devices: which one to use, what it is good at, how much memory it has."""

from __future__ import annotations

import logging
import os
import platform as host
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge  # its backends have their names nowhere else
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from llmjax import jax_settings
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import bind_process, check_threads
from llmjax.errors import ConfigError
from llmjax.host_memory import free_memory, own_memory
from llmjax.kernels.cpu.library import library
from llmjax.kernels.devices import CPU, CUDA, OWN_KERNELS, platform_of, take_donations
from llmjax.kernels.qtensor import CPU_TILE, CUDA_TILE, INT8_DECODES, INT8_VECTORS
from llmjax.kernels.sharding import WHOLE, Sharding
from llmjax.machine_share import WHOLE_MACHINE, MachineShare
from llmjax.step_sizes import LEAST, StepSizes, step_sizes

logger = logging.getLogger(__name__)

CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
CUDA_NAMES = ("cuda", "gpu")
CPUINFO = Path("/proc/cpuinfo")
FLOAT8_CAPABILITY = (8, 9)  # from which on NVIDIA's cards multiply 8-bit floats


@dataclass(frozen=True)
class Platform:
    """The devices that run the model, and the types they run it in."""

    device: jax.Device  # the first of this process
    name: str  # that its client is registered under: cpu, cuda, or a plug-in's
    dtype: jnp.dtype  # of weights
    activation_dtype: jnp.dtype  # between layers
    cache_dtype: jnp.dtype  # of keys and values, unless the configuration names one
    quantized_activations: str  # of products with quantized matrices that do not say, as `QTensor` has them
    mesh: tuple[jax.Device, ...] = ()  # that divide the model, those of other processes too; (): it is the one above
    host_memory: int | None = None  # bytes of the machine's memory that this process may take; None: what is free
    sums_in_memory: bool = False  # the devices add up in memory that their processes share

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All that run the model, in the order of their parts of it."""
        return self.mesh or (self.device,)

    @property
    def own_devices(self) -> tuple[jax.Device, ...]:
        """The mesh's devices that belong to this process."""
        devices = tuple(device for device in self.mesh if device.process_index == self.device.process_index)
        return devices or (self.device,)

    @property
    def sharding(self) -> Sharding | None:
        """How arrays lie on several devices; None: there is one."""
        if not self.mesh:
            return None
        mesh = Mesh(np.array(self.devices), ("tensor",), axis_types=(AxisType.Auto,))
        return Sharding(mesh, in_memory=self.sums_in_memory)

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """Where an array lies that every device has all of."""
        return self.everywhere_in(None)

    def everywhere_in(self, memory: str | None) -> jax.sharding.Sharding:
        """`everywhere`, in a kind of memory as JAX names it; None: the devices' own."""
        if (sharding := self.sharding) is not None:
            return sharding.placed(WHOLE).with_memory_kind(memory)
        return SingleDeviceSharding(self.device, memory_kind=memory)

    @property
    def is_cpu(self) -> bool:
        """Whether it is jaxlib's own CPU."""
        return self.name == CPU

    @property
    def is_cuda(self) -> bool:
        return self.name == CUDA

    @property
    def has_own_kernels(self) -> bool:
        """Whether kernels are made for it; else everything is operations of XLA's, which any PJRT device can run."""
        return self.name in OWN_KERNELS

    def kv_dtype(self, name: str) -> jnp.dtype:
        """The type that a ``kv_cache_dtype`` names."""
        if name == "auto":
            return self.cache_dtype
        return jnp.dtype(
            {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name)
        )

    @property
    def weight_tile(self) -> int:
        """Rows of quantized matrices to interleave, as the device's kernels read them."""
        return {CPU: CPU_TILE, CUDA: CUDA_TILE}.get(self.name, 1)

    @property
    def step_sizes(self) -> StepSizes:
        """How much a step holds where no setting says: on NVIDIA GPUs by the usable memory of the smallest."""
        if not self.is_cuda:
            return LEAST
        # The limit is that of JAX's pool, so a share of the card already; without a pool there is none.
        return step_sizes(min((device.memory_stats() or {}).get("bytes_limit", 0) for device in self.own_devices))

    def free_memory(self) -> int:
        """Bytes that are free on each device (on a CPU: its part of what is free in the machine)."""
        if self.is_cpu:
            free = free_memory()
            if self.host_memory is not None:
                free = max(0, min(free, self.host_memory - own_memory()))
            return free // len(self.own_devices)
        return self.available_memory(1.0)

    def available_memory(self, utilization: float) -> int:
        """Bytes that may still be taken of each accelerator if all in all that share of its memory may be used."""
        # On an NVIDIA GPU the limit is that of JAX's pool, which is the share already (`jax_settings.size_pool`).
        share = 1.0 if self.is_cuda else utilization
        all_stats = (_memory_stats(device) for device in self.own_devices)
        return min(int(stats["bytes_limit"] * share) - stats["bytes_in_use"] for stats in all_stats)


def _memory_stats(device: jax.Device) -> dict[str, int]:
    stats: dict[str, int] = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not say how much memory it has; set kv_cache_memory_bytes")
    return stats


def select_platform(
    config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, meet: Callable[[], None] = lambda: None
) -> Platform:
    """Finds the devices that the configuration asks for; ties the process to cores and memory first.

    Args:
        share: this engine's share of the machine, where several divide it.
        meet: makes JAX see the devices of the other processes that run the model.

    Raises:
        ConfigError: no such platform, device, core or NUMA node.
    """
    alone = config.nnodes == 1
    meshed = not alone and not config.is_staged  # with devices of other processes
    numbers = share.part(config.device_numbers) if alone else config.device_numbers
    others_are_hidden = not alone or not share.is_whole
    if config.device in ("auto", CPU):
        jax_settings.divide_cpu(len(numbers))
    if config.device in ("auto", *CUDA_NAMES) and cuda_plugin() is not None:
        jax_settings.size_pool(config.gpu_memory_utilization)
    if others_are_hidden:
        jax_settings.show_cards(numbers)
    meet()
    binding, host_memory = bind_process(config, share), share.host_memory  # may open the backends
    if binding.nodes:
        local = free_memory(nodes=binding.nodes) // binding.sharers
        host_memory = local if host_memory is None else min(local, host_memory)
    seen = devices_of(config.device)
    devices = [device for device in seen if device.process_index == jax.process_index()] if meshed else seen
    name = platform_of(devices[0])
    take_donations(name)
    if others_are_hidden and name in OWN_KERNELS:
        numbers = range(len(numbers))  # it sees no others
    if (last := max(numbers)) >= len(devices):
        wanted = f"device_ids names device {last}" if config.device_ids else f"tensor_parallel_size is {len(numbers)}"
        why = "; JAX has already opened the CPU as that many in this process" if name == CPU else ""
        raise ConfigError(f"{wanted}; there {'are' if len(devices) > 1 else 'is'} {len(devices)}{why}")
    device = devices[numbers[0]]
    mesh = seen if meshed else [devices[number] for number in numbers]
    if meshed and len(mesh) != config.nnodes * len(numbers):
        raise ConfigError(
            f"the {config.nnodes} processes have {len(mesh)} devices, and tensor_parallel_size is "
            f"{config.tensor_parallel_size}"
        )
    if name == CUDA and (pool := jax_settings.pool_share()) not in (None, config.gpu_memory_utilization):
        logger.warning(
            "gpu_memory_utilization %g has no effect: JAX has already opened the card in this process, with a pool of "
            "%g of its memory",
            config.gpu_memory_utilization,
            pool,
        )
    cpu = name == CPU
    if cpu:
        check_threads(config, share, devices=len(devices))
    if config.dtype == "auto":
        dtype = jnp.dtype(jnp.bfloat16 if not cpu or cpu_is_fast_at_bfloat16() else jnp.float32)
    else:
        dtype = jnp.dtype(config.dtype)
    return Platform(
        device=device,
        name=name,
        mesh=tuple(mesh) if len(mesh) > 1 else (),
        dtype=dtype,
        # Small operations on a CPU are faster in f32 and cost no bandwidth there, so only what is kept is narrow.
        activation_dtype=jnp.dtype(jnp.float32) if cpu else dtype,
        cache_dtype=jnp.dtype(jnp.bfloat16) if config.dtype == "auto" else dtype,
        quantized_activations=_quantized_activations(config, device, cpu=cpu),
        host_memory=host_memory,
    )


def devices_of(platform: str) -> list[jax.Device]:
    """All devices of a platform, those of other processes too.

    Args:
        platform: as ``--device`` names it.

    Raises:
        ConfigError: there are none.
    """
    try:
        devices: list[jax.Device] = jax.devices() if platform == "auto" else jax.devices(_registered(platform))
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS names what finds no device
        raise ConfigError(_not_there(platform, str(error))) from error
    return devices


def _registered(name: str) -> str:
    """A platform as JAX has it: plug-ins are found whatever the case of their names."""
    return next((known for known in xla_bridge.backends() if known.lower() == name.lower()), name)


def _quantized_activations(config: EngineConfig, device: jax.Device, *, cpu: bool) -> str:
    """The type of quantized layers' activations, see `QTensor`; with float32, results do not depend on the CPU.

    Raises:
        ConfigError: the device does not multiply what is asked for.
    """
    if config.activations == "fp8":
        capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
        if capability is None or tuple(map(int, capability.split("."))) < FLOAT8_CAPABILITY:
            what = f"{device.device_kind}, of {capability}" if capability else f"{device}"
            raise ConfigError(
                f"activations fp8 needs an NVIDIA GPU of compute capability 8.9 or newer; the device is {what}"
            )
    if config.batch_invariant and not cpu:
        raise ConfigError(f"batch_invariant is for CPUs so far; the device is {device}")
    native = library()
    tiles = native is not None and native.best == "amx"
    if config.batch_invariant and tiles and config.activations in ("auto", "int8") and config.dtype != "float32":
        return INT8_VECTORS
    if config.activations != "auto":
        return config.activations
    if not cpu or config.dtype == "float32":
        return "float"
    return INT8_DECODES if tiles else "int8"


def _not_there(name: str, error: str) -> str:
    try:
        there = ", ".join(sorted(xla_bridge.backends()))
    except (RuntimeError, AssertionError):  # that is what was wrong
        there = "none"
    wanted = os.environ.get("JAX_PLATFORMS", "")
    named = set(wanted.split(",")) & {*CUDA_NAMES}
    message = f"device {name!r} is not available (there is: {there})"
    why = error.splitlines()[0] if error else f"JAX finds no device of JAX_PLATFORMS={wanted}"
    if name not in CUDA_NAMES and not (name == "auto" and named):
        return f"{message}: {why}; docs/plugins.md says how plug-ins are found"
    if cuda_plugin() is None:
        advice = "pip install 'jax[cuda13]' (drivers older than 580: jax[cuda12])"
        return f"{message}: JAX has no plug-in for NVIDIA GPUs; {advice}"
    if wanted and not named:
        return f"{message}: JAX_PLATFORMS={wanted} leaves it out"
    driver = nvidia_cards()
    if driver is None:
        return f"{message}: {cuda_plugin()} finds no driver, and nvidia-smi does not run; see docs/cuda.md"
    return f"{message}, though nvidia-smi lists {driver}: {why}"


def nvidia_cards() -> str | None:
    """NVIDIA's driver and cards with their memory, as nvidia-smi says; None: there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return "; ".join(lines) if done.returncode == 0 and lines else None


def cuda_plugin() -> str | None:
    """Name and version of JAX's installed plug-in for NVIDIA GPUs."""
    for name in CUDA_PLUGINS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def cpu_is_fast_at_bfloat16() -> bool:
    """Whether products with bfloat16 weights take this CPU no longer than with float32 ones.

    The C++ kernels widen them as they read, which vectors of AVX2 and newer do for nothing; XLA needs hardware for it.
    """
    native = library()
    if native is not None:
        return native.best != "generic"
    if host.system() != "Linux" or not CPUINFO.exists():
        return False
    for line in CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            return not {"amx_bf16", "avx512_bf16"}.isdisjoint(line.split())
    return False
