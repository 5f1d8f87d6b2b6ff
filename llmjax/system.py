"""What llmjax runs on, and in which processes."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from llmjax.errors import ConfigError

CPUINFO = Path("/proc/cpuinfo")
GENERATIONS = {  # of servers' processors, by x86's family and model
    ("6", "106"): "Ice Lake",
    ("6", "143"): "Sapphire Rapids",
    ("6", "173"): "Granite Rapids",
    ("6", "207"): "Emerald Rapids",
    ("25", "1"): "Zen 3",
    ("25", "17"): "Zen 4",
    ("25", "160"): "Zen 4c",
    ("26", "2"): "Zen 5",
}


def check_system() -> None:
    """Raises ConfigError, which says what to do, where llmjax cannot run."""
    if sys.platform == "win32":
        raise ConfigError("llmjax does not run on Windows itself: use WSL (https://aka.ms/wsl)")


def python_path() -> str:
    """``PYTHONPATH`` for a process that is to import what this one imports, and llmjax from the same place."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *(os.path.abspath(entry) for entry in sys.path)])


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name and, where Linux says x86's family and model, its generation: clouds give many one name."""
    found: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in found or "model" not in found:
        return name
    family, model = found["cpu family"], found["model"]
    return f"{name} ({GENERATIONS.get((family, model), f'family {family}, model {model}')})"
