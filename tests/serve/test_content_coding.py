"""Compressed bodies: whatever the chunks, they become what was compressed, or an error that says why."""

from __future__ import annotations

import gzip
import itertools
import random
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.serve.content_coding import decoder_of
from llmjax.serve.errors import ApiError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def bare_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


WRITERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip ", gzip.compress),
    "members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(b"") + gzip.compress(data[7:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "zstd": ("zstd", zstd.compress),
    "frames": ("zstd", lambda data: zstd.compress(data[:7]) + zstd.compress(data[7:])),
}


def decoded(coding: str, chunks: list[bytes], *, size: int = 1000) -> bytes:
    decoder = decoder_of(coding)
    assert decoder is not None
    pieces = [piece for chunk in chunks for piece in decoder.pieces(chunk, size)]
    decoder.finish()
    assert all(0 < len(piece) <= size for piece in pieces)
    return b"".join(pieces)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=50, deadline=None)
@given(
    data=st.binary(max_size=50) | st.builds(lambda part, count: part * count, st.binary(max_size=20), st.just(3000)),
    places=st.lists(st.integers(0, 10**5), max_size=6),
    size=st.integers(1, 5000),
)
def test_any_chunks_become_what_was_compressed(name: str, data: bytes, places: list[int], size: int) -> None:
    coding, write = WRITERS[name]
    assert decoded(coding, cut(write(data), places), size=size) == data


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_damaged_is_an_error(name: str) -> None:
    """Or, where no checksum notices, something else; never anything that is not an ``ApiError``."""
    coding, write = WRITERS[name]
    data = random.Random(1).randbytes(500)
    whole = write(data)
    for end in range(1, len(whole)):
        if name not in ("members", "frames"):  # which may end after each
            with pytest.raises(ApiError, match="its end is missing"):
                decoded(coding, [whole[:end]])
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0xFF
        try:
            decoded(coding, [bytes(broken)])
        except ApiError as error:
            assert error.status == 400 and error.code == "invalid_content_encoding"
    with pytest.raises(ApiError, match=coding.strip().lower().removeprefix("x-")):
        decoded(coding, [whole + b"and more"])


def test_a_large_window_is_refused() -> None:
    """A client must not choose how much memory the server takes for it."""
    large = zstd.compress(
        random.Random(1).randbytes(1000) * 100_000,
        options={zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.checksum_flag: 0},
    )
    with pytest.raises(ApiError, match="valid zstd"):
        decoded("zstd", [large])


@pytest.mark.parametrize("coding", ["", "identity", " Identity "])
def test_what_is_not_compressed_needs_nothing(coding: str) -> None:
    assert decoder_of(coding) is None


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress", "x" * 1000])
def test_other_codings_are_named(coding: str) -> None:
    with pytest.raises(ApiError) as raised:
        decoder_of(coding)
    assert raised.value.status == 415 and coding[:50] in raised.value.message
    assert raised.value.headers["Accept-Encoding"] == "gzip, deflate, zstd"
