"""The kernels on Arm, from a machine that is none: cross-compiled, and run by an emulator (Debian:
g++-aarch64-linux-gnu and qemu-user)."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmjax.kernels.cpu.build import ARM, BY_ISA, EXACT, SOURCES
from llmjax.kernels.cpu.cores import usable_cores

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PROGRAM = Path(__file__).parent / "native" / "sets.cc"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=fast", f"-I{SOURCES}")
ISAS: dict[str, tuple[str, ...]] = {"generic": (), **ARM}

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}")


def compile_with(*arguments: str) -> None:
    done = subprocess.run([COMPILER, *FLAGS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


JOBS = [(name, isa) for name, sets in BY_ISA.items() for isa in sets if isa in ISAS]


def flags_of(name: str, isa: str) -> tuple[str, ...]:
    exact = ("-ffp-contract=off",) if name in EXACT else ()
    return (*ISAS[isa], *exact, f"-DLLMJAX_ISA={isa}")


@pytest.mark.parametrize(("name", "isa"), JOBS)
def test_sources_are_valid(name: str, isa: str) -> None:
    compile_with(*flags_of(name, isa), "-fsyntax-only", str(SOURCES / "by_isa" / f"{name}.cc"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    jobs: dict[str, tuple[str, ...]] = {
        f"{name}_{isa}": (*flags_of(name, isa), "-c", str(SOURCES / "by_isa" / f"{name}.cc")) for name, isa in JOBS
    }
    compiled = f"-DLLMJAX_COMPILED(f)={' '.join(f'f({name},{isa})' for name, isa in JOBS)}"
    sets = f"-DLLMJAX_SETS(f)={' '.join(f'f({isa})' for isa in ISAS)}"
    jobs["isa"] = (compiled, sets, '-DLLMJAX_DIGEST=""', "-c", str(SOURCES / "isa.cc"))
    jobs["methods"] = ("-c", str(SOURCES / "methods.cc"))
    jobs["sets"] = ("-c", str(PROGRAM))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for done in [pool.submit(compile_with, *job, "-o", str(folder / f"{name}.o")) for name, job in jobs.items()]:
            done.result()
    compile_with(*(str(folder / f"{name}.o") for name in jobs), "-o", str(folder / "sets"))
    return folder / "sets"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"there is no {EMULATOR}")
@pytest.mark.parametrize(
    ("processor", "isas"),
    [
        ("cortex-a72", ["generic"]),
        ("neoverse-n1", ["generic", "dotprod"]),
        ("max", ["generic", "dotprod", "i8mm"]),
    ],
)
def test_each_processor_takes_its_instruction_sets_and_computes_what_is_right(
    processor: str, isas: list[str], program: Path
) -> None:
    command = [EMULATOR, "-L", ROOT, "-cpu", processor, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.split()) == (0, isas), done.stderr
