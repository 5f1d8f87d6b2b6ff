"""Digests of everything that decides a compiled program: equal digests stand for equal programs."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import platform as host
import sys
import time
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np

from llmjax import jax_settings
from llmjax.kernels.cpu.cores import physical_cores, usable_cores
from llmjax.kernels.cpu.library import LIBRARY, library
from llmjax.kernels.devices import CPU, CUDA, platform_of

IMPORTED = time.time()
PACKAGE = Path(__file__).parents[2]
SUFFIXES = (".py", ".json", ".npz")  # suffixes of the package's files that may decide what is traced
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
KNOWN = ("llmjax", "builtins", *LIBRARIES)  # packages whose classes and functions the environment's digest stands for
VARIABLES = ("XLA_", "LLMJAX_", "TF_")  # beginnings of the names of environment variables that XLA and kernels read
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")


class SourcesChanged(Exception):
    """Files of the package are younger than this process, so that they may not be what it runs."""


def digest(*parts: Any) -> str:
    """A digest of plain values, and of containers and dataclasses of them.

    Args:
        parts: None, numbers, strings, bytes, enumerations, dtypes, types, functions of modules, NumPy arrays,
            ``jax.ShapeDtypeStruct``s, and tuples, lists, mappings, sets and dataclasses of these. Types and functions
            are those of KNOWN packages.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: a value of another type.
    """
    return hashlib.sha256(_Encoder().encoded(parts)).hexdigest()


def environment_digest(device: jax.Device) -> str:
    """A digest of everything beyond a program's own definition: the versions of what compiles it, the kernels that it
    calls, the machine and its settings."""
    native = library() if platform_of(device) == CPU else None
    settings = {name: repr(value) for name, value in jax_settings.of_programs().items()}
    return digest(
        None if native is None else _file_digest(LIBRARY),
        native and native.forced,
        {name: version(name) for name in LIBRARIES},
        sys.version,
        {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        settings,
        (device.platform, device.device_kind, device.client.platform_version, len(device.client.devices())),
        DRIVER.read_bytes() if platform_of(device) == CUDA and DRIVER.exists() else None,
        device.id if jax.process_count() == 1 else None,  # programs of several processes are of all devices
        (host.machine(), _cpu_features(), usable_cores()),
    )


def machine_digest() -> str:
    """A digest of what decides how long kernels of a CPU take: the processor, the cores that may be used, the compiled
    kernels, and JAX."""
    native = library()
    return digest(
        None if native is None else _file_digest(LIBRARY),
        native and native.forced,
        {name: version(name) for name in ("jax", "jaxlib")},
        (host.machine(), _cpu_features(), usable_cores(), physical_cores()),
    )


@functools.cache
def sources_digest(package: Path = PACKAGE) -> str:
    """A digest of all files that may decide what is traced, by their paths.

    Raises:
        SourcesChanged: they may not be those that run.
    """
    hasher = hashlib.sha256()
    for folder, folders, names in os.walk(package, followlinks=True):  # parts of a checkout are links
        folders.sort()
        for name in sorted(names):
            if name.endswith(SUFFIXES):
                path = Path(folder, name)
                with path.open("rb") as file:
                    if os.fstat(file.fileno()).st_mtime >= IMPORTED:
                        raise SourcesChanged(f"{path} has changed since this process began")
                    content = file.read()
                hasher.update(_Encoder().encoded((str(path.relative_to(package)), content)))
    return hasher.hexdigest()


@functools.cache
def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _cpu_features() -> str:
    """Names and instruction sets of the machine's cores, as Linux or else Python says."""
    if not CPUINFO.exists():
        return host.processor()
    telling = ("flags", "Features", "model name", "CPU part", "CPU variant")
    return "\n".join(sorted({line for line in CPUINFO.read_text().splitlines() if line.startswith(telling)}))


class _Encoder:
    """Bytes of values for one digest; what is found in many places, as the format of matrices, is encoded once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id; the value is kept, so that no other value gets its id

    def encoded(self, value: Any) -> bytes:
        """Bytes that no other value has: the kind, then each part with its length before it."""
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        kind, parts = self._parts(value)
        encoding = b"".join([kind.encode(), b"(", *[b"%d:%b" % (len(part), part) for part in parts], b")"])
        self._known[id(value)] = (value, encoding)
        return encoding

    def _parts(self, value: Any) -> tuple[str, list[bytes]]:
        match value:
            case None | bool() | int() | float() | complex() if not isinstance(value, enum.Enum):
                return type(value).__name__, [repr(value).encode()]
            case str() if not isinstance(value, enum.Enum):
                return "str", [value.encode("utf-8", "surrogatepass")]
            case bytes():
                return "bytes", [value]
            case enum.Enum():
                return _name(type(value)), [value.name.encode()]
            case np.dtype():
                return "dtype", [value.name.encode()]
            case np.generic():
                return value.dtype.name, [value.tobytes()]
            case np.ndarray():
                return "array", [self.encoded(value.shape), self.encoded(value.dtype), value.tobytes()]
            case jax.ShapeDtypeStruct():
                place = (value.shape, np.dtype(value.dtype), bool(value.weak_type), _sharding(value.sharding))
                return "shape", [self.encoded(part) for part in place]
            case jax.sharding.PartitionSpec():
                return "spec", [self.encoded(part) for part in value]
            case jax.sharding.Mesh():
                places = [self.encoded((device.platform, device.id)) for device in value.devices.ravel().tolist()]
                return "mesh", [self.encoded(tuple(value.shape.items())), *places]
            case type():
                return "type", [_name(value).encode()]
            case FunctionType() if value.__closure__ is None and "<" not in value.__qualname__:
                return "function", [_name(value).encode()]
            case tuple() | list():
                return _name(type(value)), [self.encoded(part) for part in value]
            case Mapping():
                items = ((self.encoded(key), self.encoded(part)) for key, part in value.items())
                return "mapping", [part for item in sorted(items) for part in item]
            case Set():
                return "set", sorted(self.encoded(part) for part in value)
        if is_dataclass(value):
            names = [field.name for field in fields(value)]
            return _name(type(value)), [self.encoded((name, getattr(value, name))) for name in names]
        raise TypeError(f"{type(value).__name__} has no signature: {value!r}")


def _name(value: type | FunctionType) -> str:
    package = value.__module__.partition(".")[0]
    if package not in KNOWN:
        raise TypeError(f"{value!r} has no signature: nothing says which version of {package} it is")
    return f"{value.__module__}.{value.__qualname__}"


def _sharding(sharding: Any) -> tuple[Any, ...]:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return device.platform, device.id, sharding.memory_kind
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh, sharding.spec, sharding.memory_kind
    return (repr(sharding),)
