"""Sums over devices of several processes of one machine, in memory that all of them map (``src/shared_sum.cc``).

A process is a rank of one group, so there is one such memory in it. The file is in memory, too, and has a name only
until all have opened it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cpu.library import LIBRARY, library

FOLDER = Path("/dev/shm")
PREFIX = "llmjax-"
PLACES = 8  # where sums that do not need each other are made
ROOM = 2**16  # numbers that a device gives at a time; a container has 64 MiB there


class NotShared(Exception):
    """These processes cannot share memory."""


def make(devices: int) -> str:
    """Makes the memory in which ``devices`` devices meet.

    Returns:
        Its name, until `unnamed`.

    Raises:
        NotShared: there is no room for it, or no such thing on this system.
    """
    name, size = PREFIX + secrets.token_hex(), _native().llmjax_shared_bytes(devices, PLACES, ROOM)
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotShared(f"{FOLDER}: {error.strerror}") from error
    try:
        os.posix_fallocate(file, 0, size)  # or a write could end the process
    except OSError as error:
        unnamed(name)
        raise NotShared(f"{FOLDER}: {error.strerror}") from error
    finally:
        os.close(file)
    return name


def unnamed(name: str) -> None:
    """Removes the name: nobody can open the memory any more, and processes that have opened it keep it."""
    with suppress(FileNotFoundError):
        (FOLDER / name).unlink()


def attach(name: str, devices: int) -> None:
    """Has this process sum up there from now on; none of its sums may be under way.

    Raises:
        NotShared: it is not on this machine, or nothing that `make` has made for as many.
    """
    shape = (devices, PLACES, ROOM)
    size = _native().llmjax_shared_bytes(*shape)
    if not name.startswith(PREFIX) or not name.removeprefix(PREFIX).isalnum():
        raise NotShared("shared memory has other names")
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotShared(f"{FOLDER}: {error.strerror}") from error
    try:
        status = os.fstat(file)
        if status.st_uid != os.getuid() or status.st_size != size or not _native().llmjax_shared_open(file, *shape):
            raise NotShared("it is not what was made for these devices")
    finally:
        os.close(file)


def stop() -> None:
    """A process has gone: sums that wait for it, in all processes, end with an error, and so do all later ones. Only
    after `attach`."""
    _native().llmjax_shared_stop()


def shared_sum(x: jax.Array, number: jax.Array | int, *, place: int = 0) -> jax.Array:
    """The sum of f32 arrays of one shape over all devices, each of which must come to the same sums at a place in the
    same order.

    Args:
        number: this device's number among them, from 0 on.
        place: this sum's place, below PLACES; each sum at one needs the result of the one before, or what that led to.
    """
    call = jax.ffi.ffi_call("llmjax_shared_sum", jax.ShapeDtypeStruct(x.shape, x.dtype))
    out: jax.Array = call(x, jnp.asarray(number, jnp.int32), place=np.int32(place))
    return out


@functools.cache
def _native() -> ctypes.CDLL:
    if library() is None:
        raise NotShared("the C++ kernels are not built")
    handle = ctypes.CDLL(str(LIBRARY))
    jax.ffi.register_ffi_target("llmjax_shared_sum", jax.ffi.pycapsule(handle.llmjax_shared_sum), platform="cpu")
    handle.llmjax_shared_bytes.restype = ctypes.c_size_t
    handle.llmjax_shared_bytes.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_size_t]
    handle.llmjax_shared_open.restype = ctypes.c_bool
    handle.llmjax_shared_open.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_size_t]
    return handle
