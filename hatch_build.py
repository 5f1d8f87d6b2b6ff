"""Compiles the C++ kernels when the package is built or installed; without a compiler the package goes without them."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# For builders of wheels: fail rather than go without the kernels, or without those of an instruction set.
REQUIRE_VARIABLE = "LLMJAX_REQUIRE_KERNELS"
# For builders of wheels for other machines than their own: one of the targets of `python -m kernels.cpu.build --help`.
TARGET_VARIABLE = "LLMJAX_KERNEL_TARGET"

LINKED_PACKAGES = ("kernels", "models", "serve")  # folders beside llmjax/ that are packages of it


class KernelBuildHook(BuildHookInterface):
    """Runs ``kernels/cpu/build.py`` and marks the wheel as one for this platform, or for the target's."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Dependencies of the build: the compiler of wheels for a target."""
        return [self._kernels.ZIG] if os.environ.get(TARGET_VARIABLE) else []

    @cached_property
    def _kernels(self) -> Any:
        return _load_build_module(Path(self.root) / "kernels" / "cpu" / "build.py")

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles into the source tree, where an editable install runs and from which a wheel takes its files."""
        if self.target_name != "wheel":
            return
        target = os.environ.get(TARGET_VARIABLE)
        if target and version == "editable":
            raise ValueError(
                f"{TARGET_VARIABLE}={target} is for wheels: an editable install runs on this machine alone"
            )
        if version == "editable":  # llmjax/ itself and configs/ stay where they are
            build_data["force_include_editable"] = {"serve/__main__.py": "serve.py"}
            for name in LINKED_PACKAGES:
                link = Path(self.root) / "llmjax" / name
                if not link.exists():  # a source archive brings no links
                    link.symlink_to(Path("..") / name)
        platform = self._cross(target, build_data) if target else self._native()
        if platform is not None:
            # The library speaks C with Python and XLA, so it fits every Python 3 on the platform.
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def _native(self) -> str | None:
        """The platform that the kernels are for; None where there is no compiler and nobody insists."""
        kernels = self._kernels
        required = bool(os.environ.get(REQUIRE_VARIABLE))
        try:
            kernels.build(every_isa=required, progress=kernels.Progress())  # which pip shows with -v
        except kernels.BuildError as error:
            if required:
                raise
            kernels.LIBRARY.unlink(missing_ok=True)  # an older one would be packed as if it were of these sources
            self.app.display_warning(f"no C++ kernels for CPUs, portable ones will serve: {error}")
            return None
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def _cross(self, target: str, build_data: dict[str, Any]) -> str:
        """Compiles outside the tree, which may hold a library for this machine, and has the wheel take that one."""
        kernels = self._kernels
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / kernels.LIBRARY.name
        kernels.build(library, target=target, progress=kernels.Progress(target))
        build_data["force_include"][str(library)] = f"llmjax/kernels/cpu/{library.name}"
        return str(kernels.TARGETS[target].wheel)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what the wheel has taken."""
        if self._folder is not None:
            self._folder.cleanup()


def _load_build_module(path: Path) -> Any:
    """By path: the package that it belongs to is not installed yet."""
    spec = importlib.util.spec_from_file_location("llmjax_kernel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
