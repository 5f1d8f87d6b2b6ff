"""Whether wheels hold what their names promise: a library for that processor and system, which needs no newer one and
shows nothing but kernels.

    python .ci/check_wheel.py dist/*.whl
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "llmjax/kernels/cpu/libllmjax_cpu.so"
LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread)|ld-linux-\w+)(-[\w-]+)?\.so\.\d+|/usr/lib/libSystem\.B\.dylib")
SHOWN_BY_ZIG = re.compile("_Z(nw|na|dl|da)|__dso_handle$|_mh_dylib_header$")  # new and delete, and the file's own start
PROCESSORS = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}  # by what tags call them
ELF_MACHINES, MACH_CPUS = {62: "x86_64", 183: "aarch64"}, {0x01000007: "x86_64", 0x0100000C: "aarch64"}
Version = tuple[int, ...]


class WheelError(Exception):
    """A wheel is not what its name says."""


@dataclass(frozen=True)
class Binary:
    """What a shared library says of itself."""

    system: str
    processor: str
    needs: Version  # the newest version of the C library, or the system, that it asks for
    libraries: tuple[str, ...]
    symbols: tuple[str, ...]  # that it defines for others
    signed: bool


def check(wheel: Path) -> Binary:
    """Raises WheelError with what is wrong with a wheel; returns what its library is."""
    tag = re.fullmatch(r".*-py3-none-(manylinux|macosx)_(\d+)_(\d+)_(\w+)\.whl", wheel.name)
    if tag is None or tag[4] not in PROCESSORS:
        raise WheelError(f"{wheel.name}: the name is not that of a wheel for one platform")
    with zipfile.ZipFile(wheel) as archive:
        if archive.namelist().count(LIBRARY) != 1:
            raise WheelError(f"{wheel.name}: not one {LIBRARY}")
        library = read(archive.read(LIBRARY))
    system = "linux" if tag[1] == "manylinux" else "macos"
    promised = (int(tag[2]), int(tag[3]))
    foreign = [name for name in library.libraries if not LIBRARIES.fullmatch(name)]
    ours = [name for name in library.symbols if name.startswith("llmjax_")]
    others = sorted({*library.symbols} - {*ours})
    if library.system == "macos":  # where its linker hides nothing that was not compiled to be hidden
        others = [name for name in others if not SHOWN_BY_ZIG.match(name)]
    faults = {
        f"a library for {library.system} on {library.processor}": (library.system, library.processor)
        != (system, PROCESSORS[tag[4]]),
        f"it needs {'.'.join(map(str, library.needs))}": library.needs > promised,
        f"it needs {', '.join(foreign)}": bool(foreign),
        f"it shows {', '.join(others[:5])}": bool(others),
        "it shows no kernels": not ours,
        "it is not signed, so that no Mac loads it": library.system == "macos" and not library.signed,
    }
    if wrong := [text for text, is_so in faults.items() if is_so]:
        raise WheelError(f"{wheel.name}: {'; '.join(wrong)}")
    return library


def read(data: bytes) -> Binary:
    """Raises WheelError: the file is neither ELF nor Mach-O of 64 bits."""
    if data[:6] == b"\x7fELF\x02\x01":
        return _read_elf(data)
    if data[:4] == struct.pack("<I", 0xFEEDFACF):
        return _read_mach(data)
    raise WheelError("the library is neither ELF nor Mach-O of 64 bits, little-endian")


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _read_elf(data: bytes) -> Binary:
    machine = struct.unpack_from("<H", data, 18)[0]
    (table,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    # Of a section: type, offset, size, and the section that has its names.
    sections = [struct.unpack_from("<4xI16xQQI", data, table + i * size) for i in range(count)]
    versions, libraries, symbols = [], [], []
    for kind, offset, length, link in sections:
        names = sections[link][1] if link < count else 0
        if kind == 6:  # dynamic
            entries = struct.iter_unpack("<QQ", data[offset : offset + length])
            libraries = [_text(data, names + value) for tag, value in entries if tag == 1]
        elif kind == 11:  # symbols; those defined here, and not local
            entries = struct.iter_unpack("<IBBHQQ", data[offset : offset + length])
            symbols = [_text(data, names + name) for name, info, _, section, *_ in entries if section and info >> 4]
        elif kind == 0x6FFFFFFE:  # versions that are needed
            versions = [name for name in _needed(data, offset, names) if name.startswith("GLIBC_")]
    newest = max((_version(name.partition("_")[2]) for name in versions), default=())
    return Binary("linux", ELF_MACHINES.get(machine, str(machine)), newest, tuple(libraries), tuple(symbols), False)


def _needed(data: bytes, at: int, names: int) -> Iterator[str]:
    while True:
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(count):
            name, step = struct.unpack_from("<8xII", data, entry)
            yield _text(data, names + name)
            entry += step
        if not following:
            return
        at += following


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _read_mach(data: bytes) -> Binary:
    cpu, count = struct.unpack_from("<4xI8xI", data)
    needs: Version = ()
    libraries, symbols, signed, at = [], [], False, 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        if command == 0xC:  # a library to load
            libraries.append(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == 0x2:
            symbols = list(_mach_symbols(data, *struct.unpack_from("<III", data, at + 8)))
        elif command == 0x32:  # the oldest system, as bytes
            oldest = struct.unpack_from("<I", data, at + 12)[0]
            needs = (oldest >> 16, oldest >> 8 & 255)
        signed = signed or command == 0x1D
        at += size
    return Binary("macos", MACH_CPUS.get(cpu, hex(cpu)), needs, tuple(libraries), tuple(symbols), signed)


def _mach_symbols(data: bytes, offset: int, count: int, names: int) -> Iterator[str]:
    for name, kind, *_ in struct.iter_unpack("<IBBHQ", data[offset : offset + 16 * count]):
        stabs, hidden, undefined, external = kind & 0xE0, kind & 0x10, not kind & 0x0E, kind & 1
        if external and not (stabs or hidden or undefined):
            yield _text(data, names + name).removeprefix("_")


def main() -> None:
    for name in sys.argv[1:]:
        try:
            library = check(Path(name))
        except WheelError as error:
            sys.exit(str(error))
        oldest = ".".join(map(str, library.needs))
        print(f"{name}: for {library.system} {oldest} on {library.processor}, {len(library.symbols)} symbols")


if __name__ == "__main__":
    main()
