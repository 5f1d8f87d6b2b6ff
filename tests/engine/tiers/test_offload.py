"""Pages that leave the device and come back: over a simulated device that knows what every page holds, on disk, and in
whole engines."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.tier import KeptPage
from llmjax.engine.device.page_moves import PageMover, stacks_of
from llmjax.engine.loading.memory import plan_kv
from llmjax.engine.loading.model import load_model
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.tiers import disk as disk_pages
from llmjax.engine.tiers import offload
from llmjax.engine.tiers.disk import DiskPages
from llmjax.engine.tiers.host import HostPages, PageFormat
from llmjax.engine.tiers.offload import Offload
from llmjax.engine.tiers.setup import pages_identity, tier_of
from llmjax.errors import ConfigError
from llmjax.kernels.attention import KVLayout
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Span
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN
from tests.engine.compilers import compiler_of
from tests.engine.core.test_scheduler import (
    Arrival,
    Shape,
    SimulatedEngine,
    alone,
    check_idle,
    check_results,
    prompt_of,
    request,
    run,
    shapes,
    workloads,
)
from tests.levels import at_levels

pytestmark = pytest.mark.usefixtures("patience")

ALL, STATE = AllTokens(), LastState()

SMALL = Shape(
    page_size=4,
    spans=(ALL,),
    num_pages=(9,),
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=32,
    host_pages=100,
)


def ask(engine: SimulatedEngine, name: str, prompt: list[int]) -> int:
    """Runs a request alone; tokens of its prompt that were found."""
    before = engine.totals.prefix_cache_hits
    found = run(engine, [Arrival(request(name, prompt, max_tokens=3), 0)], max_steps=2000)[name, 0]
    assert found.tokens == alone(prompt, 3, 3, frozenset())
    return engine.totals.prefix_cache_hits - before


@pytest.mark.parametrize(
    ("spans", "num_pages", "expected"),
    [
        ((ALL,), (9,), 24),
        ((ALL, LastTokens(6)), (9, 9), 24),
        ((LastTokens(6),), (9,), 24),
        ((ALL, STATE), (9, 4), 24),
        ((STATE,), (4,), 24),
    ],
)
def test_an_evicted_prefix_comes_back(spans: tuple[Span, ...], num_pages: tuple[int, ...], expected: int) -> None:
    engine = SimulatedEngine(replace(SMALL, spans=spans, num_pages=num_pages))
    prompt = prompt_of(25)
    assert ask(engine, "a", prompt) == 0
    for seed in (5, 6, 7):
        ask(engine, str(seed), prompt_of(25, seed))
    assert engine.totals.offload.host_hits == 0
    assert ask(engine, "b", prompt) == expected
    assert engine.totals.offload.host_hits == expected
    assert engine.totals.offload.device_to_host_bytes >= engine.totals.offload.host_to_device_bytes > 0
    assert ask(engine, "c", prompt) == expected
    assert engine.totals.offload.host_hits == expected  # it was on the device


def test_without_room_in_host_memory_a_prefix_is_lost() -> None:
    engine = SimulatedEngine(replace(SMALL, host_pages=1))
    prompt = prompt_of(25)
    for seed in (0, 5, 6, 7):
        ask(engine, str(seed), prompt_of(25, seed))
    assert ask(engine, "b", prompt) == 0


def test_after_a_reset_nothing_is_found(tmp_path: Path) -> None:
    shape = replace(SMALL, folder=tmp_path)
    engine = SimulatedEngine(shape)
    for seed in (0, 5, 6, 7):
        ask(engine, str(seed), prompt_of(25, seed))
    engine.kv.reset_prefix_cache()
    assert ask(engine, "b", prompt_of(25, 5)) == 0
    engine.keep()
    assert ask(SimulatedEngine(shape), "b", prompt_of(25, 6)) == 0
    assert ask(SimulatedEngine(shape), "c", prompt_of(25, 5)) == 24  # computed since


def test_a_device_that_loses_its_pages_takes_no_others_along() -> None:
    """An engine that sleeps loses its device's pages."""
    engine = SimulatedEngine(SMALL)
    for seed in (0, 5, 6, 7):
        ask(engine, str(seed), prompt_of(25, seed))
    (pool,) = engine.kv.pools
    pool.release(pool.allocate(pool.available) or [])  # what was cached is planned to be read out
    engine.kv.reset_prefix_cache(offloaded=False)
    for content in engine.runner.content:  # type: ignore[attr-defined]
        content.clear()
    assert ask(engine, "a", prompt_of(25, 7)) < 24
    assert ask(engine, "b", prompt_of(25)) == 24


def test_what_cannot_be_relied_on_is_found_nowhere(tmp_path: Path) -> None:
    engine = SimulatedEngine(replace(SMALL, folder=tmp_path))
    prompt = prompt_of(25)
    engine.add(request("a", prompt, max_tokens=3))
    engine.step()
    (sequence,) = engine.scheduler.running
    while sequence.num_computed < 25:
        engine.step()
    engine._processor.fail(sequence)
    for seed in (5, 6, 7):
        ask(engine, str(seed), prompt_of(25, seed))
    assert ask(engine, "b", prompt) == 0


def test_what_was_restored_and_cannot_be_relied_on_is_dropped_from_host_memory() -> None:
    engine = SimulatedEngine(SMALL)
    prompt = prompt_of(25)
    for name, seed in (("a", 0), ("b", 5), ("c", 6), ("d", 7)):
        ask(engine, name, prompt_of(25, seed))
    engine.add(request("e", prompt, max_tokens=3))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.num_cached_tokens == 24  # its pages are still in host memory, too
    engine._processor.fail(sequence)
    for name, seed in (("f", 5), ("g", 6), ("h", 7)):
        ask(engine, name, prompt_of(25, seed))
    assert ask(engine, "i", prompt) == 0


def test_a_restart_finds_what_was_evicted_and_what_was_cached(tmp_path: Path) -> None:
    shape = replace(SMALL, folder=tmp_path)
    engine = SimulatedEngine(shape)
    for seed in range(4):
        ask(engine, str(seed), prompt_of(25, seed))
    engine.keep()
    again = SimulatedEngine(shape)
    for seed in range(4):
        assert ask(again, str(seed), prompt_of(25, seed)) == 24
    assert again.totals.offload.disk_hits == 4 * 24
    assert again.totals.offload.host_hits == 0


def test_a_request_that_is_given_up_while_pages_come_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SMALL, folder=tmp_path)
    engine = SimulatedEngine(shape)
    ask(engine, "a", prompt_of(25))
    engine.keep()
    again = SimulatedEngine(shape)
    again.add(request("a", prompt_of(25), max_tokens=3))
    assert len(again.scheduler.held) == 1
    assert [output.finish_reason for output in again.abort("a")] == ["abort"]  # type: ignore[arg-type]
    assert again.idle
    assert ask(again, "b", prompt_of(25)) == 24


def test_a_disk_that_hangs_keeps_no_request_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SMALL, folder=tmp_path)
    engine = SimulatedEngine(shape)
    ask(engine, "a", prompt_of(25))
    engine.keep()
    monkeypatch.setattr(offload, "FETCH_SECONDS", 0.0)
    monkeypatch.setattr(Offload, "_read", lambda self, fetch: None)
    assert ask(SimulatedEngine(shape), "a", prompt_of(25)) == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_random_workloads_over_a_restart(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every read of a page finds the request's own history, as with a device alone, from whichever tier it has come."""
    shape = replace(data.draw(shapes()), share_prefixes=True, host_pages=data.draw(st.integers(1, 20)))
    shape = replace(shape, folder=tmp_path_factory.mktemp("pages"))
    arrivals = data.draw(workloads(shape))
    for _ in range(2):
        engine = SimulatedEngine(shape)
        check_results(arrivals, run(engine, arrivals, max_steps=10_000))
        check_idle(engine)
        assert isinstance(engine.kv.tier, Offload) and not engine.kv.tier._fetches
        engine.keep()


def page_of(seed: int, *, size: int = 4) -> tuple[PageKey, KeptPage]:
    key = PageKey.chain(b"", tuple(range(seed, seed + size)))
    rng = np.random.default_rng(seed)
    content = (rng.standard_normal((2, 3)).astype(np.float32), rng.integers(0, 255, (5,)).astype(np.uint8))
    return key, KeptPage(key.tokens, content)


SHAPES = (jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((5,), np.uint8))
FILE_BYTES = disk_pages.HEADER_BYTES + 4 * 4 + 24 + 5


def disk_of(folder: Path, *, identity: str = "0a", limit: int = 2**20) -> DiskPages:
    return DiskPages(folder, identity=identity, limit=limit, formats=[PageFormat(4, SHAPES)] * 2)


def test_disk_keeps_pages_as_they_are(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    pages = {(group, key.digest): page for group in (0, 1) for key, page in map(page_of, range(5))}
    for name, page in pages.items():
        assert name not in disk
        assert disk.write(name, page) == FILE_BYTES
        assert disk.write(name, page) == 0  # it is there
    later = disk_of(tmp_path)
    assert later.num_bytes == disk.num_bytes == len(pages) * FILE_BYTES
    for name, page in pages.items():
        assert name in later
        found = later.read(name)
        assert found is not None
        assert found.tokens == page.tokens
        for a, b in zip(found.content, page.content, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert (0, b"x" * 16) not in later
    assert later.read((0, b"x" * 16)) is None
    other = disk_of(tmp_path, identity="0b")
    assert not any(name in other for name in pages)


@pytest.mark.parametrize("damage", ["cut", "longer", "bit", "empty", "other's name", "others may write"])
def test_damaged_files_are_not_used(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_of(tmp_path)
    key, page = page_of(1)
    name = (0, key.digest)
    disk.write(name, page)
    (path,) = tmp_path.rglob("*.kv")
    content = path.read_bytes()
    if damage == "other's name":
        name = (0, page_of(2)[0].digest)
        path = path.rename(path.with_name(f"{name[1].hex()}-0.kv"))
        disk = disk_of(tmp_path)
        assert name in disk
    elif damage == "others may write":
        path.chmod(0o666)
    else:
        flipped = bytes([*content[:-1], content[-1] ^ 1])
        path.write_bytes({"cut": content[:-1], "longer": content + b"0", "bit": flipped, "empty": b""}[damage])
    assert disk.read(name) is None
    assert str(path) in caplog.text
    assert not path.exists()
    assert name not in disk
    assert disk.write((0, key.digest), page) == FILE_BYTES


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    key, page = page_of(1)
    disk.write((0, key.digest), page)
    (path,) = tmp_path.rglob("*.kv")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert disk.read((0, key.digest)) is None


def test_the_least_recently_used_files_go(tmp_path: Path) -> None:
    disk = disk_of(tmp_path, limit=32 * FILE_BYTES)
    names = []
    for seed in range(40):
        key, page = page_of(seed)
        names.append((0, key.digest))
        disk.write(names[-1], page)
        for path in tmp_path.rglob(f"{key.digest.hex()}*"):
            os.utime(path, (seed, seed))
        if seed == 30:
            disk.read(names[0])  # which makes it the last one used
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 32 * FILE_BYTES
    assert names[0] in disk
    assert names[1] not in disk
    assert names[39] in disk
    assert all((disk.read(name) is not None) == (name in disk) for name in names)
    assert disk_of(tmp_path / "tiny", limit=FILE_BYTES - 1).write(names[0], page_of(0)[1]) == 0


@pytest.mark.parametrize("why", ["nearly full", "full", "too small"])
def test_pages_that_a_disk_has_no_room_for_are_said_once(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_of(tmp_path, limit=FILE_BYTES - 1 if why == "too small" else 2**20)
    said = f"a page has {FILE_BYTES} bytes, and all may have {FILE_BYTES - 1}"
    if why == "nearly full":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=2**30, free=2**20))
        said = "less than 5% of the disk would be free"
    elif why == "full":

        def write(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk_pages, "_write", write)
        said = "OSError: [Errno 28] No space left on device"
    for seed in range(3):
        key, page = page_of(seed)
        assert disk.write((0, key.digest), page) == 0
        assert (0, key.digest) not in disk
    assert caplog.messages == [f"{tmp_path}: pages are not kept (said once): {said}"]


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    limit = 64 * FILE_BYTES
    both = [
        disk_of(tmp_path, limit=limit),
        disk_of(tmp_path, limit=limit),
        disk_of(tmp_path, identity="0b", limit=limit),
    ]
    for seed in range(120):
        key, page = page_of(seed)
        both[seed % 3].write((0, key.digest), page)
    # Each looks at the folder again when it has written a sixteenth of the limit.
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= limit + 3 * limit // disk_pages.LOOKS
    last = [page_of(seed) for seed in (117, 118, 119)]
    for disk, (key, page) in zip(both, last, strict=True):
        found = disk.read((0, key.digest))
        assert found is not None and found.tokens == page.tokens
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert all(disk.read((0, key.digest)) is None for disk, (key, _) in zip(both, last, strict=True))


def test_what_was_not_finished_is_removed_after_a_while(tmp_path: Path) -> None:
    disk_of(tmp_path)
    folder = tmp_path / "0a"
    old, new = folder / ".old", folder / ".new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    long_ago = time.time() - 2 * disk_pages.FORGOTTEN
    os.utime(old, (long_ago, long_ago))
    disk_of(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    disk = disk_of(folder)
    (folder / "0a").rmdir()
    key, page = page_of(1)
    assert disk.write((0, key.digest), page) == 0
    assert disk.write((0, key.digest), page) == FILE_BYTES


def test_host_memory_is_bounded_and_pinned_pages_stay() -> None:
    each = page_of(0)[1].num_bytes
    host = HostPages(3 * each)
    keys = []
    for seed in range(4):
        key, page = page_of(seed)
        keys.append(key)
        gone = host.add((0, key.digest), page)
        if seed == 0:
            host.pin([(0, key.digest)])
    assert gone == [(0, keys[1].digest)]
    assert host.num_bytes == 3 * each and len(host) == 3
    assert host.find(0, keys[0]) is not None
    assert host.find(0, keys[1]) is None
    assert host.find(0, PageKey(keys[0].digest, (9, 9, 9, 9))) is None  # equal digests of other tokens
    assert host.find(1, keys[0]) is None
    host.pin([(0, key.digest) for key in keys[2:]])
    assert host.add((0, b"z"), page_of(9)[1]) == []
    assert (0, b"z") not in host
    host.unpin([(0, keys[0].digest)])
    assert host.add((0, b"z"), page_of(9)[1]) == [(0, keys[0].digest)]


# Whole engines. Pools are emptied by hand, so that where each prefix comes from is certain.


def llm_of(name: str, folder: Path, cache: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 2 if name == "llama" else 1,  # one prompt at a time; other tests have llama's programs too
        "max_num_batched_tokens": 16,
        "decode_steps": 1,
        "kv_cache_memory_bytes": 2**19,
        "compilation_cache_dir": cache,
        "compile_threads": 1,
        "kv_offloading_size": 0.25,
        "kv_offloading_dir": str(folder),
    }
    return LLM(str(GOLDEN / name), **(settings | options))


def evict_all(llm: LLM) -> None:
    """Gives every page that is only cached to somebody else for a moment."""
    for pool in llm.engine.kv.pools:
        pages = pool.allocate(pool.available)
        assert pages is not None
        pool.release(pages)
    llm.engine.kv.tier.move(llm.engine.runner)


PROMPTS = [np.random.default_rng(seed).integers(0, 96, 30 + seed).tolist() for seed in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def generated(llm: LLM) -> list[tuple[list[int], int | None]]:
    """Tokens, and how many tokens of the prompt were found, of one prompt after the other."""
    found = []
    for prompt in PROMPTS:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        found.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
    return found


# Where pages go is decided on the host: one model for every JAX.
ENGINES = [("llama", "int8")]
MORE_ENGINES = [
    ("deepseek-v2", "auto"),
    ("llama", "fp8"),
    ("gemma3", "auto"),
    ("qwen3-next", "auto"),
    ("mamba2", "auto"),
    ("deepseek-v2", "int8"),
]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*ENGINES, *at_levels(MORE_ENGINES, slow=[(name, "auto") for name in ("deepseek-v2", "gemma3", "qwen3-next")])],
)
def test_tokens_are_the_same_from_memory_and_after_a_restart_from_disk(
    name: str, kv_dtype: str, tmp_path: Path, compile_cache_dir: str
) -> None:
    options = {} if kv_dtype == "auto" else {"kv_cache_dtype": kv_dtype}
    llm = llm_of(name, tmp_path, compile_cache_dir, **options)
    cold = generated(llm)
    assert [cached for _, cached in cold] == [0, 0, 0]
    evict_all(llm)
    warm = generated(llm)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    # A recurrent state is kept where a chunk of the prompt ended, and at its last page.
    assert [cached for _, cached in warm] == [28, 28, 28]
    hits = llm.stats.offload.host_hits
    assert hits == 3 * 28
    assert llm.stats.offload.disk_hits == 0
    llm.close()
    llm.close()
    llm = llm_of(name, tmp_path, compile_cache_dir, **options)
    assert generated(llm) == warm
    assert llm.stats.offload.disk_hits == 3 * 28
    assert llm.stats.offload.host_hits == 0
    llm.engine.kv.check()
    llm.close()


@pytest.mark.slow
def test_a_long_prompt_is_read_from_disk_after_a_restart(tmp_path: Path, compile_cache_dir: str) -> None:
    """All of its 4,096 tokens but the last page are read; at least one token has to be computed."""
    prompt = np.random.default_rng(0).integers(0, 96, 4096).tolist()
    options: dict[str, Any] = {
        "hf_overrides": {"max_position_embeddings": 8192},
        "page_size": 32,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 512,
        "max_model_len": 4200,
        "kv_cache_memory_bytes": 2**23,
    }
    found = []
    for cached in (0, 4096 - 32):
        llm = llm_of("llama", tmp_path, compile_cache_dir, **options)
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert (output.num_cached_tokens, llm.stats.offload.disk_hits) == (cached, cached)
        found.append(output.outputs[0].token_ids)
        llm.close()
    assert found[0] == found[1]


def test_damaged_files_are_computed_again(tmp_path: Path, compile_cache_dir: str) -> None:
    llm = llm_of("llama", tmp_path, compile_cache_dir, kv_cache_dtype="int8")
    cold = generated(llm)
    llm.close()
    for path in tmp_path.rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-3])
    llm = llm_of("llama", tmp_path, compile_cache_dir, kv_cache_dtype="int8")
    assert generated(llm) == cold
    llm.close()


def test_identities_name_all_that_decides_what_pages_hold(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))

    def identity(**settings: Any) -> str:
        model = {"model": str(folder), "dtype": "float32", "page_size": 4, "kv_cache_memory_bytes": 2**18}
        config = EngineConfig(**(model | settings))
        platform = select_platform(config)
        config = config.with_sizes(platform.step_sizes)
        loaded = load_model(config, platform)
        layout = KVLayout.of(platform.kv_dtype(config.kv_cache_dtype), page_size=config.page_size)
        plan = plan_kv(config, loaded.graph.config, platform, layout=layout)
        sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_logprobs": 0}
        return pages_identity(config, StepCompiler(model=loaded, platform=platform, kv_plan=plan, **sizes), Alone())

    first = identity()
    assert identity(kv_cache_memory_bytes=2**19) == first
    others: list[dict[str, Any]] = [
        {"page_size": 2},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
        {"hf_overrides": {"rope_theta": 5000.0}},
        {"quantization": "q8_0"},
        {"activations": "float"},
    ]
    found = [identity(**settings) for settings in others]
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes())  # in place: other weights, perhaps
    assert len({first, identity(), *found}) == 2 + len(others)


def test_moving_pages_copies_no_others() -> None:
    compiler = compiler_of("gemma3", kv_cache_dtype="int8")
    mover = PageMover(compiler)
    for group in range(2):
        (array,) = compiler.state_shapes.kv[stacks_of(compiler, group)[0]].arrays
        for write in (False, True):
            text = mover._program(group, 4, write=write).as_text()
            shape = ",".join(map(str, array.shape))
            assert re.search(rf"\[{shape}\]", text)
            assert not re.search(rf"\[{shape}\]\S* copy\(", text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offloading_size": -1.0}, "kv_offloading_size must be from 0 to 1048576, not -1"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size must be from 0"),
        ({"kv_offloading_dir": "/tmp"}, "kv_offloading_dir needs kv_offloading_size"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "which enable_prefix_caching turns off"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "kv_offloading_backend must be one of native",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_and_more_memory_than_there_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    compiler = compiler_of("llama")
    with pytest.raises(ConfigError, match=f"kv_offloading_dir {file}: "):
        tier_of(EngineConfig(kv_offloading_size=0.1, kv_offloading_dir=str(file)), compiler, Alone(), None)
    with pytest.raises(ConfigError, match=r"kv_offloading_size 1e\+06 is too large: \d+\.\d GiB of the machine"):
        tier_of(EngineConfig(kv_offloading_size=1e6), compiler, Alone(), None)
