"""Which modules of the product and of its tests import which, and what a change can therefore reach."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "models", "llmjax", "serve")  # each may import itself and those before it
CPU_LIBRARY = "llmjax.kernels.cpu.library"  # which loads what the C++ sources are compiled into


@functools.cache
def _statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """What a file imports, anywhere in it; each file is parsed once a process."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in _statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # a submodule, perhaps


def files(layer: str) -> list[Path]:
    """The Python files of a folder of the repository."""
    return sorted((ROOT / layer).rglob("*.py"))  # which does not follow the links in llmjax/


def modules(layers: Iterable[str] = LAYERS) -> dict[str, Path]:
    """Every module by its full name, a package by its own."""
    found = {}
    for layer in layers:
        for path in files(layer):
            parts = path.relative_to(ROOT).with_suffix("").parts
            inside = layer in LAYERS and layer != "llmjax"
            found[".".join(("llmjax", *parts) if inside else parts).removesuffix(".__init__")] = path
    return found


def graph(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Which modules each module imports, anywhere in it: functions and blocks for type checkers count too.

    ``from package import module`` is an import of the module alone, whatever the package's __init__ holds.
    """
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        others: set[str] = set()
        for node in _statements(path):
            if isinstance(node, ast.Import):
                others.update(alias.name for alias in node.names)
            else:
                assert node.level == 0 and node.module, f"{path}: imports are absolute"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                others |= {one if one in known else node.module for one in full}
        found[name] = (others & known.keys()) - {name}
    return found


def changed_since(commit: str) -> list[str]:
    """Paths of the files that differ from a commit, committed or not, new ones and those that are gone too.

    Raises:
        ValueError: git knows no such commit, or the folder is not a repository.
    """
    asked = (["git", "diff", "--name-only", commit, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    paths: list[str] = []
    for command in asked:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
        paths += done.stdout.splitlines()
    return paths


def reached(changed: Iterable[str]) -> set[str] | None:
    """The test files that a change can reach.

    Args:
        changed: paths of files in the repository, relative to it.

    Returns:
        Paths of test files, relative to the repository: those that import a changed module, through whatever others,
        and all of a folder in ``tests/`` where data changed. None: a file changed of which nobody can say
        whom it concerns, so all tests are meant.
    """
    known = modules((*LAYERS, "benchmarks", "tests"))
    names = {str(path.relative_to(ROOT)): name for name, path in known.items()}
    roots: set[str] = set()
    folders: set[str] = set()
    for path in changed:
        if path == "tests/conftest.py":
            return None
        of_tests = Path(path).parts[:2]
        if of_tests[0] == "tests" and len(Path(path).parts) > 2 and path not in names:
            folders.add("/".join(of_tests))
        elif path in names:
            roots.add(names[path])
        elif path.startswith("kernels/cpu/"):
            roots.add(CPU_LIBRARY)
        elif path.startswith(("web/", "serve/web/")):  # the chat page and what it is built into
            folders.add("tests/web")
        elif not path.endswith(".md"):
            return None
    wanted = _importers(_with_fixtures(graph(known)), roots)
    paths = {str(known[name].relative_to(ROOT)) for name in wanted}
    tests = [str(path.relative_to(ROOT)) for path in files("tests") if path.name.startswith("test_")]
    return {test for test in tests if test in paths or "/".join(Path(test).parts[:2]) in folders}


def _with_fixtures(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Tests use what the ``conftest`` modules of their folders import; the one for all tests is left out."""
    found = {}
    for name, others in edges.items():
        folders = name.split(".")[:-1] if name.startswith("tests.") else []
        beside = {".".join([*folders[:depth], "conftest"]) for depth in range(2, len(folders) + 1)}
        found[name] = others | ((beside & edges.keys()) - {name})
    return found


def closure(edges: Mapping[str, set[str]], roots: Iterable[str]) -> set[str]:
    """The roots and all that edges lead to from them, directly or through others; some names have no edges."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += edges.get(name, ())
    return reached


def _importers(edges: Mapping[str, set[str]], roots: Iterable[str]) -> set[str]:
    """Some modules and all that import them, directly or not."""
    importers: dict[str, set[str]] = {}
    for name, others in edges.items():
        for other in others:
            importers.setdefault(other, set()).add(name)
    return closure(importers, roots)
