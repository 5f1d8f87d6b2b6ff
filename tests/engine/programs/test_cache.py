"""Programs on disk: those that are found run, and damaged ones are compiled again."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from llmjax.engine.programs import cache as program_cache
from llmjax.engine.programs.cache import ENVIRONMENTS, FOLDER, ProgramCache, ProgramSpec
from llmjax.sampling.state import SamplerState, make_sampler_state, set_bias

pytestmark = pytest.mark.jax_api

SLOTS, VOCAB, IDS = 2, 8, 3
DIGEST_BYTES = hashlib.sha256().digest_size


@cache
def spec(vocab: int = VOCAB) -> ProgramSpec:
    """A program's specification, made once: finding the shapes traces something too."""
    state = jax.eval_shape(lambda: make_sampler_state(num_slots=SLOTS, vocab_size=vocab))
    ids = jax.ShapeDtypeStruct((IDS,), jnp.int32)
    return ProgramSpec(
        function=set_bias,
        arguments=(state, jax.ShapeDtypeStruct((), jnp.int32), ids, jax.ShapeDtypeStruct((IDS,), jnp.float32)),
        device=jax.devices("cpu")[0],
        donated=(0,),
    )


def run(program: Callable[..., SamplerState], vocab: int = VOCAB) -> np.ndarray:
    state = make_sampler_state(num_slots=SLOTS, vocab_size=vocab)
    values = np.array([1, 2, 3], np.float32)
    return np.asarray(program(state, np.int32(1), np.array([0, 2, vocab], np.int32), values).logit_bias)


EXPECTED = np.zeros((SLOTS, VOCAB), np.float32)
EXPECTED[1, [0, 2]] = 1, 2


class Work:
    """Counts what JAX does: programs traced, lowered, and compiled or read from its own cache."""

    EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self.EVENTS, 0)

    def __call__(self, event: str, duration: float, **_: Any) -> None:
        if (name := event.rpartition("/")[2]) in self.counts:
            self.counts[name] += 1


@pytest.fixture
def work() -> Iterator[Work]:
    counter = Work()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / FOLDER / "environment"


@dataclass(frozen=True)
class Kept:
    """The files of the only program in a folder."""

    reference: Path
    program: Path


@pytest.fixture
def kept(folder: Path) -> Kept:
    ProgramCache(folder).get(spec())
    reference, program = sorted(folder.iterdir(), key=lambda path: path.stat().st_size)
    assert reference.name == ProgramCache(folder).signature(spec())
    return Kept(reference, program)


@pytest.fixture(params=["reference", "program"])
def file(request: pytest.FixtureRequest, kept: Kept) -> Path:
    """Each of a program's files."""
    path: Path = getattr(kept, request.param)
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_program_is_compiled_once(folder: Path, work: Work) -> None:
    wanted = spec()
    first = ProgramCache(folder).get(wanted)
    assert all(work.counts.values())
    work.counts.update(dict.fromkeys(work.counts, 0))
    second = ProgramCache(folder).get(wanted)
    assert not any(work.counts.values())
    np.testing.assert_array_equal(run(first), EXPECTED)
    np.testing.assert_array_equal(run(second), EXPECTED)


def test_other_sources_of_the_same_program_compile_nothing(
    folder: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProgramCache(folder).get(spec())
    work.counts.update(dict.fromkeys(work.counts, 0))
    monkeypatch.setattr(program_cache, "sources_digest", lambda: "other")
    np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert work.counts["jaxpr_to_mlir_module_duration"] == 1 and work.counts["backend_compile_duration"] == 0
    work.counts.update(dict.fromkeys(work.counts, 0))
    np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert not work.counts["jaxpr_to_mlir_module_duration"]
    assert len(list(folder.iterdir())) == 3  # two signatures, one program


def test_what_has_no_signature_is_traced_but_not_compiled_again(folder: Path, work: Work) -> None:
    def local(state: SamplerState, *edit: jax.Array) -> SamplerState:
        return set_bias(state, *edit)

    for compiled in (1, 0):
        work.counts.update(dict.fromkeys(work.counts, 0))
        program = ProgramCache(folder).get(replace(spec(), function=local))
        assert work.counts["jaxpr_to_mlir_module_duration"] == 1
        assert work.counts["backend_compile_duration"] == compiled
        np.testing.assert_array_equal(run(program), EXPECTED)


def test_programs_of_one_text_that_leave_out_different_arguments_are_two(folder: Path) -> None:
    def first(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + 1

    def second(a: jax.Array, b: jax.Array) -> jax.Array:
        return b + 1

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    cache = ProgramCache(folder)
    programs = [
        cache.get(ProgramSpec(function=function, arguments=(shape, shape), device=jax.devices("cpu")[0]))
        for function in (first, second)
    ]
    assert [float(program(np.float32(10), np.float32(20))) for program in programs] == [11, 21]


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """The folder of JAX's own cache, empty."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    jax.clear_caches()
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_jax_keeps_nothing_of_it(folder: Path, jax_cache: Path) -> None:
    """Else it would read the program when ours is lost, and what it has read cannot be written again."""
    for _ in range(2):
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        ProgramCache(folder).get(spec())
        np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert not any(program_cache.KEPT_APART in path.name for path in jax_cache.glob("*"))


def test_what_jax_has_read_all_the_same_is_not_written(folder: Path, jax_cache: Path) -> None:
    spec().lower(program_cache.KEPT_APART).compile()
    assert any(program_cache.KEPT_APART in path.name for path in jax_cache.glob("*"))
    for _ in range(2):
        jax.clear_caches()
        np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert not folder.exists()


def test_the_same_program_without_a_folder_does_not_get_in_the_way(folder: Path, jax_cache: Path) -> None:
    ProgramCache().get(spec())  # which JAX keeps
    for _ in range(2):
        jax.clear_caches()
        np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert len(list(folder.iterdir())) == 2


def test_arguments_are_donated_as_before(kept: Kept) -> None:
    program = ProgramCache(kept.program.parent).get(spec())
    state = make_sampler_state(num_slots=SLOTS, vocab_size=VOCAB)
    bias = state.logit_bias
    new = program(state, np.int32(0), np.zeros(IDS, np.int32), np.ones(IDS, np.float32))
    assert bias.is_deleted() and not new.logit_bias.is_deleted()


def test_wrong_arguments_are_refused_as_before(kept: Kept) -> None:
    program = ProgramCache(kept.program.parent).get(spec())
    with pytest.raises(TypeError):
        run(program, VOCAB + 1)


def test_it_is_known_what_is_kept(folder: Path) -> None:
    cache = ProgramCache(folder)
    assert not cache.has(spec())
    cache.get(spec())
    assert cache.has(spec()) and not cache.has(spec(VOCAB + 1)) and not ProgramCache().has(spec())


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    np.testing.assert_array_equal(run(ProgramCache().get(spec())), EXPECTED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("platform", "kept"), [("cpu", True), ("cuda", True), ("gcu", False)])
def test_programs_with_kernels_of_this_package_are_kept(
    platform: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_cache, "platform_of", lambda device: platform)
    found = ProgramCache.of(tmp_path, jax.devices("cpu")[0]).folder
    assert (found is not None and found.parent == tmp_path / FOLDER) is kept


@pytest.mark.parametrize("keeps", [True, False])
def test_one_program_is_traced_at_a_time(keeps: bool, folder: Path) -> None:
    traced, most = threading.Semaphore(), []

    def double(x: jax.Array) -> jax.Array:
        most.append(traced.acquire(blocking=False))
        time.sleep(0.05)  # others would begin
        traced.release()
        return 2 * x

    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in range(1, 5)]
    specs = [ProgramSpec(function=double, arguments=(shape,), device=jax.devices("cpu")[0]) for shape in shapes]
    cache = ProgramCache(folder if keeps else None)
    with ThreadPoolExecutor() as threads:
        programs = list(threads.map(cache.get, specs))
    assert [float(run(jnp.ones(size)).sum()) for size, run in enumerate(programs, 1)] == [2, 4, 6, 8]
    assert most == [True] * len(specs)


def header(path: Path, payload: bytes) -> bytes:
    return program_cache.MAGIC + bytes.fromhex(path.name) + hashlib.sha256(payload).digest()


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "empty":
            changed = b""
        case "cut in the header":
            changed = content[: program_cache.HEADER_BYTES - 1]
        case "cut":
            changed = content[:-1]
        case "longer":
            changed = content + b"\0"
        case "a bit":
            changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        case "another one's":
            (other,) = set(path.parent.iterdir()) - {path}
            changed = other.read_bytes()
        case "another content":
            payload = pickle.dumps(3)
            changed = header(path, payload) + payload
        case "not a pickle":
            changed = header(path, b"garbage") + b"garbage"
    path.write_bytes(changed)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "cut in the header",
        "cut",
        "longer",
        "a bit",
        "another one's",
        "another content",
        "not a pickle",
    ],
)
def test_a_damaged_file_is_a_warning_and_is_replaced(
    how: str, file: Path, caplog: pytest.LogCaptureFixture, work: Work
) -> None:
    damage(file, how)
    np.testing.assert_array_equal(run(ProgramCache(file.parent).get(spec())), EXPECTED)
    (line,) = warnings(caplog)
    assert str(file) in line and "made again" in line and "\n" not in line
    caplog.clear()
    work.counts.update(dict.fromkeys(work.counts, 0))
    program = ProgramCache(file.parent).get(spec())
    assert not any(work.counts[name] for name in Work.EVENTS) and warnings(caplog) == []
    np.testing.assert_array_equal(run(program), EXPECTED)


def test_many_damaged_files_are_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = (VOCAB, VOCAB + 1, VOCAB + 2)
    for size in sizes:
        ProgramCache(folder).get(spec(size))
    for path in folder.iterdir():
        path.write_bytes(b"")
    programs = ProgramCache(folder)
    for size in sizes:
        programs.get(spec(size))
    assert len(warnings(caplog)) == 1


class Trap:
    """Leaves a sign when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("how", ["another user's", "group", "all"])
def test_what_others_may_have_written_is_not_even_unpickled(
    how: str, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    payload = pickle.dumps(Trap(tmp_path / "sprung"))
    file.write_bytes(header(file, payload) + payload)
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(file, 12345, -1)
    else:
        file.chmod(0o664 if how == "group" else 0o646)
    np.testing.assert_array_equal(run(ProgramCache(file.parent).get(spec())), EXPECTED)
    assert not (tmp_path / "sprung").exists()
    (line,) = warnings(caplog)
    assert "another user" in line if how == "another user's" else "others than its owner" in line


def test_files_are_their_owners_to_write_and_everybodys_to_read(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o644


def test_where_nothing_can_be_written_programs_are_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(program_cache.tempfile, "NamedTemporaryFile", refuse)
    np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert list(folder.iterdir()) == [] and warnings(caplog) == []  # which was said when the cache was set up


def test_a_read_only_folder_is_read(kept: Kept, work: Work) -> None:
    work.counts.update(dict.fromkeys(work.counts, 0))
    folder = kept.program.parent
    kept.program.chmod(0o444)
    kept.reference.chmod(0o444)
    folder.chmod(0o555)
    program = ProgramCache(folder).get(spec())
    folder.chmod(0o755)
    assert not any(work.counts.values())
    np.testing.assert_array_equal(run(program), EXPECTED)


def test_a_full_disk_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(program_cache.os, "replace", full)
    np.testing.assert_array_equal(run(ProgramCache(folder).get(spec())), EXPECTED)
    assert list(folder.iterdir()) == []


def _write_often(path: str, byte: int) -> None:
    payload = bytes([byte]) * 100_000
    for _ in range(200):
        program_cache._replace(Path(path), header(Path(path), payload) + payload)


@pytest.mark.slow
def test_two_processes_write_one_file(tmp_path: Path) -> None:
    """A reader sees one of their files meanwhile, and all of it."""
    path = tmp_path / ("ab" * DIGEST_BYTES)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(str(path), byte)) for byte in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        try:
            seen.add(program_cache._checked_content(path)[:1])
        except FileNotFoundError:
            continue
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen and seen <= {b"\1", b"\2"}
    assert list(tmp_path.iterdir()) == [path]


def test_folders_of_old_environments_are_removed(tmp_path: Path) -> None:
    folders = [tmp_path / FOLDER / str(i) for i in range(ENVIRONMENTS + 3)]
    for age, path in enumerate(folders):
        path.mkdir(parents=True)
        (path / "program").touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    ProgramCache(tmp_path / FOLDER / "new").get(spec())
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {"new", *(str(i) for i in range(ENVIRONMENTS - 1))}


def test_what_is_kept_beside_programs_is_made_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []

    def make() -> dict[str, tuple[int, ...]]:
        made.append(1)
        return {"names": (1, 2)}

    def kept(number: int, folder: Path | None = folder) -> dict[str, tuple[int, ...]]:
        return ProgramCache(folder).kept(("something", number), make)

    assert kept(1) == kept(1) == {"names": (1, 2)} and len(made) == 1
    assert kept(2) == {"names": (1, 2)} and len(made) == 2  # made of something else
    for path in folder.iterdir():
        damage(path, "not a pickle")
    assert kept(1) == {"names": (1, 2)} and len(made) == 3
    (line,) = warnings(caplog)
    assert "made again" in line
    assert kept(1) == {"names": (1, 2)} and len(made) == 3
    kept(1, None)
    assert len(made) == 4
