"""``llmjax show``: one of the models on this machine, what it is and how to serve it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from llmjax.checkpoint.store import PULLED, StoredModel, stored_models
from llmjax.cli.inspect import Facts, facts_of, general, pairs
from llmjax.cli.parser import Parser
from llmjax.cli.store import add_download_dir, size, stored
from llmjax.config import EngineConfig
from llmjax.errors import LLMJaxError

CARD = "README.md"


def main(argv: list[str]) -> int:
    """Prints what is known of a stored model; downloads nothing.

    Raises:
        LLMJaxError: it is not on this machine, or ``--gguf-file`` names none of its files.
    """
    parser = Parser(prog="llmjax show", description="Show one of the models on this machine. Nothing is downloaded.")
    parser.add_argument("model", metavar="MODEL", help="a name that llmjax list shows; name:Q4_K_M for one file of it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_download_dir(parser)
    values = parser.parse(argv)
    models = stored_models(values.download_dir)
    name, quantization = split_name(values.model)
    if any(each.name.removeprefix(PULLED) == values.model.removeprefix(PULLED) for each in models):
        name, quantization = values.model, ""  # what was pulled may have a tag
    model = stored(name, models)
    files = {} if len(model.ggufs) < 2 else {file: _size_in(model.folder, file) for file in model.ggufs}
    content = None
    if quantization or not files:
        config = EngineConfig(
            model=f"{model.name}:{quantization}" if quantization else model.name,
            download_dir=values.download_dir,
            offline=True,
        )
        try:
            content = facts_of(config)
        except LLMJaxError as error:
            if model.whole:
                raise
            content = {"problem": str(error)}
    if values.json:
        stored_facts = {**asdict(model), "folder": str(model.folder), "files": files}
        print(json.dumps({**stored_facts, "content": content}, indent=2, ensure_ascii=False, default=str))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(pairs(_rows(model, files, content)), highlight=False, markup=False)
    chosen = quantization or next(iter(files), "")
    served = f"{model.name}:{chosen}" if chosen else model.name
    where = ["--download-dir", values.download_dir] if values.download_dir else []
    print(f"To serve it: {shlex.join(['llmjax', 'serve', served, *where])}", file=sys.stderr)
    return 0


def split_name(name: str) -> tuple[str, str]:
    """A model's name, and which of its GGUF files is meant: ``org/name:Q4_K_M``; of a scheme the first colon is part
    of the name."""
    scheme, mark, rest = name.rpartition("://")
    repository, _, quantization = rest.partition(":")
    return scheme + mark + repository, quantization


def _rows(model: StoredModel, files: Mapping[str, int], content: Facts | None) -> Iterator[tuple[str, str]]:
    yield "model", model.name
    yield "files", model.holds if model.whole else f"{model.holds} (incomplete: llmjax pull goes on with it)".strip()
    yield "size", size(model.num_bytes)
    yield "folder", str(model.folder)
    yield "last used", datetime.fromtimestamp(model.used).strftime("%Y-%m-%d %H:%M")
    for file, num_bytes in files.items():
        yield "file", f"{file} ({size(num_bytes)})"
    if content is not None and set(content) != {"problem"}:
        yield from (row for row in general(content) if row[0] != "container")
        if content["memory"] is not None:
            yield "weights", f"{size(content['memory']['weights'])} when loaded"
    elif content is not None:
        yield "problem", content["problem"]
    if license := _license(model):
        yield "license", license


def _size_in(folder: Path, file: str) -> int:
    return max((path.stat().st_size for path in folder.rglob(Path(file).name)), default=0)


def _license(model: StoredModel) -> str:
    """What the model's card says; empty: there is none."""
    import yaml

    for card in model.folder.rglob(CARD):
        head = card.read_text(encoding="utf-8", errors="replace").split("---\n")
        if len(head) > 2 and not head[0].strip():
            try:
                said: Any = yaml.safe_load(head[1])
            except yaml.YAMLError:
                continue
            if isinstance(said, dict) and said.get("license"):
                return str(said.get("license_name") or said["license"])
    return ""
