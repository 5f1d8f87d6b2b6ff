"""Compiles the C++ kernels into one shared library. Needs a C++17 compiler and jaxlib's headers, nothing else.

Installing the package does it; in a checkout run ``python -m llmjax.kernels.cpu.build`` after changing a source.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libllmjax_cpu.so"
FFI_HEADERS = Path("xla", "ffi", "api")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
VNNI = (*AVX512, "-mavx512vnni")
BF16 = (*VNNI, "-mavx512bf16")
AMX = (*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
X86 = {
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512vnni": VNNI,
    "avx512bf16": BF16,
    "amx": AMX,
}
ARM = {"dotprod": ("-march=armv8.2-a+dotprod+fp16",)}
COMMON = ("attention", "blocks", "experts", "linear", "products", "sampling", "zeros", "isa")  # compiled once
QUANTIZED_ONLY = ("avxvnni", "avx512vnni", "avx512bf16", "dotprod")  # of no use to other kernels


class BuildError(Exception):
    """There is no compiler, no header, or the compiler refuses a source."""


@dataclass(frozen=True)
class _Compiler:
    command: tuple[str, ...]
    include: Path
    flags: tuple[str, ...]

    def accepts(self, flags: tuple[str, ...]) -> bool:
        probe = [*self.command, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def compile(self, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        self.run(*self.flags, *flags, "-isystem", str(self.include), "-c", str(source), "-o", str(target))

    def digest(self, isas: dict[str, tuple[str, ...]]) -> str:
        """Of all that decides what the library holds."""
        version = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False).stdout
        found = hashlib.sha256(repr((self.command, version, self.flags, _link_flags(), isas)).encode())
        for folder in (SOURCES, self.include / FFI_HEADERS):
            for path in sorted(folder.iterdir()):
                found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return found.hexdigest()

    def run(self, *arguments: str) -> None:
        result = subprocess.run([*self.command, *arguments], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"{shlex.join([*self.command, *arguments])}\n{result.stderr.strip()}")


def build(target: Path = LIBRARY, *, sanitize: str | None = None) -> Path:
    """Compiles and links the library, unless the file is what would come out of it.

    Args:
        target: the file to write.
        sanitize: what to give to ``-fsanitize=`` ("address,undefined" or "thread"); slow, for tests.

    Raises:
        BuildError: with what the compiler said.
    """
    compiler = _Compiler(command=_find_compiler(), include=_find_headers(), flags=_flags(sanitize))
    isas: dict[str, tuple[str, ...]] = {"generic": ()}
    machine = platform.machine().lower()
    extensions = X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else {}
    isas |= {isa: flags for isa, flags in extensions.items() if compiler.accepts(flags)}
    digest = compiler.digest(isas)
    if target.exists() and digest.encode() in target.read_bytes():
        return target
    have = (*(f"-DLLMJAX_HAVE_{isa.upper()}" for isa in isas), f'-DLLMJAX_DIGEST="{digest}"')
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            (SOURCES / f"{name}.cc", f"{name}_{isa}.o", (*flags, f"-DLLMJAX_ISA={isa}"))
            for name in ("kernels", "quantized_kernels")
            for isa, flags in isas.items()
            if name == "quantized_kernels" or isa not in QUANTIZED_ONLY
        ]
        jobs += [(SOURCES / f"{name}.cc", f"{name}.o", have) for name in COMMON]
        with ThreadPoolExecutor(_usable_cores()) as pool:
            for done in [pool.submit(compiler.compile, a, Path(directory, b), c) for a, b, c in jobs]:
                done.result()
        linked = Path(directory, "library")
        link = ("-shared", *((f"-fsanitize={sanitize}",) if sanitize else ()))
        compiler.run(*link, *(str(Path(directory, name)) for _, name, _ in jobs), "-o", str(linked), *_link_flags())
        # A new file and not new contents: a process may have the old one mapped.
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, staged)
        staged.replace(target)
    return target


def _usable_cores() -> int:
    """By path: this module is run before the package that it belongs to is installed."""
    cores: int = runpy.run_path(str(HERE / "cores.py"))["usable_cores"]()
    return cores


def _find_compiler() -> tuple[str, ...]:
    """$CXX, which compilers are named by everywhere, else what is there."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("c++", "g++", "clang++"):
        command = tuple(shlex.split(name))
        if shutil.which(command[0]):
            return command
    raise BuildError(f"there is no C++ compiler ({chosen or 'c++, g++, clang++ or $CXX'})")


def _find_headers() -> Path:
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    include = Path(found.origin).parent / "include"
    if not (include / FFI_HEADERS / "ffi.h").exists():
        raise BuildError(f"{include} does not hold XLA's FFI headers")
    return include


def _flags(sanitize: str | None) -> tuple[str, ...]:
    common = ("-std=c++17", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-psabi", "-fPIC", "-pthread")
    if sanitize:
        return (*common, "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitize}")
    return (*common, "-O3", "-DNDEBUG", "-ffp-contract=fast", "-fvisibility=hidden")


def _link_flags() -> tuple[str, ...]:
    return ("-pthread",) if "linux" not in sysconfig.get_platform() else ("-pthread", "-Wl,-z,defs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", help="address,undefined or thread")
    parser.add_argument("--output", type=Path, default=LIBRARY)
    arguments = parser.parse_args()
    print(build(arguments.output, sanitize=arguments.sanitize))


if __name__ == "__main__":
    main()
