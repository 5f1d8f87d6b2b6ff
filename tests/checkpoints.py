"""The golden checkpoints, of which the repository has an archive each, as folders in Hugging Face layout.

What is in them is said by the scripts that write them, ``tests/models/golden/make_golden.py`` (GOLDEN),
``tests/models/vision/golden/make_golden.py`` (SEEING), ``tests/engine/golden/make_pooling.py`` (POOLED),
``tests/engine/golden/make_picture_vectors.py`` (PICTURE_VECTORS),
``tests/engine/golden/make_token_vectors.py`` (TOKEN_VECTORS) and
``tests/adapters/golden/make_golden.py`` (ADAPTERS, SEEING_ADAPTERS), and
``tests/adapters/golden/make_llama_cpp.py`` (LLAMA_CPP_ADAPTERS).
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from filelock import FileLock

TESTS = Path(__file__).parent
UNPACKED = TESTS.parent / "build" / "golden"  # which git ignores and `make clean` removes


def pack(folder: Path, archive: Path) -> None:
    """Writes the files in a folder as an archive: the same bytes for the same files."""
    with zipfile.ZipFile(archive, "w") as out:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())  # without the time it is written at
            entry.external_attr = 0o644 << 16
            out.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


def unpacked(archives: Path, parent: Path) -> Path:
    """A folder in ``parent`` with a folder for each archive in ``archives``.

    It is made once, by the process that comes first, and again where an archive is another one.
    """
    digest = hashlib.sha256()
    packed = sorted(archives.glob("*.zip"))
    for archive in packed:
        digest.update(f"{archive.name} {archive.stat().st_size} ".encode() + archive.read_bytes())
    folder = parent / digest.hexdigest()[:16]
    if folder.exists():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / ".lock"):
        if not folder.exists():
            for old in parent.glob("*/"):
                shutil.rmtree(old)
            (parent / ".part").mkdir()
            for archive in packed:
                with zipfile.ZipFile(archive) as entries:
                    entries.extractall(parent / ".part" / archive.stem)
            (parent / ".part").rename(folder)
    return folder


GOLDEN = unpacked(TESTS / "models" / "golden", UNPACKED / "models")
SEEING = unpacked(TESTS / "models" / "vision" / "golden", UNPACKED / "vision")
ADAPTERS = unpacked(TESTS / "adapters" / "golden", UNPACKED / "adapters")
LLAMA_CPP_ADAPTERS = unpacked(TESTS / "adapters" / "golden" / "llama_cpp", UNPACKED / "llama-cpp-adapters")
SEEING_ADAPTERS = unpacked(TESTS / "adapters" / "golden" / "seeing", UNPACKED / "seeing-adapters")
POOLED = unpacked(TESTS / "engine" / "golden" / "pooling", UNPACKED / "pooling")
PICTURE_VECTORS = unpacked(TESTS / "engine" / "golden" / "picture_vectors", UNPACKED / "picture_vectors")
TOKEN_VECTORS = unpacked(TESTS / "engine" / "golden" / "token_vectors", UNPACKED / "token_vectors")
