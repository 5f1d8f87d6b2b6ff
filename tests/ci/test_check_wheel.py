"""The check of wheels: each way in which a library may not be what the wheel's name says.

Libraries are made here, byte by byte, as small as linkers would."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.ci.scripts import load_script

ARM, X86, APPLE = "manylinux_2_17_aarch64", "manylinux_2_17_x86_64", "macosx_11_0_arm64"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    return load_script("check_wheel")


def elf(
    machine: int = 183,
    needs: tuple[str, ...] = ("GLIBC_2.2.5", "GLIBC_2.17"),
    library: str = "libc.so.6",
    symbol: str = "llmjax_zeros",
) -> bytes:
    names, at = b"\0", {}
    for name in (*needs, library, symbol):
        at[name] = len(names)
        names += name.encode() + b"\0"
    last = len(needs) - 1
    versions = struct.pack("<HHIII", 1, len(needs), at[library], 16, 0) + b"".join(
        struct.pack("<IHHII", 0, 0, 2, at[name], 0 if i == last else 16) for i, name in enumerate(needs)
    )
    symbols = struct.pack("<IBBHQQ", at[symbol], 1 << 4 | 2, 0, 7, 0, 0)
    symbols += struct.pack("<IBBHQQ", at[library], 1 << 4 | 2, 0, 0, 0, 0)  # one that is looked for elsewhere
    parts = [(3, names), (6, struct.pack("<QQQQ", 1, at[library], 0, 0)), (11, symbols), (0x6FFFFFFE, versions)]
    body, table = b"", struct.pack("<64x")
    for kind, content in parts:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 64 + len(body), len(content), 1, 0, 0, 0)
        body += content
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQI", 3, machine, 1, 0, 0, 64 + len(body), 0)
    return head + struct.pack("<HHHHHH", 64, 0, 0, 64, len(parts) + 1, 1) + body + table


def mach(cpu: int = 0x0100000C, oldest: int = 11, symbol: str = "_llmjax_zeros", signed: bool = True) -> bytes:
    path = b"/usr/lib/libSystem.B.dylib\0".ljust(32, b"\0")
    commands = [
        struct.pack("<IIIIII", 0xC, 24 + len(path), 24, 0, 0, 0) + path,
        struct.pack("<IIIIII", 0x32, 24, 1, oldest << 16, oldest << 16, 0),
    ]
    if signed:
        commands.append(struct.pack("<IIII", 0x1D, 16, 0, 0))
    end = 32 + sum(map(len, commands)) + 24
    commands.append(struct.pack("<IIIIII", 2, 24, end, 1, end + 16, len(symbol) + 2))
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, cpu, 0, 6, len(commands), end - 32, 0, 0)
    return head + b"".join(commands) + struct.pack("<IBBHQ", 1, 0x0F, 1, 0, 0) + b"\0" + symbol.encode() + b"\0"


def wheel(folder: Path, tag: str, library: bytes | None, name: str = "llmjax/kernels/cpu/libllmjax_cpu.so") -> Path:
    path = folder / f"llmjax-0.1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llmjax/__init__.py", "")
        if library is not None:
            archive.writestr(name, library)
    return path


@pytest.mark.parametrize(
    ("tag", "library", "needs"), [(ARM, elf(), (2, 17)), (X86, elf(62), (2, 17)), (APPLE, mach(), (11, 0))]
)
def test_what_a_name_promises_is_found(
    tag: str, library: bytes, needs: tuple[int, int], checks: ModuleType, tmp_path: Path
) -> None:
    found = checks.check(wheel(tmp_path, tag, library))
    assert (found.needs, found.symbols) == (needs, ("llmjax_zeros",))


@pytest.mark.parametrize(
    ("tag", "library", "said"),
    [
        (X86, elf(183), "a library for linux on aarch64"),
        (ARM, mach(), "a library for macos on aarch64"),
        (APPLE, elf(183), "a library for linux on aarch64"),
        (APPLE, mach(0x01000007), "a library for macos on x86_64"),
        (ARM, elf(needs=("GLIBC_2.34", "GLIBC_2.4")), r"it needs 2\.34$"),
        (ARM, elf(library="libstdc++.so.6"), r"it needs libstdc\+\+\.so\.6"),
        (ARM, elf(symbol="_Znwm"), "it shows _Znwm; it shows no kernels"),
        (APPLE, mach(oldest=13), r"it needs 13\.0"),
        (APPLE, mach(signed=False), "not signed"),
        (APPLE, mach(symbol="__ZNSt3__16vectorE"), "it shows _ZNSt3__16vectorE"),
        (APPLE, mach(symbol="__Znwm"), r"whl: it shows no kernels$"),
        (ARM, b"MZ" + bytes(200), "neither ELF nor Mach-O"),
        (ARM, None, "not one llmjax/kernels/cpu/libllmjax_cpu.so"),
        ("linux_aarch64", elf(), "not that of a wheel for one platform"),
        ("any", None, "not that of a wheel for one platform"),
    ],
)
def test_what_is_not_as_promised_is_said(
    tag: str, library: bytes | None, said: str, checks: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(checks.WheelError, match=said):
        checks.check(wheel(tmp_path, tag, library))
