"""Dependencies point one way, serve → llmjax → models → kernels; those inside llmjax too, and none goes in a circle."""

from __future__ import annotations

import pytest

from tests.import_graph import LAYERS, ROOT, files, graph, imports, modules, reached

pytestmark = pytest.mark.smoke

# The packages and modules of llmjax, each importing only what stands before it or with it.
ORDER = (
    ("kernels",),
    ("models",),
    (
        "errors",
        "version",
        "system",
        "collector",
        "characters",
        "base64_text",
        "text_file",
        "progress",
        "frames",
        "limited_process",
    ),
    ("speculative", "kv_events", "kv_transfer", "adapter_settings", "turns", "arrays", "step_sizes", "durations"),
    ("config", "settings", "migration", "config_file", "inputs"),
    ("host_memory", "machine_share", "cpu_affinity", "launcher", "jax_settings", "platforms"),
    ("weights",),
    ("checkpoint",),
    ("pulled",),
    ("adapters",),
    ("quantization",),
    ("sampling", "outputs", "pooling_params"),
    ("parsing",),
    ("media",),
    ("templating", "tokenizer"),
    ("constraints",),
    ("parallel",),
    ("engine",),
    ("evaluation",),
    ("llm", "async_llm", "conversion"),
    ("",),  # llmjax/__init__.py
    ("tune", "several"),
    ("cli", "bench", "serve", "deploy", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# The console script starts the server, or does its work on a file; nothing else in llmjax knows of it.
EXCEPTIONS = {("llmjax/cli/serve.py", "serve"), ("llmjax/cli/run_batch.py", "serve"), ("llmjax/deploy/ray.py", "serve")}


def layer_of(name: str) -> str:
    """The layer of a module: ``llmjax.kernels.blocks`` lies in kernels, ``llmjax.errors`` in llmjax, numpy in none."""
    package, *rest = name.split(".")
    if package != "llmjax":
        return ""
    return rest[0] if rest and rest[0] in LAYERS else package


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
    assert circles(graph(modules())) == []


def test_packages_stand_in_order() -> None:
    def rank(name: str) -> int:
        place = name.split(".")[1] if "." in name else ""
        assert place in RANK, f"{name}: add {place!r} to ORDER"
        return RANK[place]

    wrong = {(name, other) for name, others in graph(modules()).items() for other in others if rank(other) > rank(name)}
    assert wrong == set()


def test_the_graph_has_imports_of_every_kind() -> None:
    edges = graph(modules())
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


def test_the_core_of_the_engine_is_given_what_it_uses() -> None:
    """Devices, programs, ranks and tiers come to it as protocols of its own; a drafter is a part of a sequence."""
    allowed = ("core.", "constraint", "free_run", "drafts.drafter")
    known = modules(["llmjax"]).keys()
    for path in files("llmjax/engine/core"):
        names = list(imports(path))
        own = {
            name.removeprefix("llmjax.engine.") for name in names if name.startswith("llmjax.engine.") and name in known
        }
        assert {name for name in own if not name.startswith(allowed)} <= {"core"}, path
        assert not any(name == "jax" or name.startswith("jax.") for name in names), path


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
    "build",
    "clients.client",
    "clients.data_parallel",
    "clients.inline",
    "clients.loop",
    "clients.process",
    "clients.restarts",
    "clients.waited",
    "core.media",
    "core.request",
    "core.stats",
    "front.adapters",
    "front.beam_search",
    "front.chat_images",
    "front.images",
    "front.limits",
    "front.pairs",
    "front.requests",
    "front.scores",
    "front.vectors",
    "info",
    "loading.memory",
    "need",
    "programs.threads",
    "ranks.worker",
    "report",
    "setup",
    "tuning.choose",
    "tuning.kept",
}


def test_nobody_reaches_into_the_engine() -> None:
    known = modules(["llmjax"]).keys()
    found = {
        (str(path.relative_to(ROOT)), name.removeprefix("llmjax.engine."))
        for layer in ("llmjax", "serve")
        for path in files(layer)
        if not path.is_relative_to(ROOT / "llmjax" / "engine")
        for name in imports(path)
        if name.startswith("llmjax.engine.") and name in known
    }
    assert ("serve/run.py", "report") in found
    inside = {(path, module) for path, module in found if module not in ENGINES_OUTSIDE}
    assert inside == {("llmjax/llm.py", "loaded")}  # the type of what measurements and tests look into


def test_a_change_reaches_those_who_import_it() -> None:
    by_scheduler = reached(["llmjax/engine/core/scheduler.py"])
    assert by_scheduler is not None
    assert {"tests/engine/core/test_scheduler.py", "tests/serve/test_chat.py"} <= by_scheduler
    assert "tests/tokenizer/test_detokenizer.py" not in by_scheduler
    assert reached(["serve/sse.py"]) >= {"tests/serve/test_sse.py"}  # type: ignore[operator]
    by_source = reached(["kernels/cpu/src/attention.cc"])
    assert by_source is not None and "tests/kernels/test_cpu_attention.py" in by_source


def test_a_change_of_data_reaches_the_tests_beside_it() -> None:
    assert reached(["tests/parsing/no_such_file.json"]) == {
        f"tests/parsing/{path.name}" for path in (ROOT / "tests" / "parsing").glob("test_*.py")
    }
    assert reached(["README.md"]) == set()


def test_a_change_of_the_page_reaches_the_tests_in_a_browser() -> None:
    assert "tests/web/test_page.py" in (reached(["web/src/app.tsx", "serve/web/app.js"]) or set())


@pytest.mark.parametrize("path", ["pyproject.toml", "Makefile", ".ci/oldest.txt"])
def test_what_nobody_imports_may_concern_all(path: str) -> None:
    assert reached([path]) is None


def test_pages_are_planned_without_what_moves_them() -> None:
    """The KV cache knows the tiers below the device, and whatever hears of its pages, by interfaces alone."""
    apart = ("tiers", "ranks", "programs", "clients", "front", "device", "loading")
    forbidden = ("jax", *(f"llmjax.engine.{folder}" for folder in apart))
    for module in ("kv_cache", "layer_states", "listener", "page_pool", "prefix", "tier"):
        path = ROOT / "llmjax" / "engine" / "core" / f"{module}.py"
        assert [name for name in imports(path) if name.startswith(forbidden)] == [], path
