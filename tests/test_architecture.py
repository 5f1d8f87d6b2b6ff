"""Dependencies point one way: serve → llmjax → models → kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "models", "llmjax", "serve")  # each may import itself and those before it

# The console script starts the server; nothing else in llmjax knows of it.
EXCEPTIONS = {("llmjax/cli/serve.py", "serve")}


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # a submodule, perhaps


def layer_of(name: str) -> str:
    """The layer of a module: ``llmjax.kernels.blocks`` lies in kernels, ``llmjax.errors`` in llmjax, numpy in none."""
    package, *rest = name.split(".")
    if package != "llmjax":
        return ""
    return rest[0] if rest and rest[0] in LAYERS else package


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))  # which does not follow the links in llmjax/


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    found = {
        (str(path.relative_to(ROOT)), layer_of(name))
        for path in files(layer)
        for name in imports(path)
        if layer_of(name) in above
    }
    assert found - EXCEPTIONS == set()


def test_the_layers_are_there_and_are_parsed() -> None:
    assert all(files(layer) for layer in LAYERS)
    assert "llmjax.errors" in set(imports(ROOT / "llmjax" / "config.py"))


def test_the_engine_knows_neither_server_nor_command_line() -> None:
    forbidden = ("llmjax.serve", "starlette", "uvicorn", "llmjax.cli", "llmjax.bench", "httpx")
    for path in files("llmjax/engine"):
        wrong = [name for name in imports(path) if any(name == f or name.startswith(f + ".") for f in forbidden)]
        assert wrong == [], path


def test_the_library_knows_no_command_line() -> None:
    for path in files("llmjax"):
        inside = path.relative_to(ROOT / "llmjax").parts[0]
        if inside not in ("cli", "bench", "__main__.py"):
            wrong = [name for name in imports(path) if name.startswith(("llmjax.cli", "llmjax.bench"))]
            assert wrong == [], path


def test_no_module_is_called_utils() -> None:
    assert [path for layer in LAYERS for path in files(layer) if path.stem in ("utils", "util", "helpers")] == []
