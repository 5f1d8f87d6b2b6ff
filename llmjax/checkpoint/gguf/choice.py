"""Finds the .gguf file of a folder or repository that a user means; a split one counts as one file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from llmjax.checkpoint.gguf.file import SPLIT_NAME, shard_name
from llmjax.errors import CheckpointError

ENDING = ".gguf"
PART_GLOB = "-{0}-of-{0}".format("[0-9]" * 5)


def relative_ggufs(folder: Path) -> list[str]:
    """The .gguf files under ``folder``, as relative paths with ``/``."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix.lower() == ENDING]


def model_ggufs(names: Iterable[str]) -> list[str]:
    """The models among ``names``, in order: no vision towers, and the first part of a split file."""
    return [file.shards[0] for file in _files(names) if not file.is_projector]


def names_projector(name: str) -> bool:
    """Whether a file is an encoder of pictures, which stands beside the language model, as llama-server tells it."""
    return "mmproj" in PurePosixPath(name).name.lower()


def choose_gguf(names: Iterable[str], wanted: str | None, *, where: str) -> str:
    """Picks one of ``names``; of a split file the first part, when all of them are there.

    Args:
        names: relative paths, with ``/``; those that do not end in .gguf are ignored.
        wanted: in any case a path, a file name (of a split file: of any part, or without the part's number), the
            quantization that ends it (``Q4_K_M``), or a pattern with ``*`` and ``?``; None: the only one.
        where: folder or repository, for messages.

    Raises:
        CheckpointError: none or several fit (lists them), or a part is missing (names it).
    """
    files = _files(names)
    if wanted is None:
        found = [file for file in files if not file.is_projector]
        problem = "holds several .gguf files; name one with gguf_file" if found else "holds no .gguf file"
    else:
        found = next((hits for hits in _by_strictness(files, wanted) if hits), [])
        problem = f"holds several files that fit gguf_file {wanted!r}" if found else f"holds no gguf_file {wanted!r}"
    if len(found) == 1:
        found[0].require_all_shards(where)
        return found[0].shards[0]
    listed = ", ".join(file.shards[0] for file in (found or files)[:20])
    raise CheckpointError(f"{where} {problem}" + (f": {listed}" if listed else ""))


def gguf_patterns(wanted: str) -> list[str]:
    """Globs for the hubs' download functions that match what ``choose_gguf`` may pick for ``wanted``, all parts."""
    whole = _whole(wanted)
    is_file = whole.lower().endswith(ENDING)
    stem = whole[: -len(ENDING)] if is_file else whole
    glob = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else f"[{c}]" if c in "[]" else c for c in stem)
    heads = [glob, f"*/{glob}"]
    if not is_file and not _is_glob(wanted):
        heads.append(f"*[-._]{glob}")
    return [head + end for head in heads for end in (ENDING, PART_GLOB + ENDING)]


@dataclass(frozen=True)
class _File:
    """A .gguf file, or all parts of a split one.

    Attributes:
        name: relative path; of a split file the one that it would have in one piece.
        shards: relative paths of what is there, in order.
        count: parts that there should be.
    """

    name: str
    shards: tuple[str, ...]
    count: int

    @property
    def is_projector(self) -> bool:
        return names_projector(self.name)

    def require_all_shards(self, where: str) -> None:
        if SPLIT_NAME.fullmatch(self.shards[0]) is None:
            return
        stem = self.name.removesuffix(ENDING)
        missing = [shard for i in range(self.count) if (shard := shard_name(stem, i, self.count)) not in self.shards]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{where} holds {len(self.shards)} of {self.count} parts; missing: {missing[0]}{more}"
            )


def _files(names: Iterable[str]) -> list[_File]:
    shards: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(ENDING):
            split = SPLIT_NAME.fullmatch(name)
            shards.setdefault((_whole(name), int(split["count"]) if split else 0), []).append(name)
    return [_File(name, tuple(own), count) for (name, count), own in shards.items()]


def _by_strictness(files: list[_File], wanted: str) -> Iterable[list[_File]]:
    low = _whole(wanted).lower()
    yield [file for file in files if wanted in file.shards]
    yield [file for file in files if low in (file.name.lower(), PurePosixPath(file.name).name.lower())]
    models = [file for file in files if not file.is_projector]
    quantization = re.compile(rf"(?:^|[-._/]){re.escape(low)}\.gguf")
    yield [file for file in models if quantization.search(file.name.lower())]
    if _is_glob(wanted):
        glob = low.removesuffix(ENDING).replace("[", "[[]") + ENDING
        yield [file for file in models if fnmatchcase(file.name.lower(), glob)]
        yield [file for file in models if fnmatchcase(PurePosixPath(file.name).name.lower(), glob)]


def _is_glob(wanted: str) -> bool:
    return not {"*", "?"}.isdisjoint(wanted)


def _whole(name: str) -> str:
    """The name that a part's file would have in one piece; another name is itself."""
    split = SPLIT_NAME.fullmatch(name)
    return split["stem"] + ENDING if split else name
