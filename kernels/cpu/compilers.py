"""How a machine gets a C++ compiler. Read before the package is installed, so that it imports nothing of it."""

from __future__ import annotations

import platform
import sys
from types import MappingProxyType

COMMANDS = MappingProxyType(  # by what systems call themselves, or say that they are like
    {
        "debian": "sudo apt install g++",
        "ubuntu": "sudo apt install g++",
        "fedora": "sudo dnf install gcc-c++",
        "rhel": "sudo dnf install gcc-c++",
        "suse": "sudo zypper install gcc-c++",
        "arch": "sudo pacman -S gcc",
        "alpine": "sudo apk add g++",
        "darwin": "xcode-select --install",
        "win32": "wsl --install, and in its terminal sudo apt install g++ make python3-venv",
    }
)


def install_command() -> str:
    """The command that installs a C++ compiler on this system."""
    command = next((COMMANDS[name] for name in _names() if name in COMMANDS), None)
    return command or "install g++ or clang++ as your system does"


def _names() -> list[str]:
    """What this system is, the most special first."""
    if sys.platform != "linux":
        return [sys.platform]
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return []
    return [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
