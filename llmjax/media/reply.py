"""What the server and a process that prepares pictures say to each other."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from llmjax.media.image import PreparedImage, PreparedVideo


@dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """What preparing one picture may take.

    Attributes:
        cpu_seconds: computing time, after which the process is killed.
        wall_seconds: time until the answer is there, however busy the machine is, and before that until a process is
            free.
        memory: bytes of address space of the process.
        reply: bytes of the prepared picture.
    """

    cpu_seconds: float = 20.0
    wall_seconds: float = 60.0
    memory: int = 4 * 2**30
    reply: int = 2**30


class Asked(IntEnum):
    """What a file is: the one picture of a prompt, one of several, or a video."""

    ALONE = 0
    SEVERAL = 1
    VIDEO = 2


HEAD = struct.Struct("<BI")
"""What a file comes after: `Asked`, and the bytes of the pickled processor between both; 0: it is the first one."""


class Reply(msgspec.Struct):
    """The answer to a picture or a video: one of these, or none when the process has started."""

    image: PreparedImage | None = None
    video: PreparedVideo | None = None
    error: str | None = None


def decoded(data: bytes | bytearray) -> Reply:
    """A reply from a process that is not trusted: a decoder may have been made to send anything.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return msgspec.msgpack.decode(data, type=Reply, dec_hook=_array)


def _array(kind: Any, value: Any) -> np.ndarray[Any, Any]:
    name, shape, data = value
    if name not in ("float32", "int32"):
        raise ValueError("an array of another type")
    return np.frombuffer(data, np.dtype(name)).reshape(shape)
