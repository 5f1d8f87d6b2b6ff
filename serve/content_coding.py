"""Bodies that come compressed (RFC 9110, 8.4.1; zstd: RFC 8878): made whole piece by piece, so that no more of one is
in memory than has been asked for."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from llmjax.serve.errors import ApiError, cut

CODINGS = ("gzip", "deflate", "zstd")
ZSTD_WINDOW_LOG = 23  # 8 MiB, which is what RFC 9659 lets a server count on


class Decoder(Protocol):
    """Takes a body as it comes, and gives what it stands for in pieces."""

    def pieces(self, data: bytes, size: int) -> Iterator[bytes]:
        """What some more of the body stands for, in pieces of at most ``size`` bytes.

        Raises:
            ApiError: 400, it is damaged.
        """

    def finish(self) -> None:
        """The body has ended; raises ``ApiError`` (400) if it should not have."""


def decoder_of(coding: str) -> Decoder | None:
    """What reads a body by its ``Content-Encoding``; None: it is as it comes.

    Raises:
        ApiError: 415, the coding is not known.
    """
    name = coding.strip().lower().removeprefix("x-")
    match name:
        case "" | "identity":
            return None
        case "gzip":
            return _Zlib(name, zlib.MAX_WBITS | 16)
        case "deflate":
            return _Zlib(name, zlib.MAX_WBITS)
        case "zstd":
            return _Zstd()
    raise ApiError(
        f"Content-Encoding must be one of {', '.join(CODINGS)}, not {cut(coding)!r}",
        status=415,
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": ", ".join(CODINGS)},
    )


class _Zlib:
    def __init__(self, name: str, wbits: int) -> None:
        self._name = name
        self._wbits = wbits
        self._stream: Any = None

    def pieces(self, data: bytes, size: int) -> Iterator[bytes]:
        more = False  # in the stream, though all of the data has gone into it
        while data or more:
            if self._stream is None:
                # Some leave out zlib's header, which deflate should have.
                bare = self._name == "deflate" and data[0] & 15 != zlib.DEFLATED
                self._stream = zlib.decompressobj(-self._wbits if bare else self._wbits)
            try:
                piece = self._stream.decompress(data, size)
            except zlib.error as error:
                raise _damaged(self._name, str(error)) from None
            if piece:
                yield piece
            data, more = self._stream.unconsumed_tail, len(piece) == size
            if self._stream.eof:
                data, more = self._stream.unused_data, False
                if self._name == "gzip":  # another member may follow
                    self._stream = None
                elif data:
                    raise _damaged(self._name, "data follows its end")

    def finish(self) -> None:
        if self._stream is not None and not self._stream.eof:
            raise _damaged(self._name, "its end is missing")


class _Zstd:
    def __init__(self) -> None:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        self._new = lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})
        self._error = zstd.ZstdError
        self._stream: Any = None

    def pieces(self, data: bytes, size: int) -> Iterator[bytes]:
        while data or (self._stream is not None and not self._stream.needs_input):
            if self._stream is None:
                self._stream = self._new()
            try:
                piece = self._stream.decompress(data, size)
            except self._error as error:
                raise _damaged("zstd", str(error)) from None
            if piece:
                yield piece
            data = b""
            if self._stream.eof:  # another frame may follow
                data, self._stream = self._stream.unused_data, None

    def finish(self) -> None:
        if self._stream is not None:
            raise _damaged("zstd", "its end is missing")


def _damaged(name: str, why: str) -> ApiError:
    return ApiError(f"the body is not valid {name}: {why}", code="invalid_content_encoding")
