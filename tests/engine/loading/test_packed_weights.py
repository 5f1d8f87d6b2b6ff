"""Packed matrices on disk: found again, never out of date, never partly written, and within the limit."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.config import EngineConfig
from llmjax.engine.loading import packed_weights
from llmjax.engine.loading.memory import CPU_SHARE, plan_kv
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.engine.loading.packed_weights import FOLDER, FORGOTTEN, HEADER, KEEPER, UNFINISHED, PackedWeights
from llmjax.kernels.attention import KVLayout
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import Platform, select_platform
from llmjax.quantization.rounding import rows_in_situ
from llmjax.quantization.schemes import scheme_named
from llmjax.weights.memory import HUGE_PAGE
from llmjax.weights.packing import Empty, RowSource, RowStack, pack
from tests.checkpoints import GOLDEN

ROOT = Path(__file__).parents[3]
LLAMA = GOLDEN / "llama"
TILE = 16
KEYS = ["ab" * 32, "cd" * 32, "ef" * 32]
LIMIT = 1 << 30
NAMES = ["up", "down"]
WAIT = 120.0


@cache
def source(name: str) -> RowSource | RowStack:
    tensor = open_checkpoint(LLAMA).tensors[f"model.layers.0.mlp.{name}_proj.weight"]
    return rows_in_situ(tensor, scheme_named("int8"))


def filled(path: Path, *, limit: int = LIMIT, stay: bool = False) -> dict[str, np.ndarray]:
    """The matrices that one start packs or finds."""
    weights = PackedWeights(path, limit=limit, stay=stay)
    found = {name: weights.words(name, source(name), tile=TILE) for name in NAMES}
    weights.keep()
    weights.wait(WAIT)
    return found


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The matrices that have been packed."""
    found: list[object] = []

    def counted(source: RowSource | RowStack, *, tile: int, empty: Empty) -> np.ndarray:
        found.append(source)
        return pack(source, tile=tile, empty=empty)

    monkeypatch.setattr(packed_weights, "pack", counted)
    return found


@pytest.mark.parametrize("stay", [False, True])
def test_a_second_start_finds_what_the_first_has_packed(tmp_path: Path, packed: list[object], stay: bool) -> None:
    first = filled(tmp_path / KEYS[0], stay=stay)
    assert len(packed) == 2
    again = filled(tmp_path / KEYS[0])
    assert len(packed) == 2
    for name in NAMES:
        np.testing.assert_array_equal(again[name], first[name])
        np.testing.assert_array_equal(again[name], pack(source(name), tile=TILE))
        assert not again[name].flags.writeable
        assert again[name].ctypes.data % 64 == 0  # or XLA would copy it
    assert files(tmp_path) == [KEYS[0]]


@pytest.mark.parametrize("later", [False, True])
def test_what_is_larger_and_smaller_than_a_huge_page_is_found_again(tmp_path: Path, later: bool) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 1000, HUGE_PAGE // 4 - 1024, 5, 3 * HUGE_PAGE // 4 + 7, HUGE_PAGE // 4, 1, 2]
    matrices = {str(i): rng.integers(0, 1 << 32, (size, 1), np.uint32) for i, size in enumerate(sizes)}
    writer = packed_weights._Writer.begin(tmp_path / KEYS[0], LIMIT, later=later)
    assert writer is not None
    for name, matrix in matrices.items():
        assert writer.add(name, matrix)
    writer.finish()
    found = packed_weights._read(tmp_path / KEYS[0])
    assert found.keys() == matrices.keys()
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(found[name], matrix)


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path) -> None:
    platform, config = select_platform(EngineConfig(device="cpu")), EngineConfig(packed_weights_bytes=0)
    weights = PackedWeights.of(tmp_path, config, open_checkpoint(LLAMA), platform, files=())
    weights.words("up", source("up"), tile=TILE)
    weights.keep()
    assert files(tmp_path) == []


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def anothers(path: Path) -> None:
    filled(path.with_name(KEYS[1]))
    shutil.copyfile(path.with_name(KEYS[1]), path)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def lying(path: Path) -> None:
    """A file whose index says that a matrix is where none can be."""
    content = path.read_bytes()
    start = HEADER.unpack_from(content)[2]
    path.write_bytes(content[:start] + content[start:].replace(b"4096", b"9999", 1))


def not_json(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER.unpack_from(content)[2]] = 0
    path.write_bytes(content)


def not_an_object(path: Path) -> None:
    content = path.read_bytes()
    start = HEADER.unpack_from(content)[2]
    path.write_bytes(content[:start] + b"[]".ljust(len(content) - start))


@pytest.mark.parametrize("spoil", [cut_short, emptied, anothers, open_to_all, lying, not_json, not_an_object])
def test_a_file_with_something_wrong_is_packed_again(
    spoil: object, tmp_path: Path, packed: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / KEYS[0]
    first = filled(path)
    assert callable(spoil)
    spoil(path)
    packed.clear()
    again = filled(path)
    assert len(packed) == 2
    assert sum("packed again" in record.message or "is not used" in record.message for record in caplog.records) == 1
    for name in NAMES:
        np.testing.assert_array_equal(again[name], first[name])
    packed.clear()
    filled(path)  # what took its place is sound
    assert not packed


def test_a_matrix_of_another_shape_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / KEYS[0])
    weights = PackedWeights(tmp_path / KEYS[0], limit=LIMIT)
    found = weights.words("up", source("down"), tile=TILE)
    np.testing.assert_array_equal(found, pack(source("down"), tile=TILE))
    assert "does not hold up" in caplog.text
    assert files(tmp_path) == []


def test_one_process_writes_and_the_others_only_pack(tmp_path: Path, packed: list[object]) -> None:
    starts = [PackedWeights(tmp_path / KEYS[0], limit=LIMIT) for _ in range(3)]
    for name in NAMES:
        for start in starts:
            np.testing.assert_array_equal(start.words(name, source(name), tile=TILE), pack(source(name), tile=TILE))
    assert files(tmp_path) == [UNFINISHED + KEYS[0]]
    for start in starts:
        start.keep()
        start.wait(WAIT)
    assert files(tmp_path) == [KEYS[0]]
    packed.clear()
    filled(tmp_path / KEYS[0])
    assert not packed


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.engine.loading.test_packed_weights import LIMIT, NAMES, TILE, PackedWeights, source
weights = PackedWeights(Path(sys.argv[1]), limit=LIMIT)
for name in NAMES:
    weights.words(name, source(name), tile=TILE)
weights._writer._pieces.finish()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_room_for_the_next(
    tmp_path: Path, packed: list[object]
) -> None:
    path = tmp_path / KEYS[0]
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert files(tmp_path) == [UNFINISHED + KEYS[0]]
    filled(path)
    assert len(packed) == 2
    assert files(tmp_path) == [KEYS[0]]
    found = filled(path)
    assert len(packed) == 2
    for name in NAMES:
        np.testing.assert_array_equal(found[name], pack(source(name), tile=TILE))


def test_what_is_mapped_stays_when_its_file_goes(tmp_path: Path) -> None:
    first = filled(tmp_path / KEYS[0])
    mapped = filled(tmp_path / KEYS[0])
    (tmp_path / KEYS[0]).unlink()
    np.testing.assert_array_equal(mapped["up"], first["up"])


@pytest.mark.parametrize("stay", [False, True])
def test_weights_that_are_too_large_leave_nothing(tmp_path: Path, stay: bool) -> None:
    size = sum(words.nbytes for words in filled(tmp_path / "a" / KEYS[0]).values())
    filled(tmp_path / "b" / KEYS[0], limit=size // 2, stay=stay)
    assert files(tmp_path / "b") == []


def test_what_was_used_last_is_kept(tmp_path: Path, packed: list[object]) -> None:
    filled(tmp_path / KEYS[0])
    room = 2 * (tmp_path / KEYS[0]).stat().st_size
    filled(tmp_path / KEYS[1], limit=room)
    for number, key in enumerate(KEYS[:2]):
        os.utime(tmp_path / key, (1000 + number, 1000 + number))
    filled(tmp_path / KEYS[0], limit=room)  # used, so the other one goes
    filled(tmp_path / KEYS[2], limit=room)
    assert files(tmp_path) == sorted([KEYS[0], KEYS[2]])


def test_small_files_do_not_heap_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "MOST", 2)
    for number, key in enumerate(KEYS):
        filled(tmp_path / key)
        os.utime(tmp_path / key, (1000 + number, 1000 + number))
    assert files(tmp_path) == sorted(KEYS[1:])


def test_what_a_killed_process_leaves_goes_in_the_end(tmp_path: Path) -> None:
    left, live = tmp_path / f"{UNFINISHED}left", tmp_path / f"{UNFINISHED}live"
    for path in (left, live):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * FORGOTTEN
    os.utime(left, (long_ago, long_ago))
    filled(tmp_path / KEYS[0])
    assert files(tmp_path) == sorted([live.name, KEYS[0]])


# A whole model, loaded from a copy that may change.


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "model"))


def loaded(model: Path, cache_dir: Path, **settings: object) -> LoadedModel:
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", quantization="int8", **settings)  # type: ignore[arg-type]
    found = load_model(config, select_platform(config), cache_dir=cache_dir)
    for thread in threading.enumerate():
        if thread.name == KEEPER:
            thread.join(WAIT)
    return found


def matrices(model: LoadedModel) -> dict[str, np.ndarray]:
    return {name: np.asarray(w.dequantize()) for name, w in model.params.items() if isinstance(w, QTensor)}


def test_a_model_is_packed_once(copy: Path, tmp_path: Path, packed: list[object]) -> None:
    first = loaded(copy, tmp_path)
    assert packed and first.mapped_bytes == 0
    packed.clear()
    again = loaded(copy, tmp_path)
    assert not packed
    assert again.mapped_bytes == sum(w.words.nbytes for w in again.params.values() if isinstance(w, QTensor))
    assert matrices(first).keys() == matrices(again).keys()
    for name, values in matrices(first).items():
        np.testing.assert_array_equal(matrices(again)[name], values)


def test_weights_that_change_in_place_are_packed_again(copy: Path, tmp_path: Path, packed: list[object]) -> None:
    """They are packed again even if size and date have not changed."""
    first = matrices(loaded(copy, tmp_path))
    file = copy / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: -tensors[name]}, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    packed.clear()
    second = matrices(loaded(copy, tmp_path))
    assert packed
    np.testing.assert_allclose(second[name], -first[name], atol=0.02)  # rounded to one step of 256


def test_other_settings_are_other_weights(copy: Path, tmp_path: Path, packed: list[object]) -> None:
    loaded(copy, tmp_path)
    packed.clear()
    loaded(copy, tmp_path, quantization_rules={r"layers\.0\..*up_proj": "none"})
    assert packed
    packed.clear()
    loaded(copy, tmp_path, max_model_len=16, kv_cache_dtype="int8")  # nothing to do with weights
    assert not packed


def test_files_that_change_while_they_are_read_are_not_kept(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(source: RowSource | RowStack, *, tile: int, empty: Empty) -> np.ndarray:
        (copy / "config.json").touch()
        return pack(source, tile=tile, empty=empty)

    monkeypatch.setattr(packed_weights, "pack", changed)
    loaded(copy, tmp_path)
    assert files(tmp_path / FOLDER) == []


def test_memory_that_mapped_weights_will_take_is_not_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(LLAMA), device="cpu", max_num_seqs=256)
    platform, model = select_platform(config), open_checkpoint(LLAMA).model_config()
    layout = KVLayout.of(jax.numpy.dtype("float32"), page_size=4)
    monkeypatch.setattr(Platform, "free_memory", lambda self: 1 << 22)
    whole = plan_kv(config, model, platform, layout=layout).num_bytes
    half = plan_kv(config, model, platform, layout=layout, reserved=1 << 21).num_bytes
    assert half <= CPU_SHARE * (1 << 21) < whole <= CPU_SHARE * (1 << 22)
