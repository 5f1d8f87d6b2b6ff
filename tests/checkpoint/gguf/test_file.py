"""The GGUF reader against files of the `gguf` package, and against malformed ones."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.model import hf_config, hf_tensors
from llmjax.errors import CheckpointError

pytestmark = pytest.mark.smoke

F32 = np.dtype(np.float32)
TOKENS = ["<unk>", "▁Hello", "日本", "👩‍👩‍👧", "", "a\nb", "é"]


def write_reference(
    path: Path, *, order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE, **options: Any
) -> dict[str, np.ndarray]:
    """A small Llama with every kind of value, by the reference writer; returns its tensors' values."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", endianess=order, **options)
    writer.add_uint8("x.u8", 200)
    writer.add_int8("x.i8", -100)
    writer.add_uint16("x.u16", 60000)
    writer.add_int16("x.i16", -30000)
    writer.add_int32("x.i32", -(2**30))
    writer.add_uint64("x.u64", 2**63 + 5)
    writer.add_int64("x.i64", -(2**62))
    writer.add_float64("x.f64", 1e300)
    writer.add_bool("x.yes", True)
    writer.add_array("x.floats", [0.5, -1.25])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.flags", [True, False])
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_eos_token_id(3)
    values: dict[str, np.ndarray] = {
        "token_embd.weight": rng.standard_normal((len(TOKENS), 32)).astype(np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((32, 32)).astype(np.float16),
        "blk.0.ffn_up.bias": rng.standard_normal(32).astype(np.float32),
        "odd.weight": rng.standard_normal((2, 3, 5)).astype(np.float32),
    }
    for name, value in values.items():
        writer.add_tensor(name, value)
    if order == gguf.GGUFEndian.LITTLE:
        quantized = gguf.quants.quantize(
            rng.standard_normal((8, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        values["blk.0.ffn_up.weight"] = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.0.ffn_up.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def check_reference(file: GGUFFile, values: dict[str, np.ndarray]) -> None:
    meta = file.metadata
    assert [meta[f"x.{kind}"] for kind in ("u8", "i8", "u16", "i16", "i32", "u64", "i64", "f64")] == [
        *(200, -100, 60000, -30000, -(2**30), 2**63 + 5, -(2**62), 1e300)
    ]
    assert meta["x.yes"] is True
    assert meta["general.architecture"] == "llama"
    assert meta["tokenizer.ggml.tokens"] == TOKENS
    assert meta["x.floats"].tolist() == [0.5, -1.25] and meta["x.floats"].dtype == F32
    assert meta["x.ints"].tolist() == [1, -2, 3] and meta["x.ints"].dtype == np.int32
    assert meta["x.flags"].tolist() == [True, False] and meta["x.flags"].dtype == bool
    assert set(file.tensors) == set(values)
    for name, value in values.items():
        assert file.tensors[name].shape == value.shape
        assert np.array_equal(file.tensors[name].read(F32), value.astype(np.float32))
        assert np.array_equal(
            file.tensors[name].read(np.dtype(ml_dtypes.bfloat16)), value.astype(np.float32).astype(ml_dtypes.bfloat16)
        )


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    write_reference(tmp_path / "x.gguf", order=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match=r"x.gguf: is big-endian, which is not supported"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_reference_file(tmp_path: Path) -> None:
    values = write_reference(tmp_path / "x.gguf")
    file = GGUFFile.open(tmp_path / "x.gguf")
    assert file.version == 3
    check_reference(file, values)


def test_version_2(tmp_path: Path) -> None:
    values = write_reference(tmp_path / "x.gguf")
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    content[4] = 2
    (tmp_path / "y.gguf").write_bytes(content)
    file = GGUFFile.open(tmp_path / "y.gguf")
    assert file.version == 2
    check_reference(file, values)


@pytest.mark.parametrize("part", [1, 2, 3])
def test_split_file_opens_from_any_part(tmp_path: Path, part: int) -> None:
    values = write_reference(tmp_path / "x.gguf", split_max_tensors=2)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"x-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    file = GGUFFile.open(tmp_path / parts[part - 1])
    assert file.path.name == parts[0]
    check_reference(file, values)


@pytest.mark.parametrize("count", [[3, 3], "3", 3.0])
def test_split_file_whose_count_is_not_a_number(tmp_path: Path, count: object) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    if isinstance(count, list):
        writer.add_array("split.count", count)
    else:
        getattr(writer, "add_string" if isinstance(count, str) else "add_float32")("split.count", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"x\.gguf: split\.count is not a whole number"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_split_file_with_a_part_missing_or_exchanged(tmp_path: Path) -> None:
    write_reference(tmp_path / "x.gguf", split_max_tensors=2)
    first, second, third = sorted(tmp_path.iterdir())
    second_content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"x-00002-of-00003.gguf: is missing; x-00001-of-00003.gguf is one of 3"):
        GGUFFile.open(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"x-00002-of-00003.gguf: split.no and split.count do not say part 1 of 3"
    ):
        GGUFFile.open(first)
    second.write_bytes(second_content)
    with pytest.raises(CheckpointError, match="must be called name-00001-of-00003"):
        GGUFFile.open(first.rename(tmp_path / "renamed.gguf"))


def text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value


def array(type_id: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + content


def tensor(name: str, dims: list[int], *, type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}qIQ", len(dims), *dims, type_id, offset)


def raw_file(
    *,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + array(4, 0)


ALIGNMENT = "general.alignment"
MALFORMED = {
    "empty": (b"", "not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(40), "not a GGUF file: it starts with b'PK"),
    "magic alone": (b"GGUF", "version needs 4 bytes at offset 4, but the file ends at 4"),
    "version 1": (raw_file(version=1), "version 1 is not supported"),
    "version 4": (raw_file(version=4), "version 4 is not supported"),
    "version 0": (raw_file(version=0), "version 0 is not supported"),
    "version 3 of the other order": (b"GGUF" + struct.pack(">I", 3), "is big-endian"),
    "2^60 tensors": (raw_file(counts=(2**60, 0)), "tensor count is 1152921504606846976, more than"),
    "-1 tensors": (raw_file(counts=(2**64 - 1, 0)), "tensor count is 18446744073709551615, more than"),
    "2^60 keys": (raw_file(counts=(0, 2**60)), "key count is 1152921504606846976, more than"),
    "one key too many": (raw_file(keys=[key("a", 0, b"\1")], counts=(0, 2)), "name of key 1 at offset .* is empty"),
    "key of 2^60 bytes": (
        raw_file(keys=[struct.pack("<Q", 2**60) + bytes(16)]),
        "name of key 0 is 1152921504606846976 bytes",
    ),
    "key longer than the file": (
        raw_file(keys=[struct.pack("<Q", 60000) + bytes(16)]),
        "name of key 0 needs 60000 bytes",
    ),
    "key that is not UTF-8": (raw_file(keys=[key(b"\xff\xfe", 0, b"\1")]), "name of key 0 at offset 32 is not UTF-8"),
    "duplicate key": (raw_file(keys=[key("a", 0, b"\1")] * 2), "key 'a' appears twice"),
    "unknown value type": (raw_file(keys=[key("a", 13, bytes(8))]), "key 'a' has unknown value type 13"),
    "truth value 2": (raw_file(keys=[key("a", 7, b"\2")]), "key 'a' holds a truth value"),
    "string of 2^60 bytes": (
        raw_file(keys=[key("a", 8, struct.pack("<Q", 2**60))]),
        "key 'a' needs 1152921504606846976",
    ),
    "string that is not UTF-8": (raw_file(keys=[key("a", 8, text(b"\xc3"))]), "key 'a' at offset .* is not UTF-8"),
    "2^60 numbers": (raw_file(keys=[key("a", 9, array(6, 2**60))]), "length of key 'a' is 1152921504606846976"),
    "2^60 strings": (raw_file(keys=[key("a", 9, array(8, 2**60))]), "length of key 'a' is 1152921504606846976"),
    "unknown element type": (raw_file(keys=[key("a", 9, array(13, 1, bytes(8)))]), "unknown value type 13"),
    "nested arrays": (raw_file(keys=[key("a", 9, nested(100_000))]), "key 'a' is an array of arrays"),
    "element beyond the end": (
        raw_file(keys=[key("a", 9, array(8, 2, text("x") + struct.pack("<Q", 2**40)))]),
        "element 1 of key 'a' needs 1099511627776 bytes",
    ),
    "element that is not UTF-8": (
        raw_file(keys=[key("a", 9, array(8, 2, text("x") + text(b"\x80")))]),
        "element 1 of key 'a' at offset .* is not UTF-8",
    ),
    "elements end early": (
        raw_file(keys=[key("a", 9, array(8, 3, text("x" * 30) + bytes(5)))])[:-5],
        "key 'a' ends inside element|length of key 'a'|needs",
    ),
    "alignment 0": (raw_file(keys=[key(ALIGNMENT, 4, struct.pack("<I", 0))]), "alignment is 0, not a power of two"),
    "alignment 48": (raw_file(keys=[key(ALIGNMENT, 4, struct.pack("<I", 48))]), "alignment is 48, not a power of two"),
    "alignment as text": (raw_file(keys=[key(ALIGNMENT, 8, text("32"))]), "alignment is '32', not a power of two"),
    "alignment as truth": (raw_file(keys=[key(ALIGNMENT, 7, b"\1")]), "alignment is True, not a power of two"),
    "duplicate tensor": (raw_file(tensors=[tensor("t", [8])] * 2, data=64), "tensor 't' appears twice"),
    "long tensor name": (raw_file(tensors=[tensor("t" * 65, [8])], data=32), "name of tensor 0 is 65 bytes long"),
    "no dimensions": (raw_file(tensors=[tensor("t", [])], data=32, counts=(1, 0)), "has 0 dimensions"),
    "five dimensions": (raw_file(tensors=[tensor("t", [1] * 5)], data=32), "has 5 dimensions, not 1 to 4"),
    "2^32-1 dimensions": (
        raw_file(tensors=[text("t") + struct.pack("<I", 2**32 - 1) + bytes(40)]),
        "has 4294967295 dim",
    ),
    "negative dimension": (raw_file(tensors=[tensor("t", [8, -1])], data=32), r"dimension below 1: \[8, -1\]"),
    "zero dimension": (raw_file(tensors=[tensor("t", [0])], data=32), r"dimension below 1: \[0\]"),
    "overflowing product": (
        raw_file(tensors=[tensor("t", [2**62, 2**62, 2**62, 4])], data=32),
        "needs 1569275433846670190958947355801916604025588861116008628224 bytes",
    ),
    "product that wraps to a small one": (
        raw_file(tensors=[tensor("t", [2**32, 2**32 + 1])], data=32),
        "needs 73786976312018",
    ),
    "type 4": (raw_file(tensors=[tensor("t", [8], type_id=4)], data=32), "tensor 't' has unknown type id 4"),
    "type 99": (raw_file(tensors=[tensor("t", [8], type_id=99)], data=32), "unknown type id 99"),
    "broken block": (
        raw_file(tensors=[tensor("t", [48], type_id=8)], data=64),
        "rows of 48 elements, not a multiple of Q8_0's 32",
    ),
    "misaligned": (raw_file(tensors=[tensor("t", [4], offset=16)], data=64), "offset 16, not a multiple of 32"),
    "offset 2^63": (raw_file(tensors=[tensor("t", [4], offset=2**63)], data=64), "at offset 92233720368547758"),
    "data cut": (raw_file(tensors=[tensor("t", [8])], data=31), r"tensor 't' of shape \[8\] needs 32 bytes"),
    "overlap": (
        raw_file(tensors=[tensor("a", [16]), tensor("b", [4], offset=32)], data=64),
        "tensors 'a' and 'b' overlap",
    ),
    "same place": (raw_file(tensors=[tensor("a", [4]), tensor("b", [4])], data=64), "tensors 'a' and 'b' overlap"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert peak < 2**20 + 4 * len(content)


def test_well_formed_raw_file_opens(tmp_path: Path) -> None:
    """The builders above build what they should, so each case fails for its own reason."""
    keys = [key("general.alignment", 4, struct.pack("<I", 64)), key("a", 9, array(8, 2, text("x") + text("")))]
    head = raw_file(keys=keys, tensors=[tensor("t", [4, 2]), tensor("u", [32], type_id=8, offset=64)])
    (tmp_path / "x.gguf").write_bytes(head + bytes(-len(head) % 64) + bytes(64 + 34))
    file = GGUFFile.open(tmp_path / "x.gguf")
    assert file.metadata["a"] == ["x", ""]
    assert file.tensors["t"].shape == (2, 4)
    assert not file.tensors["u"].read(F32).any()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="is a folder, not a file"):
        GGUFFile.open(tmp_path)


def test_a_tensor_of_a_known_type_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(raw_file(tensors=[tensor("blk.0.w", [256], type_id=15)], data=320))
    found = GGUFFile.open(tmp_path / "x.gguf").tensors["blk.0.w"]
    assert (found.type_name, found.nbytes) == ("Q8_K", 292)
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.w': type Q8_K cannot be read"):
        found.read(F32)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "x.gguf"
    write_reference(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def open_bytes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], GGUFFile]:
    folder = tmp_path_factory.mktemp("fuzz")

    def open_bytes(content: bytes) -> GGUFFile:
        (folder / "new").write_bytes(content)
        os.replace(folder / "new", folder / "x.gguf")  # a new file: the last one may still be mapped
        return GGUFFile.open(folder / "x.gguf")

    return open_bytes


@settings(max_examples=250)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(
    valid: bytes, open_bytes: Callable[[bytes], GGUFFile], data: st.DataObject
) -> None:
    """Cut and flipped bytes, through the container, the config and the tensors."""
    content = bytearray(valid[: data.draw(st.just(len(valid)) | st.integers(0, len(valid)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            # Mostly in the header, where it can hurt.
            place = data.draw(st.integers(0, min(len(content), 1400) - 1) | st.integers(0, len(content) - 1))
            content[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    tracemalloc.start()
    try:
        file = open_bytes(bytes(content))
        for found in file.tensors.values():
            assert found.read(found.block.native or F32).shape == found.shape
        hf_tensors(file, hf_config(file))
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.real_model
def test_gemma3(gemma3_path: Path) -> None:
    file = GGUFFile.open(gemma3_path)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 262_144 and tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert file.metadata["tokenizer.ggml.scores"].shape == (262_144,)
    assert len(file.tensors) == 236
