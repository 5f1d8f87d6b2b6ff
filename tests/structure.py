"""The size and shape of the product: lines of each folder, what an entry point imports, and one line for each module.

``python -m tests.structure`` prints the first two tables. ``docs/modules.md`` is the third one, written by
``python -m tests.pages`` from the first lines of the modules' docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.import_graph import LAYERS, ROOT, closure, graph, modules

ENTRIES = (
    "llmjax.engine.core.engine",
    "llmjax.engine.device.executor",
    "llmjax.engine.device.runner",
    "llmjax.engine.build",
    "llmjax.llm",
    "llmjax.async_llm",
    "llmjax.models.registry",
    "llmjax.serve.app",
)

HEAD = """# Modules

Every module of the product with the first line of its docstring, in the order in which folders import each other: what
stands further down may import what stands above it. `python -m tests.pages` writes this page; `make check` compares it.
[The tour](tour.md) is the place to start; [design](design.md) says why things are as they are.
"""


def num_lines(paths: Iterable[Path]) -> int:
    """Lines of some files together."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def first_sentence(path: Path) -> str:
    """What a module says of itself first: its docstring up to the first blank line or the end of the sentence."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=(?<! al)\.) (?=[A-Z`])", paragraph, maxsplit=1)[0]


def page() -> str:
    """The text of ``docs/modules.md``."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    paths = [path for path in modules().values() if path.name not in ("__init__.py", "__main__.py")]
    by_layer = sorted(paths, key=lambda path: (LAYERS.index(path.relative_to(ROOT).parts[0]), path.parent, path.name))
    for folder, inside in groupby(by_layer, key=lambda path: path.parent):
        yield f"## `{folder.relative_to(ROOT)}/`\n\n| module | idea |\n|---|---|"
        for path in inside:
            sentence = first_sentence(path).replace("|", "\\|")
            yield f"| `{path.name}` | {sentence} |"
        yield ""


def _print(console: Console) -> None:
    known = modules()
    edges = graph(known)
    sizes = Table("folder", "files", "lines", title="Lines of the product")
    for folder, some in groupby(sorted(known.values(), key=lambda path: (path.parent, path.name)), lambda p: p.parent):
        inside = list(some)
        sizes.add_row(str(folder.relative_to(ROOT)), f"{len(inside)}", f"{num_lines(inside):,}")
    sizes.add_row("all", f"{len(known)}", f"{num_lines(known.values()):,}")
    closures = Table("entry point", "modules", "lines", "of the engine", title="What an entry point imports")
    for entry in ENTRIES:
        if entry in known:
            reached = closure(edges, [entry])
            inside = [known[name] for name in reached if name.startswith("llmjax.engine.")]
            lines = f"{num_lines(known[name] for name in reached):,}"
            closures.add_row(entry, f"{len(reached)}", lines, f"{len(inside)} modules, {num_lines(inside):,} lines")
    console.print(sizes, closures)


def main() -> int:
    """Prints both tables; fails for nothing."""
    _print(Console(width=120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
