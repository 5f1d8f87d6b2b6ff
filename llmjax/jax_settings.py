"""JAX's settings of the whole process, each with its reason. Most must be set before JAX opens its devices."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # whether the backends are open is said nowhere else

from llmjax.errors import ConfigError

logger = logging.getLogger(__name__)

CACHE_DIR = Path.home() / ".cache" / "llmjax"
POOL_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
POOL_SHARE = 0.75  # of a card, where nothing is said to JAX
MOST_CPU_DEVICES = 64
# Settings that say where programs are kept, what is logged and which devices are opened, not what programs are.
BESIDE = ("cache", "log", "explain", "default_device", "platforms", "visible", "traceback", "profiler", "debug_")


def divide_cpu(count: int) -> None:
    """Makes JAX divide the CPU into ``count`` devices, unless it has opened it or the user has chosen a number.

    Raises:
        ConfigError: a CPU cannot become that many devices.
    """
    if count == 1 or xla_bridge.backends_are_initialized() or jax.config.jax_num_cpu_devices != -1:
        return
    if count > MOST_CPU_DEVICES:
        raise ConfigError(f"tensor_parallel_size {count}: a CPU can be {MOST_CPU_DEVICES} devices at most")
    jax.config.update("jax_num_cpu_devices", count)


def size_pool(share: float) -> None:
    """Makes JAX's memory pool on an NVIDIA GPU a share of the card (JAX's own: 75 %).

    Has no effect where JAX has already opened the card, or the user has set its variables: the pool is then what
    `pool_share` says.
    """
    if xla_bridge.backends_are_initialized():
        return
    options = jax.config.jax_pjrt_client_create_options
    if isinstance(options, str) and options:
        logger.warning("gpu_memory_utilization has no effect: JAX_PJRT_CLIENT_CREATE_OPTIONS is set to %s", options)
    elif not any(os.environ.get(name) for name in POOL_VARIABLES):
        jax.config.update("jax_pjrt_client_create_options", {**(options or {}), "memory_fraction": share})


def pool_share() -> float | None:
    """The share of a card that JAX's pool there was opened with; None: the user's own variables say."""
    options = jax.config.jax_pjrt_client_create_options
    if (isinstance(options, str) and options) or any(os.environ.get(name) for name in POOL_VARIABLES):
        return None
    share: float = (options or {}).get("memory_fraction", POOL_SHARE)
    return share


def show_cards(numbers: Iterable[int]) -> None:
    """Hides other cards: an engine takes memory of every one that it sees."""
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, numbers)))


def outlive_ranks() -> None:
    """Lets this process go on when another rank ends: otherwise JAX aborts it before it can say so."""
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM and says nothing


def use_device(device: jax.Device) -> None:
    """Computes on a device what is not said to be computed elsewhere."""
    jax.config.update("jax_default_device", device)


def of_programs() -> dict[str, Any]:
    """The settings that decide programs, by name."""
    # As attributes where there are such: those say what holds in this thread.
    known = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    return {name: value for name, value in known.items() if not any(part in name for part in BESIDE)}


def compile_as(settings: Mapping[str, Any]) -> None:
    """Has this process compile for a CPU as the one with these settings `of_programs` does, and open nothing else."""
    here = of_programs()
    for name, value in settings.items():
        if here.get(name, value) != value:
            jax.config.update(name, value)
    jax.config.update("jax_platforms", "cpu")


def use_compilation_cache(directory: str | None) -> Path | None:
    """Keeps compiled programs in ``directory`` (None: the user's cache; "off": nowhere).

    Returns:
        Where they are looked for; None: nowhere.
    """
    path = None if directory == "off" else Path(directory) if directory else CACHE_DIR / "xla"
    if path is not None and (why := _cannot_write(path)):
        if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
            logger.warning("%s: compiled programs are read, but new ones are not kept: %s", path, why)
            warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")
        else:
            logger.warning("%s: compiled programs are not kept, so every start compiles them again: %s", path, why)
            path = None
    jax.config.update("jax_enable_compilation_cache", path is not None)
    if path is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be made there; None: it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
