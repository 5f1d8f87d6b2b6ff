"""Compiles the C++ kernels into one shared library. Needs a C++17 compiler, nothing else.

Installing the package does it; in a checkout run ``python -m llmjax.kernels.cpu.build`` after changing a source.
With ``--target`` it compiles for another kind of machine, by the compiler that the package ``ziglang`` brings.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libllmjax_cpu.so"
HEADERS = HERE / "include"  # XLA's FFI as the oldest jaxlib has it that llmjax runs with: all later ones take it
FFI_HEADERS = HEADERS / "xla" / "ffi" / "api"
COMPILERS = ("c++", "g++", "clang++")

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
ARM: dict[str, tuple[str, ...]] = {
    "dotprod": ("-march=armv8.2-a+dotprod+fp16",),
    "i8mm": ("-march=armv8.2-a+dotprod+fp16+i8mm+bf16",),
}
ZIG_ARM = {  # the same; Zig names processors and their features, and knows no -march
    "dotprod": ("-mcpu=generic+v8_2a+dotprod+fullfp16",),
    "i8mm": ("-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm+bf16",),
}
GENERIC = "generic"  # what every processor of a kind has: SSE2, or NEON

# Sources of `src/by_isa`, and the instruction sets that they gain from; others take what the next narrower one has.
# The longest come first, so that no core waits for one at the end.
BY_ISA = {
    "int8_vectors": (GENERIC, "avx2", "avxvnni", "avx512vnni", "dotprod", "i8mm"),
    "attention": (GENERIC, "avx2", "avx512", "avx512bf16", "amx"),
    "bf16_tiles": ("amx",),
    "int8_tiles": ("amx",),
    "float_vectors": (GENERIC, "avx2", "avx512"),
    "rows": (GENERIC, "avx2", "avx512"),
    "float_panels": (GENERIC, "avx2", "avx512"),
    "linear": (GENERIC, "avx2", "avx512", "avx512bf16", "amx"),
    "int16_panels": ("avx2", "avxvnni", "avx512vnni"),
    "bf16_panels": ("avx512bf16",),
    "kept_floats": ("avx2", "avx512"),
    "kept_pairs": ("avx512bf16",),
    "quantizers": (GENERIC, "avx2"),
    "searches": (GENERIC, "avx2"),
}
EXACT = ("searches", "quantizers")  # whose results are those of ggml's quantizers, bit for bit
COMMON = ("units/layers", "units/states", "packing", "methods", "isa")  # compiled once


@dataclass(frozen=True)
class Target:
    """A kind of machine to compile for on any other: Zig's clang brings the headers and libraries of each."""

    machines: str  # in words
    zig: str  # what Zig calls it, with the oldest C library or system that it is to run on
    wheel: str  # the platform in a wheel's name, which promises the same
    extensions: Mapping[str, tuple[str, ...]]

    @property
    def compiler(self) -> tuple[str, ...]:
        if importlib.util.find_spec("ziglang") is None:
            raise BuildError(f"to compile for {self.machines}, {ZIG} is needed: pip install '{ZIG}'")
        return (sys.executable, "-m", "ziglang", "c++", "-target", self.zig)


ZIG = "ziglang>=0.15"  # a requirement, as pip reads it

# Only what jaxlib has wheels for.
TARGETS = {
    "x86_64-linux": Target(
        "Linux on x86-64, glibc 2.17 or newer", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", X86
    ),
    "aarch64-linux": Target(
        "Linux on 64-bit Arm, glibc 2.17 or newer", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", ZIG_ARM
    ),
    "aarch64-macos": Target("macOS 11 or newer on Apple silicon", "aarch64-macos.11.0", "macosx_11_0_arm64", ZIG_ARM),
}


class BuildError(Exception):
    """There is no compiler, it refuses a source, or it lacks an instruction set that is to be there."""


@dataclass(frozen=True)
class _Compiler:
    command: tuple[str, ...]
    flags: tuple[str, ...]

    def accepts(self, flags: tuple[str, ...]) -> bool:
        with tempfile.TemporaryDirectory() as directory:  # of an empty file: Zig's looks for what it has compiled
            source, target = Path(directory, "probe.cc"), Path(directory, "probe.o")
            source.touch()
            probe = [*self.command, *flags, "-c", str(source), "-o", str(target)]
            return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def compile(self, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        self.run(*self.flags, *flags, "-isystem", str(HEADERS), f"-I{SOURCES}", "-c", str(source), "-o", str(target))

    def digest(self) -> str:
        """A digest of the compiler and the sources, whichever instruction sets they are compiled for."""
        version = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False).stdout
        state = hashlib.sha256(repr((self.command, version, self.flags, X86, ARM, ZIG_ARM, BY_ISA)).encode())
        for folder in (SOURCES, SOURCES / "by_isa", SOURCES / "units", FFI_HEADERS):
            for path in sorted(path for path in folder.iterdir() if path.is_file()):
                state.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return state.hexdigest()

    def native_sets(self, extensions: Mapping[str, tuple[str, ...]]) -> set[str]:
        """The instruction sets that this machine uses; all, where what is compiled does not run here."""
        with tempfile.TemporaryDirectory() as directory:
            program = Path(directory, "processor")
            self.run(*self.flags, str(SOURCES / "processor.cc"), "-o", str(program))
            try:
                done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
            except OSError:
                return set(extensions)
            return set(done.stdout.split()) if done.returncode == 0 else set(extensions)

    def run(self, *arguments: str) -> None:
        command = [*_compiler_cache(), *self.command, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{result.stderr.strip()}")


@dataclass(frozen=True)
class _Contents:
    """What a library holds, as it says itself."""

    digest: str
    sets: frozenset[str]  # instruction sets that nothing is missing of
    without: tuple[str, ...]  # those that were wanted and the compiler does not know
    portable: bool

    def text(self) -> str:
        """What `library.py` and `serves` read."""
        kind = "portable" if self.portable else "local"
        without = f" without {' '.join(self.without)}" if self.without else ""
        return f"{self.digest} {kind} with {' '.join(sorted(self.sets))}{without}"

    def served_by(self, library: Path) -> bool:
        """Whether a file is of the same sources and holds as much."""
        if not library.exists():
            return False
        label = re.search(self.digest.encode() + rb" (portable|local) with ([a-z0-9 ]+)", library.read_bytes())
        if label is None or (self.portable and label[1] != b"portable"):
            return False
        return self.sets <= set(label[2].decode().partition(" without ")[0].split())


def build(
    output: Path = LIBRARY,
    *,
    target: str | None = None,
    sanitize: str | None = None,
    every_isa: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Compiles and links the library, unless the file holds what would come out of it.

    A second build of the same file waits for the first, and finds what it has made.

    Args:
        output: the file to write.
        target: one of ``TARGETS``, for which every instruction set is compiled; else it is for this kind of machine.
        sanitize: what to give to ``-fsanitize=`` ("address,undefined" or "thread"); slow, for tests.
        every_isa: the library is for other machines too: every instruction set of this kind of processor, and an error
            if the compiler lacks one. Else it has those that this machine's processor uses, goes without one that the
            compiler lacks, and says so.
        progress: is told how many files are compiled, and of how many: of none first; not called if nothing is.

    Raises:
        BuildError: says what the compiler said, how to get one, or which targets there are.
    """
    if target is not None and target not in TARGETS:
        raise BuildError(f"there is no target {target}; there are: {', '.join(TARGETS)}")
    kind = _native() if target is None else _cross(TARGETS[target])
    with _alone(output.parent):
        return _build(output, kind, sanitize, every_isa or target is not None, progress)


@dataclass(frozen=True)
class _Kind:
    """The kind of machine that a library is for."""

    command: tuple[str, ...]  # that compiles for it
    extensions: Mapping[str, tuple[str, ...]]
    linux: bool


def _native() -> _Kind:
    extensions = _extensions()
    return _Kind(_find_compiler(extensions), extensions, linux="linux" in sysconfig.get_platform())


def _cross(target: Target) -> _Kind:
    return _Kind(target.compiler, target.extensions, linux="linux" in target.zig)


def _build(
    output: Path, kind: _Kind, sanitize: str | None, every_isa: bool, progress: Callable[[int, int], None] | None
) -> Path:
    extensions = kind.extensions
    compiler = _Compiler(command=kind.command, flags=_flags(sanitize))
    used = set(extensions) if every_isa else compiler.native_sets(extensions)
    wanted = {isa: flags for isa, flags in extensions.items() if isa in used}
    left_out = tuple(isa for isa, flags in wanted.items() if not compiler.accepts(flags))
    if left_out and every_isa:
        raise BuildError(
            f"{shlex.join(compiler.command)} does not know {', '.join(left_out)}: for x86, GCC 11 or clang 12 is needed"
        )
    isas: dict[str, tuple[str, ...]] = {GENERIC: ()}
    isas |= {isa: flags for isa, flags in wanted.items() if isa not in left_out}
    contents = _Contents(compiler.digest(), frozenset(isas), left_out, portable=every_isa)
    if contents.served_by(output):
        return output
    with tempfile.TemporaryDirectory() as directory:
        jobs = _jobs(isas, contents)
        if progress is not None:
            progress(0, len(jobs))
        with ThreadPoolExecutor(_usable_cores()) as pool:
            running = [pool.submit(compiler.compile, job.source, Path(directory, job.name), job.flags) for job in jobs]
            for count, done in enumerate(as_completed(running), start=1):
                done.result()
                if progress is not None:
                    progress(count, len(jobs))
        linked = Path(directory, "library")
        objects = (str(Path(directory, job.name)) for job in jobs)
        checked = (f"-fsanitize={sanitize}",) if sanitize else ()
        linking = _link_flags(Path(directory), portable=every_isa) if kind.linux else ("-pthread",)
        compiler.run("-shared", *checked, *objects, "-o", str(linked), *linking)
        # A new file and not new contents: a process may have the old one mapped.
        staged = output.with_name(f".{output.name}.{os.getpid()}")
        shutil.copy(linked, staged)
        staged.replace(output)
    return output


@dataclass(frozen=True)
class _Job:
    source: Path
    name: str  # of the object
    flags: tuple[str, ...]


def _jobs(isas: Mapping[str, tuple[str, ...]], contents: _Contents) -> list[_Job]:
    """What to compile, long ones first."""
    jobs, compiled = [], []
    for name, sets in BY_ISA.items():
        for isa in (isa for isa in sets if isa in isas):
            compiled.append(f"f({name},{isa})")
            exact = ("-ffp-contract=off",) if name in EXACT else ()
            flags = (*isas[isa], *exact, f"-DLLMJAX_ISA={isa}")
            jobs.append(_Job(SOURCES / "by_isa" / f"{name}.cc", f"{name}_{isa}.o", flags))
    have = (
        f"-DLLMJAX_COMPILED(f)={' '.join(compiled)}",
        f"-DLLMJAX_SETS(f)={' '.join(f'f({isa})' for isa in isas)}",
        f'-DLLMJAX_DIGEST="{contents.text()}"',
    )
    for name in COMMON:
        jobs.append(_Job(SOURCES / f"{name}.cc", f"{Path(name).name}.o", have if name == "isa" else ()))
    return sorted(jobs, key=lambda job: job.name not in ("layers.o", "states.o"))


def compile_alone(source: Path, target: Path, *, isa: str) -> Path:
    """Compiles a source that does not belong to the library into one of its own, for one instruction set.

    Raises:
        BuildError: says what the compiler said, or that it does not know the instruction set.
    """
    extensions: dict[str, tuple[str, ...]] = {GENERIC: (), **_extensions()}
    compiler = _Compiler(command=_find_compiler(extensions), flags=_flags(None))
    if not compiler.accepts(extensions[isa]):
        raise BuildError(f"{shlex.join(compiler.command)} does not know {isa}")
    compiler.run(*compiler.flags, *extensions[isa], f"-I{SOURCES}", "-shared", str(source), "-o", str(target))
    return target


def _compiler_cache() -> tuple[str, ...]:
    """ccache, where it is: what was compiled once is not compiled again."""
    return ("ccache",) if shutil.which("ccache") else ()


class Progress:
    """Says how far a build is, a line for each tenth of it."""

    def __init__(self, target: str | None = None) -> None:
        self._for = target or "this CPU"
        self._start = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done == 0:
            cores = f"{count} cores" if (count := _usable_cores()) > 1 else "one core"
            self._say(f"compiling {total} files for {self._for} on {cores}; once, mostly a minute or two")
        elif done == total or done * 10 // total > (done - 1) * 10 // total:
            seconds = time.monotonic() - self._start
            rest = "" if done == total else f", about {seconds / done * (total - done):.0f} s to go"
            self._say(f"{done} of {total} compiled in {seconds:.0f} s{rest}")

    def _say(self, text: str) -> None:
        print(f"C++ kernels: {text}", flush=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for other processes that build in this folder."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing is built
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders: both build then, as each would alone
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _usable_cores() -> int:
    """By path: this module is run before the package that it belongs to is installed."""
    cores: int = runpy.run_path(str(HERE / "cores.py"))["usable_cores"]()
    return cores


def _install_command() -> str:
    command: str = runpy.run_path(str(HERE / "compilers.py"))["install_command"]()
    return command


def _extensions() -> dict[str, tuple[str, ...]]:
    """Flags by instruction set, of this kind of machine."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86
    return ARM if machine in ("aarch64", "arm64") else {}


def _find_compiler(extensions: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """$CXX, which compilers are named by everywhere, else of those that compile C++ here the first that knows the most
    instruction sets."""
    chosen = os.environ.get("CXX")
    if chosen:
        command = tuple(shlex.split(chosen))
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"there is no C++ compiler {chosen}, as CXX names it")
        return command
    usable = [_Compiler(command=(name,), flags=()) for name in COMPILERS if _works(name)]
    if not usable:
        raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)} or $CXX); to get one: {_install_command()}")
    return max(usable, key=lambda compiler: sum(map(compiler.accepts, extensions.values()))).command


def _works(name: str) -> bool:
    """A compiler may be there without the standard library, as clang often is."""
    if shutil.which(name) is None:
        return False
    probe = [name, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(probe, input="#include <vector>\n", capture_output=True, text=True, check=False)
    return done.returncode == 0


def _flags(sanitize: str | None) -> tuple[str, ...]:
    common = ("-std=c++17", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-psabi", "-fPIC", "-pthread")
    if sanitize:
        return (*common, "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitize}")
    return (*common, "-O2", "-DNDEBUG", "-ffp-contract=fast", "-fvisibility=hidden")


def _link_flags(directory: Path, *, portable: bool) -> tuple[str, ...]:
    """For Linux. In a library that other machines are to load, C++'s own is part of it, since theirs may be older, and
    a file in a folder keeps that to the library: not every linker takes --exclude-libs."""
    if not portable:
        return ("-pthread", "-Wl,-z,defs")
    script = directory / "exports"
    script.write_text("{ global: llmjax_*; local: *; };\n")
    return ("-pthread", "-Wl,-z,defs", "-static-libstdc++", "-static-libgcc", "-s", f"-Wl,--version-script={script}")


def main() -> None:
    targets = "".join(f"  {name:14} {target.machines}\n" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"targets:\n{targets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sanitize", help="address,undefined or thread")
    parser.add_argument("--every-isa", action="store_true", help="for other machines too: all instruction sets")
    parser.add_argument("--target", choices=tuple(TARGETS), help=f"for another kind of machine, listed below, by {ZIG}")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"the file to write: {LIBRARY.name} beside build.py, which is where it is loaded from, or with --target "
        f"{_output_for('TARGET')} in this folder",
    )
    parser.add_argument("--optional", action="store_true", help="without a compiler say what that costs, and go on")
    options = parser.parse_args()
    output = options.output or (LIBRARY if options.target is None else _output_for(options.target))
    what = {"target": options.target, "sanitize": options.sanitize, "every_isa": options.every_isa}
    try:
        built = build(output, **what, progress=Progress(options.target))
    except BuildError as error:
        if not options.optional:
            sys.exit(f"C++ kernels: {error}")
        output.unlink(missing_ok=True)  # an older one would be taken for one of these sources
        print(f"C++ kernels: left out, so that everything runs several times slower on the CPU: {error}", flush=True)
        return
    print(f"C++ kernels: {built}", flush=True)


def _output_for(target: str) -> Path:
    return Path(f"{LIBRARY.stem}-{target}{LIBRARY.suffix}")


if __name__ == "__main__":
    main()
