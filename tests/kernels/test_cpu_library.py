"""What happens with and without the compiled library."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from llmjax.kernels.cpu import build
from llmjax.kernels.cpu import library as cpu_library
from llmjax.kernels.cpu.library import ISA_VARIABLE, Library, describe, forced_isa, library, why_slow
from llmjax.kernels.cpu.linear import linear as cpu_linear
from tests.kernels.instruction_sets import INSTRUCTION_SETS

pytestmark = pytest.mark.jax_api

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, sys
from pathlib import Path
import jax.numpy as jnp
from llmjax.kernels.cpu import library
if "missing" in sys.argv:
    library.LIBRARY = Path("nowhere/libllmjax_cpu.so")
from llmjax.kernels.linear import linear
said = []
library.logger.addFilter(lambda record: said.append(record.getMessage()))
for _ in range(2):
    out = linear(jnp.ones((1, 8)), jnp.ones((3, 8), jnp.bfloat16))
print(out.tolist(), len(said), said, library.describe(), sep="|")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )


def test_without_the_library_there_is_one_warning_and_the_right_result() -> None:
    out, count, message, what = run("missing").stdout.strip().split("|")
    assert (out, count) == ("[[8.0, 8.0, 8.0]]", "1")
    assert "everything runs several times slower" in message
    assert "was not built" in message
    assert what.startswith("portable XLA operations")


def test_the_environment_switches_the_library_off_silently() -> None:
    out, count, _, what = run(**{ISA_VARIABLE: "none"}).stdout.strip().split("|")
    assert (out, count, what) == ("[[8.0, 8.0, 8.0]]", "0", f"portable XLA operations ({ISA_VARIABLE}=none)")


@pytest.mark.skipif(library() is None, reason="the C++ library is not built")
def test_the_environment_chooses_an_instruction_set() -> None:
    out, _, _, what = run(**{ISA_VARIABLE: "generic"}).stdout.strip().split("|")
    assert out == "[[8.0, 8.0, 8.0]]"
    assert what.startswith("C++ kernels for generic")
    result = run(**{ISA_VARIABLE: "mmx"})
    assert result.returncode != 0
    assert f"{ISA_VARIABLE}=mmx: not available; there is: generic" in result.stderr


@pytest.mark.skipif(library() is None, reason="the C++ library is not built")
def test_an_instruction_set_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(ValueError, match="instruction set 'mmx' is not available; there is: generic"),
        forced_isa("mmx"),
    ):
        pass


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_one_program_takes_any_instruction_set(isa: str) -> None:
    """Sums in another order differ in their last bits."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 592)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((64, 592)), jnp.float32)
    compiled = jax.jit(cpu_linear).lower(x, weight).compile()
    sums = {}
    for chosen in ("generic", isa):
        with forced_isa(chosen):
            native = library()
            assert native is not None and native.best == native.forced == chosen
            sums[chosen] = np.asarray(compiled(x, weight))
    np.testing.assert_allclose(sums[isa], sums["generic"], atol=1e-3)
    # avxvnni, avx512vnni and Arm's have products of floats from a narrower one.
    lanes = {"avx2": 8, "avxvnni": 8, "avx512": 16, "avx512vnni": 16, "avx512bf16": 16, "amx": 16}.get(isa, 4)
    assert np.array_equal(sums[isa], sums["generic"]) == (lanes == 4)


@pytest.mark.skipif(library() is None, reason="the C++ library is not built")
def test_an_instruction_set_is_forced_no_longer_than_asked() -> None:
    before = library()
    with contextlib.suppress(KeyError), forced_isa("generic"):
        assert library() != before or before.forced == "generic"  # type: ignore[union-attr]
        raise KeyError
    assert library() == before


def test_a_missing_compiler_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "library.so")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_without_the_standard_library_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Like clang where no libstdc++ that it can use is installed."""
    first, second, _ = build.COMPILERS
    for name, status in ((first, 1), (second, 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._find_compiler(build.X86) == (second,)
    (tmp_path / first).write_text("#!/bin/sh\n")
    assert build._find_compiler(build.X86) == (first,)


def test_the_first_compiler_is_taken_unless_another_one_knows_more_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, *_, clang = build.COMPILERS
    for name in build.COMPILERS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._find_compiler(build.X86) == (first,)
    for name in build.COMPILERS[:-1]:
        (tmp_path / name).write_text("#!/bin/sh\nfor flag; do case $flag in -mamx*) exit 1;; esac; done\n")
    assert build._find_compiler(build.X86) == (clang,)
    assert build._find_compiler({}) == (first,)


def test_a_library_for_other_machines_has_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    old = tmp_path / "old++"
    old.write_text("#!/bin/sh\nfor flag; do case $flag in -mamx*|-mavxvnni) exit 1;; esac; done\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(build.BuildError, match=r"old\+\+ does not know avxvnni, amx: .* GCC 11 or clang 12"):
        build.build(tmp_path / "library.so", every_isa=True)
    assert list(tmp_path.iterdir()) == [old]


def test_headers_are_those_of_the_oldest_jaxlib() -> None:
    oldest = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"jax>=' in line)
    version = metadata.version("jaxlib")
    if f'"jax>={version},' not in oldest:
        pytest.skip(f"jaxlib {version} is a newer one")
    theirs = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api"
    ours = {path.name: path.read_bytes() for path in build.FFI_HEADERS.iterdir()}
    assert ours == {path.name: path.read_bytes() for path in theirs.iterdir()}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            "libllmjax_cpu.so was not built; …",
            "several times slower: libllmjax_cpu.so was not built",
        ),
        ("", None),
        (Library(isas=("generic", "avx2"), usable=("generic", "avx2"), forced=None), None),
        (
            Library(isas=("generic", "amx"), usable=("generic",), forced=None, left_out=("amx",)),
            "did not know amx, which this CPU has; install GCC 11",
        ),
        (Library(isas=("generic", "amx"), usable=("generic",), forced="generic", left_out=("amx",)), None),
        (
            Library(isas=("generic", "avx2"), usable=("generic",), not_compiled=("avx2",)),
            "compiled on a machine without avx2, which this CPU has; run `pip install` again",
        ),
        (
            Library(isas=("generic", "amx"), usable=("generic",), refused=("amx",)),
            "has amx, but the system refuses it: Linux 5.16",
        ),
    ],
)
def test_people_are_told_why_a_cpu_is_slow(
    found: Library | str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmjax.kernels.cpu.library._load", lambda: found)
    assert (why_slow() is None) == (said is None)
    assert said is None or said in str(why_slow())


def test_what_the_system_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Library(isas=("generic", "amx"), usable=("generic",), refused=("amx",))
    monkeypatch.setattr("llmjax.kernels.cpu.library._load", lambda: found)
    assert describe() == "C++ kernels for generic (available: generic; amx is there, but the system refuses it)"


def test_all_that_python_calls_is_looked_for_when_the_library_is_loaded() -> None:
    text = "".join(path.read_text() for path in build.HERE.glob("*.py") if path.name not in ("build.py", "library.py"))
    called = set(
        re.findall(r"\bllmjax_[a-z0-9_]+", text + Path(cpu_library.__file__).read_text().partition("AGAIN =")[2])
    )
    assert len(called) > 20
    called -= {"llmjax_cpu"}  # as in the library's name
    assert called == {*cpu_library.FFI_TARGETS, *cpu_library.FUNCTIONS}


@pytest.mark.parametrize("function", ["llmjax_force_isa", "llmjax_pack_blocks", "llmjax_quantize", "llmjax_shared_sum"])
def test_a_library_that_lacks_a_function_is_not_used(
    function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library of older sources does; here the name is made another one in the file."""
    if not cpu_library.LIBRARY.exists():
        pytest.skip("the C++ library is not built")
    older = tmp_path / "library.so"
    older.write_bytes(
        cpu_library.LIBRARY.read_bytes().replace(function.encode() + b"\0", function.upper().encode() + b"\0")
    )
    monkeypatch.setattr(cpu_library, "LIBRARY", older)
    said = cpu_library._opened.__wrapped__()
    assert isinstance(said, str) and function in said and "run `pip install` again" in said


@pytest.mark.skipif(library() is None, reason="the C++ library is not built")
def test_nothing_that_this_machine_has_is_left_out_of_the_library() -> None:
    native = library()
    assert native is not None and native.left_out == native.not_compiled == ()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_what_is_there_already_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_nothing(self: build._Compiler, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        compiled.append(source.name)
        target.write_text(" ".join(flags))  # the digest is among them

    def join(self: build._Compiler, *arguments: str) -> None:
        parts = [Path(name).read_bytes() for name in arguments if name.endswith(".o")]
        Path(arguments[arguments.index("-o") + 1]).write_bytes(b"".join(parts))

    monkeypatch.setattr(build._Compiler, "native_sets", lambda self, extensions: set(extensions))
    monkeypatch.setattr(build._Compiler, "compile", compile_nothing)
    monkeypatch.setattr(build._Compiler, "run", join)
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    target = tmp_path / "library.so"

    def count(command: str = "c++") -> int:
        monkeypatch.setenv("CXX", command)
        compiled.clear()
        assert build.build(target) == target
        return len(compiled)

    assert count() > 7
    assert count() == 0
    (sources / "simd.h").write_text((sources / "simd.h").read_text() + "// another line\n")
    assert count() > 7
    assert count("c++ -fno-plt") > 7
    assert count("c++ -fno-plt") == 0
