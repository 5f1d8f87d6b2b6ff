"""Which .gguf file of a folder or repository a user means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from llmjax.errors import CheckpointError


def choose_gguf(names: Iterable[str], wanted: str | None, *, where: str) -> str:
    """Picks one of ``names``.

    Args:
        names: relative paths, with ``/``; those that do not end in .gguf are ignored.
        wanted: a path, a file name or the quantisation that ends it (``Q4_K_M``), in any case; None: the only one.
        where: folder or repository, for messages.

    Raises:
        CheckpointError: none or several fit; lists them.
    """
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if wanted is None:
        found = [name for name in ggufs if not _is_projector(name)]
        problem = "holds several .gguf files; name one with gguf_file" if found else "holds no .gguf file"
    else:
        found = next((hits for hits in _by_strictness(ggufs, wanted) if hits), [])
        problem = f"holds several files that fit gguf_file {wanted!r}" if found else f"holds no gguf_file {wanted!r}"
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or ggufs)[:20])
    raise CheckpointError(f"{where} {problem}" + (f": {listed}" if listed else ""))


def gguf_patterns(wanted: str) -> list[str]:
    """Globs for the hubs' download functions that match what ``choose_gguf`` may pick for ``wanted``."""
    name = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else f"[{c}]" if c in "[]*?" else c for c in wanted)
    if wanted.lower().endswith(".gguf"):
        return [name, f"*/{name}"]
    return [f"*[-._]{name}.gguf", f"{name}.gguf", f"*/{name}.gguf"]


def _by_strictness(ggufs: list[str], wanted: str) -> Iterable[list[str]]:
    low = wanted.lower()
    yield [name for name in ggufs if name == wanted]
    yield [name for name in ggufs if low in (name.lower(), PurePosixPath(name).name.lower())]
    quantisation = re.compile(rf"(?:^|[-._/]){re.escape(low)}\.gguf")
    yield [name for name in ggufs if quantisation.search(name.lower()) and not _is_projector(name)]


def _is_projector(name: str) -> bool:
    """Vision towers travel beside the language model as mmproj files."""
    return PurePosixPath(name).name.lower().startswith("mmproj")
