"""What a build of the kernels says while it runs, and where there is no compiler.

The compiler is a script that compiles nothing, which is done in a second."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmjax.kernels.cpu import build
from llmjax.kernels.cpu.compilers import install_command

SCRIPT = """#!/bin/sh
all="$*"
while [ $# -gt 0 ]; do
  case "$1" in
    --version) echo a script; exit;;
    -o) shift; out="$1";;
    *.o) objects="$objects $1";;
    *probe.cc|*processor.cc) asked=1;;
  esac
  shift
done
case "$all" in
  *-shared*) cat $objects > "$out";;
  *) echo "$all" > "$out"; [ -n "$asked" ] || echo "$out" >> LOG;;
esac
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the compiler of ``CXX`` notes what it compiles."""
    log, script = tmp_path / "compiled", tmp_path / "compiler"
    script.write_text(SCRIPT.replace("LOG", str(log)))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CCACHE_DISABLE", "1")  # it would call the compiler twice for each file
    return log


def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The build as make runs it: by its path, before anything is installed."""
    command = [sys.executable, "-I", "-S", str(build.HERE / "build.py"), *arguments]
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)


def test_progress_is_told_file_by_file(compiled: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    build.build(tmp_path / "library.so", progress=lambda done, total: told.append((done, total)))
    total = len(compiled.read_text().splitlines())
    assert total > 7 and told == [(done, total) for done in range(total + 1)]
    told.clear()
    build.build(tmp_path / "library.so", progress=lambda done, total: told.append((done, total)))
    assert told == []


def test_progress_is_shown_with_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = build.Progress()
    for done in range(31):
        progress(done, 30)
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"C\+\+ kernels: compiling 30 files for this CPU on (one core|\d+ cores); once, .*", first)
    assert [line.partition(" of 30 compiled in ")[0] for line in lines] == [
        f"C++ kernels: {done}" for done in range(3, 31, 3)
    ]
    assert all(re.search(r" in \d+ s, about \d+ s to go$", line) for line in lines[:-1])
    assert re.search(r"30 of 30 compiled in \d+ s$", lines[-1])


def test_two_builds_of_one_file_compile_once(compiled: Path, tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    builds = [run("--output", str(target)) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in builds]
    assert [process.returncode for process in builds] == [0, 0]
    assert all(text.endswith(f"C++ kernels: {target}\n") for text in said)
    names = [Path(name).name for name in compiled.read_text().split()]
    assert len(names) == len(set(names)) > 7


def test_without_a_compiler_it_is_said_what_that_costs_and_what_installs_one(tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    target.write_text("of other sources")
    (tmp_path / "empty").mkdir()
    nothing = {"PATH": str(tmp_path / "empty"), "CXX": ""}
    process = run("--output", str(target), "--optional", **nothing)
    (said, _) = process.communicate(timeout=60)
    assert process.returncode == 0 and not target.exists()
    assert "everything runs several times slower on the CPU: there is no C++ compiler" in said
    assert said.rstrip().endswith(install_command())
    process = run("--output", str(target), **nothing)
    process.communicate(timeout=60)
    assert process.returncode == 1


def test_a_target_has_every_set_and_is_written_beside(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the script instead of Zig's clang, which takes minutes: `.ci/nightly wheel` has that."""
    monkeypatch.setattr(build.Target, "compiler", property(lambda target: (os.environ["CXX"], target.zig)))
    output = build.build(tmp_path / "library.so", target="aarch64-linux")
    names = {Path(name).name for name in compiled.read_text().split()}
    assert {"int8_vectors_i8mm.o", "int8_vectors_dotprod.o", "attention_generic.o"} <= names
    assert not [name for name in names if "avx" in name or "amx" in name]
    text = output.read_text()
    assert "portable with dotprod generic i8mm" in text and "aarch64-linux-gnu.2.17" in text


def test_a_target_that_there_is_not_and_one_without_its_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(build.BuildError, match="there is no target riscv64-linux; there are: x86_64-linux, aarch64"):
        build.build(tmp_path / "library.so", target="riscv64-linux")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r"Apple silicon, ziglang.* is needed: pip install 'ziglang>="):
        build.build(tmp_path / "library.so", target="aarch64-macos")


# What one of them lacks: F16C, which AVX2's sources are compiled with, has a bit of its own.
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="there is no emulator (qemu-user)")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("processor", "sets"),
    [("max", ["avx2", "generic"]), *((f"max,-{bit}", ["generic"]) for bit in ("f16c", "fma", "avx2", "avx", "xsave"))],
)
def test_a_processor_that_lacks_a_part_of_a_set_does_not_use_it(
    processor: str, sets: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "processor"
    subprocess.run(
        ["g++", "-std=c++17", "-static", str(build.SOURCES / "processor.cc"), "-o", str(program)], check=True
    )
    done = subprocess.run(["qemu-x86_64", "-cpu", processor, str(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sets


# Its compiler answered __builtin_cpu_supports with no, whatever the processor had.
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first time it compiles C++'s library
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.skipif(f"{platform.machine()}-{sys.platform}" not in build.TARGETS, reason="Zig compiles for others")
def test_the_compiler_of_wheels_finds_this_machines_sets(tmp_path: Path) -> None:
    found = []
    for number, command in enumerate((("g++",), build.TARGETS[f"{platform.machine()}-linux"].compiler)):
        program = str(tmp_path / f"processor{number}")
        subprocess.run([*command, "-std=c++17", str(build.SOURCES / "processor.cc"), "-o", program], check=True)
        found.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "debian"}, "sudo apt install g++"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "sudo apt install g++"),
        ({"ID": "fedora"}, "sudo dnf install gcc-c++"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "sudo dnf install gcc-c++"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "sudo zypper install gcc-c++"),
        ({"ID": "of-my-own"}, "install g++ or clang++ as your system does"),
        (None, "install g++ or clang++ as your system does"),
        ("darwin", "xcode-select --install"),
        ("win32", "wsl --install, and in its terminal sudo apt install g++ make python3-venv"),
    ],
)
def test_the_command_is_that_of_the_system(
    release: dict[str, str] | str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> dict[str, str]:
        if not isinstance(release, dict):
            raise OSError("there is no os-release")
        return release

    monkeypatch.setattr(sys, "platform", release if isinstance(release, str) else "linux")
    monkeypatch.setattr(platform, "freedesktop_os_release", read)
    assert install_command() == command
