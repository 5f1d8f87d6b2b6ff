"""Pages of the docs that are written, or have tables that are, from tables and tests.

``python -m tests.pages`` writes them; with ``--check``, as ``make check`` calls it, it says which are out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import records
from benchmarks.comparison import OURS
from llmjax.migration import page as flags
from tests import structure
from tests.models import supported
from tests.parallel import limits
from tests.reference import environment, errors, metrics, parsers, python, routes, settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


FIND = re.compile(r"## Find\n.*?(?=\n## )", re.DOTALL)


MEASURED = "SmolLM2-135M Q4_1"  # the weights of README.md's table of speeds


def between(text: str, name: str, content: str) -> str:
    """A text with other content after ``<!-- name -->``, up to the next ``<!-- -->``."""
    before, mark, rest = text.partition(f"<!-- {name} -->")
    _, end, after = rest.partition("<!-- -->")
    assert mark and end, name
    return f"{before}{mark}{content}{end}{after}"


def readme() -> str:
    """README.md with the number of architectures that there are, what docs/index.md says of where to find what, and the
    newest speeds of each processor."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = between(text, "architectures", f"{len(supported.BEST_KNOWN)} architectures")
    speeds = records.summary(records.all_records(), model=MEASURED, ours=OURS)
    text = between(text, "speed", f"\n{speeds}\n")
    found = FIND.search((DOCS / "index.md").read_text(encoding="utf-8"))
    assert found is not None
    section = re.sub(r"\]\((?!https?:)", "](docs/", found[0]).replace("](docs/../", "](")
    return FIND.sub(lambda _: section, text)


def benchmarks() -> str:
    """benchmarks/README.md with the newest figures of each processor beside other engines."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    return between(text, "peers", f"\n{records.whole(records.all_records(), ours=OURS)}\n")


PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / "README.md": readme,
    ROOT / "benchmarks" / "README.md": benchmarks,
    DOCS / "flags.md": flags.page,
    DOCS / "modules.md": structure.page,
    DOCS / "reference" / "environment.md": environment.page,
    DOCS / "reference" / "errors.md": errors.page,
    DOCS / "reference" / "metrics.md": metrics.page,
    DOCS / "reference" / "parsers.md": parsers.page,
    DOCS / "reference" / "python.md": python.page,
    DOCS / "reference" / "routes.md": routes.page,
    DOCS / "reference" / "settings.md": settings.page,
    DOCS / "scaling.md": limits.page,
    DOCS / "supported-models.md": supported.page,
}


def outdated(pages: Mapping[Path, Callable[[], str]] = PAGES) -> list[Path]:
    """The pages that differ from what would be written."""
    return [path for path, page in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != page()]


def main(argv: list[str]) -> int | str:
    found = outdated()
    if argv == ["--check"]:
        names = ", ".join(str(path.relative_to(ROOT)) for path in found)
        return f"out of date: {names}; python -m tests.pages writes them" if found else 0
    for path in found:
        path.write_text(PAGES[path](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
