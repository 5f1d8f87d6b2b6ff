"""A PJRT plug-in for a device that is not at hand: XLA's CPU compiler under another name, from a wheel
(of ``llmjax[test]`` on x86-64 Linux). A process has it from its start, so that tests with it start processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_suffix(".c")
WHEEL = "lammps_jax_pjrt_cpu"
LIBRARY = "pjrt_c_api_cpu_plugin.so"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

_wheel = importlib.util.find_spec(WHEEL)
needs_stand_in = pytest.mark.skipif(
    _wheel is None or COMPILER is None, reason="needs the stand-in plug-in and a C compiler"
)


def library() -> Path:
    """The plug-in as it comes: a client that calls its devices cpu, under whatever name it is registered."""
    assert _wheel is not None and _wheel.origin is not None
    return Path(_wheel.origin).parent / LIBRARY


def build(folder: Path) -> Path:
    """The plug-in under the name gcu, as its client and its devices say too."""
    made = folder / "libgcu.so"
    define = f'-DPLUGIN="{library()}"'
    command = [COMPILER, "-shared", "-fPIC", "-O1", define, str(SOURCE), "-o", str(made), "-ldl"]
    subprocess.run(command, check=True, timeout=120)  # type: ignore[arg-type]
    return made


def registered(folder: Path, library: Path, *, name: str = "gcu", devices: int = 4) -> dict[str, str]:
    """An environment in which JAX finds a plug-in.

    Args:
        folder: for the file that says how its client is opened.
        name: the name that it is registered under.
        devices: how many devices it has.
    """
    options = folder / f"{name}.json"
    options.write_text(json.dumps({"library_path": str(library), "create_options": {"cpu_device_count": devices}}))
    # Its XLA is another than jaxlib's, and a process ends at once if it does not know a flag.
    kept = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return {**kept, "PJRT_NAMES_AND_LIBRARY_PATHS": f"{name}:{options}"}


def run(module: str, *arguments: Any, environment: dict[str, str], timeout: float = 550) -> Any:
    """What `output_of` finds of arguments that the module reads as JSON."""
    return output_of(module, *map(json.dumps, arguments), environment=environment, timeout=timeout)


def output_of(module: str, *arguments: str, environment: dict[str, str], timeout: float = 550) -> Any:
    """What a module of the tests prints as JSON, in a process with a plug-in.

    Args:
        timeout: seconds.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
