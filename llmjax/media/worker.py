"""The process that prepares pictures: ``python -m llmjax.media.worker``, started by ``pool``, ends with its socket.

Standard input is the socket. The first frame is the processor, each further one `HEAD`, perhaps another processor, and
the file of a picture or a video; the answer is a frame of `Reply`. What takes more than ``PictureLimits`` allow costs
this process alone.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from llmjax.errors import InvalidRequest
from llmjax.frames import receive_frame, send_frame
from llmjax.media.processor import ImageProcessor
from llmjax.media.reply import HEAD, Asked, PictureLimits, Reply


def main() -> None:
    limits = PictureLimits(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may have requests to finish
    connection = socket.socket(fileno=0)
    if (data := receive_frame(connection)) is None:
        return
    processor: ImageProcessor = pickle.loads(data)  # from the process that has started this one
    _prepare_imports()
    for kind, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, limits.memory)):
        _limit(kind, value)
    send_frame(connection, encoded(Reply()))
    while (data := receive_frame(connection)) is not None:
        # Counts this process's computing time, and nothing catches its signal.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        asked, size = HEAD.unpack_from(data)
        rest = memoryview(data)[HEAD.size :]
        chosen = pickle.loads(rest[:size]) if size else processor
        reply = _answer(chosen, bytes(rest[size:]), limits, Asked(asked))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_frame(connection, encoded(reply))


def encoded(reply: Reply) -> bytes:
    """A reply as it goes over the socket."""
    return msgspec.msgpack.encode(reply, enc_hook=_array)


def _answer(processor: ImageProcessor, data: bytes, limits: PictureLimits, asked: Asked) -> Reply:
    try:
        if asked is Asked.VIDEO:
            return Reply(video=processor.prepare_video(data))
        return Reply(image=processor.prepare(data, several=asked is Asked.SEVERAL))
    except InvalidRequest as error:
        return Reply(error=" ".join(str(error).split())[:500])
    except MemoryError:
        return Reply(error=f"preparing it needs more than {limits.memory >> 20} MiB of memory")
    except Exception as error:  # decoders may fail in any way; the picture is at fault, and no other request
        return Reply(error=f"it cannot be decoded ({type(error).__name__})")


def _prepare_imports() -> None:
    """Imports what decoders load at their first use, before files are limited."""
    from PIL import Image

    Image.init()
    with suppress(ImportError):  # which is said when there is a video
        import av  # noqa: F401


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, np.ascontiguousarray(value).data
    raise NotImplementedError(f"{type(value).__name__} cannot be in a reply")


def _limit(kind: int, value: int) -> None:
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):  # macOS has no limit of the address space
        print(f"llmjax: the limit {kind} of picture processes is not available here", file=sys.stderr)


if __name__ == "__main__":
    main()
