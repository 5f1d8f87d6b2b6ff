"""JAX's settings: the memory pool of a card, where programs are kept, and that only one module sets them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from llmjax import jax_settings, platforms
from llmjax.config import EngineConfig
from llmjax.platforms import select_platform

ROOT = Path(__file__).parents[1]


def test_one_module_sets_them() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("llmjax", "serve", "models", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if "jax.config.update(" in path.read_text()
    }
    assert found == {"llmjax/jax_settings.py"}


@pytest.fixture
def pool_options() -> Iterator[None]:
    before = jax.config.jax_pjrt_client_create_options
    yield
    jax.config.update("jax_pjrt_client_create_options", before)


@pytest.fixture
def unopened(pool_options: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in, nothing that the user has set, and a process that has not used a device."""
    monkeypatch.setattr(platforms, "cuda_plugin", lambda: "plug-in 1.2")
    monkeypatch.setattr(jax_settings.xla_bridge, "backends_are_initialized", lambda: False)
    for name in jax_settings.POOL_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_pool_of_a_card_is_the_share_that_is_asked_for(unopened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    select_platform(EngineConfig(device="cpu", gpu_memory_utilization=0.7))
    assert jax.config.jax_pjrt_client_create_options is None
    select_platform(EngineConfig(gpu_memory_utilization=0.7))
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.7}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    select_platform(EngineConfig(gpu_memory_utilization=0.6))
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.7}  # left to the variable
    assert jax_settings.pool_share() is None


def test_options_of_the_user_stay(unopened: None, caplog: pytest.LogCaptureFixture) -> None:
    jax.config.update("jax_pjrt_client_create_options", "memory_fraction:0.5")
    select_platform(EngineConfig(gpu_memory_utilization=0.7))
    assert jax.config.jax_pjrt_client_create_options == "memory_fraction:0.5"
    assert jax_settings.pool_share() is None
    assert [record.getMessage() for record in caplog.records] == [
        "gpu_memory_utilization has no effect: JAX_PJRT_CLIENT_CREATE_OPTIONS is set to memory_fraction:0.5"
    ]


def test_a_pool_that_is_open_already_keeps_its_size(
    unopened: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = SimpleNamespace(platform="gpu", client=None)
    select_platform(EngineConfig(gpu_memory_utilization=0.7))
    monkeypatch.setattr(jax_settings.xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda *_: [card])
    caplog.set_level(logging.WARNING)
    select_platform(EngineConfig(gpu_memory_utilization=0.7))
    assert not caplog.records
    select_platform(EngineConfig(gpu_memory_utilization=0.8))
    jax.config.update("jax_pjrt_client_create_options", None)  # something else has opened the card
    select_platform(EngineConfig(gpu_memory_utilization=0.8))
    assert [record.getMessage() for record in caplog.records] == [
        "gpu_memory_utilization 0.8 has no effect: JAX has already opened the card in this process, "
        f"with a pool of {share} of its memory"
        for share in (0.7, 0.75)
    ]


@pytest.fixture
def cache_settings() -> Iterator[None]:
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_compilation_cache_that_cannot_be_made_is_a_warning(
    cache_settings: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    jax_settings.use_compilation_cache(str(tmp_path / "file" / "cache"))
    assert not jax.config.jax_enable_compilation_cache
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path}/file/cache: compiled programs are not kept" in record.getMessage()
    jax_settings.use_compilation_cache(str(tmp_path / "cache"))  # a later engine has one again
    assert jax.config.jax_enable_compilation_cache
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")


def test_a_read_only_compilation_cache_is_read(
    cache_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(jax_settings.tempfile, "TemporaryFile", refuse)
    jax_settings.use_compilation_cache(str(tmp_path))
    assert jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir == str(tmp_path)
    (record,) = caplog.records
    assert record.getMessage().endswith("programs are read, but new ones are not kept: Read-only file system")
