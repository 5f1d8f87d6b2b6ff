"""Dependencies point one way, serve → llmjax → models → kernels; those inside llmjax too, and none goes in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # no device computes here

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "models", "llmjax", "serve")  # each may import itself and those before it

# The packages and modules of llmjax, each importing only what stands before it or with it.
ORDER = (
    ("kernels",),
    ("models",),
    ("errors", "version", "system", "collector", "characters", "text_file", "progress", "frames", "limited_process"),
    ("speculative", "kv_events", "kv_transfer"),
    ("config", "settings", "migration", "config_file", "inputs"),
    ("host_memory", "machine_share", "cpu_affinity", "launcher", "platforms"),
    ("weights",),
    ("checkpoint",),
    ("quantization",),
    ("sampling", "outputs", "pooling_params"),
    ("parsing",),
    ("templating", "tokenizer"),
    ("constraints",),
    ("parallel",),
    ("engine",),
    ("evaluation",),
    ("llm", "async_llm", "conversion"),
    ("",),  # llmjax/__init__.py
    ("cli", "bench", "serve", "deploy", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# The console script starts the server, or does its work on a file; nothing else in llmjax knows of it.
EXCEPTIONS = {("llmjax/cli/serve.py", "serve"), ("llmjax/cli/run_batch.py", "serve"), ("llmjax/deploy/ray.py", "serve")}


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
def test_imports_point_downward(layer: str) -> None:
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


def modules() -> dict[str, Path]:
    """Every module by its full name, a package by its own."""
    found = {}
    for layer in LAYERS:
        for path in files(layer):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("llmjax", *parts) if layer != "llmjax" else parts).removesuffix(".__init__")
            found[name] = path
    return found


def graph() -> dict[str, set[str]]:
    """Which modules each module imports, anywhere in it: functions and blocks for type checkers count too.

    ``from package import module`` is an import of the module alone, whatever the package's __init__ holds.
    """
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        others: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                others.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{path}: imports are absolute"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                others |= {one if one in known else node.module for one in full}
        found[name] = (others & known.keys()) - {name}
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g", "a"}, "g": {"f"}}
    assert sorted(circles(edges)) == [["a", "b", "c"], ["f", "g"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other() -> None:
    assert circles(graph()) == []


def test_packages_stand_in_order() -> None:
    def rank(name: str) -> int:
        place = name.split(".")[1] if "." in name else ""
        assert place in RANK, f"{name}: add {place!r} to ORDER"
        return RANK[place]

    wrong = {(name, other) for name, others in graph().items() for other in others if rank(other) > rank(name)}
    assert wrong == set()


def test_the_graph_has_imports_of_every_kind() -> None:
    edges = graph()
    assert "llmjax.errors" in edges["llmjax.config"]
    assert "llmjax.weights.ggml.unpack" in edges["llmjax.weights.ggml.types"]  # from package import module
    assert "llmjax.conversion" in edges["llmjax"]  # for type checkers
    assert "llmjax.conversion" in edges["llmjax.cli.quantize"]  # in a function
    assert len(edges) > 200


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


def test_kernels_know_no_lowering_of_pallas() -> None:
    """Triton's is known in one module, Mosaic's in the kernels that are written for it."""
    found = {(path.name, name) for path in files("kernels") for name in imports(path) if "jax.experimental" in name}
    assert {file for file, name in found if name.endswith(".triton")} == {"lowering.py"}
    assert {file for file, _ in found} == {"lowering.py", "mosaic_prefill.py", "threads.py"}


def test_no_module_is_called_utils() -> None:
    assert [path for layer in LAYERS for path in files(layer) if path.stem in ("utils", "util", "helpers")] == []


# What stands around the engine; its inside (scheduler, pages, programs …) is nobody else's affair.
ENGINES_OUTSIDE = {
    "beam_search",
    "build",
    "client",
    "compile_threads",
    "data_parallel",
    "follower",
    "frontend",
    "info",
    "inline",
    "loop",
    "memory",
    "pairs",
    "process",
    "report",
    "request",
    "scores",
    "setup",
    "stats",
    "vectors",
    "waited",
}


def test_nobody_reaches_into_the_engine() -> None:
    found = {
        (str(path.relative_to(ROOT)), name.split(".")[2])
        for layer in ("llmjax", "serve")
        for path in files(layer)
        if not path.is_relative_to(ROOT / "llmjax" / "engine")
        for name in imports(path)
        if name.startswith("llmjax.engine.")
    }
    assert ("serve/run.py", "report") in found
    inside = {(path, module) for path, module in found if module not in ENGINES_OUTSIDE}
    assert inside == {("llmjax/llm.py", "engine")}  # the type of what measurements and tests look into


def home(path: str) -> Path:
    """A file as docs/architecture.md names it."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "llmjax" / path


def test_the_map_and_the_glossary_name_what_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    paths = [path for cell in named for path in re.findall(r"`([a-z_/]+(?:\.py|/))`", cell)]
    assert len(paths) > 40
    assert [path for path in paths if not home(path).exists()] == []
    glossary = page.partition("## Glossary")[2]
    places = re.findall(r"((?:`[A-Za-z_.]+`, )*`[A-Za-z_.]+`) in `([a-z_/]+\.py)`", glossary)
    assert len(places) > 20
    for names, path in places:
        text = home(path).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_]+)[`.]", names):
            assert re.search(rf"^(?:class {name}\b|{name}\b.* = )", text, re.MULTILINE), (name, path)
