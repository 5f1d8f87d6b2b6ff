"""The compiled kernels: whether they are there, and which instruction sets of this machine they can use."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from llmjax.kernels.devices import CPU, platform_of

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parent / "libllmjax_cpu.so"
FFI_TARGETS = (
    "llmjax_adapted",
    "llmjax_argmax",
    "llmjax_attention",
    "llmjax_linears",
    "llmjax_attention_block",
    "llmjax_convolution",
    "llmjax_encoder_layer",
    "llmjax_experts",
    "llmjax_finite",
    "llmjax_mlp",
    "llmjax_recurrence",
    "llmjax_sample",
    "llmjax_segments",
    "llmjax_selective_scan",
    "llmjax_zeros",
)
FUNCTIONS = (  # that Python calls; an older library, made before a source was changed, may lack one
    "llmjax_digest",
    "llmjax_fill_panels",
    "llmjax_fit_affine",
    "llmjax_fit_symmetric",
    "llmjax_force_isa",
    "llmjax_forced_isa",
    "llmjax_isa_count",
    "llmjax_isa_here",
    "llmjax_isa_name",
    "llmjax_isa_usable",
    "llmjax_pack_blocks",
    "llmjax_quantize",
    "llmjax_record",
    "llmjax_recorded",
    "llmjax_shared_bytes",
    "llmjax_shared_open",
    "llmjax_shared_stop",
    "llmjax_shared_sum",
)
MISSING = "the C++ kernels for CPUs are missing, so everything runs several times slower"
AGAIN = "run `pip install` again, or `python -m llmjax.kernels.cpu.build`"
LEFT_OUT = " without "  # in what the library says it was made from: before sets that the compiler did not know
REFUSED = 2  # what `llmjax_isa_here` says of an instruction set that the system lets no program use
ISA_VARIABLE = "LLMJAX_CPU_ISA"  # for tests and bug reports: an instruction set by name, or "none" for portable kernels


@dataclass(frozen=True)
class Library:
    """The loaded library; its handlers are registered with XLA."""

    isas: tuple[str, ...]  # in the library's order, from narrow to wide
    usable: tuple[str, ...]  # those that this machine has
    forced: str | None = None  # by `forced_isa` or the environment
    left_out: tuple[str, ...] = ()  # those that this machine has and the compiler did not know
    not_compiled: tuple[str, ...] = ()  # those that this machine has and the library was not compiled for
    refused: tuple[str, ...] = ()  # those that the processor has and the system lets no program use

    @property
    def best(self) -> str:
        """What calls get."""
        return self.forced or self.usable[-1]


def library() -> Library | None:
    """The kernels, or None where they are not built; then a CPU process is warned, once."""
    loaded = _load()
    if isinstance(loaded, Library):
        return loaded
    if loaded and platform_of(jax.devices()[0]) == CPU:
        _warn(loaded)
    return None


def opened_handle() -> ctypes.CDLL | None:
    """The library itself, for functions that Python calls; None where it is not built."""
    opened = _opened()
    return opened.handle if isinstance(opened, _Opened) else None


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Makes an instruction set the one that all calls of the process take, compiled programs included: for tests and
    bug reports. What is computed within must be waited for within, since JAX runs programs asynchronously.

    Args:
        isa: one of ``Library.usable``.

    Raises:
        ValueError: this machine or build does not have it.
    """
    opened = _opened()
    if not isinstance(opened, _Opened):
        raise ValueError(f"instruction set {isa!r} is not available: there are no C++ kernels")
    before = opened.handle.llmjax_forced_isa()
    opened.force(isa)
    try:
        yield
    finally:
        opened.handle.llmjax_force_isa(before)


def describe() -> str:
    """One line for people: what computes attention and few-row products on a CPU."""
    loaded = _load()
    if not isinstance(loaded, Library):
        return f"portable XLA operations ({loaded or f'{ISA_VARIABLE}=none'})"
    refused = "".join(f"; {isa} is there, but the system refuses it" for isa in loaded.refused)
    return f"C++ kernels for {loaded.best} (available: {', '.join(loaded.usable)}{refused})"


def why_slow() -> str | None:
    """Why this CPU is slower than it could be, and what to do; None: it is not, or somebody wants it so."""
    loaded = _load()
    if not isinstance(loaded, Library):
        return f"{MISSING}: {loaded}" if loaded else None
    if loaded.forced is not None:
        return None
    if loaded.left_out:
        return (
            f"the compiler of the C++ kernels did not know {', '.join(loaded.left_out)}, which this CPU has; install "
            f"GCC 11, clang 12 or newer and {AGAIN}"
        )
    if loaded.not_compiled:
        return (
            f"the C++ kernels were compiled on a machine without {', '.join(loaded.not_compiled)}, which this CPU has; "
            f"{AGAIN} here"
        )
    if loaded.refused:
        return (
            f"this CPU has {', '.join(loaded.refused)}, but the system refuses it: Linux 5.16 or newer lets programs "
            "use its tile registers, inside containers and virtual machines if their host does"
        )
    return None


def _load() -> Library | str:
    """The library as it is now, or why there is none ("" if nobody wants it)."""
    opened = _opened()
    if not isinstance(opened, _Opened):
        return opened
    index = opened.handle.llmjax_forced_isa()
    return opened.library if index < 0 else replace(opened.library, forced=opened.library.isas[index])


@dataclass(frozen=True)
class _Opened:
    handle: ctypes.CDLL
    library: Library

    def force(self, isa: str) -> None:
        if isa not in self.library.usable:
            there = ", ".join(self.library.usable)
            raise ValueError(f"instruction set {isa!r} is not available; there is: {there}")
        self.handle.llmjax_force_isa(self.library.isas.index(isa))


@functools.cache
def _opened() -> _Opened | str:
    """The library, loaded and registered once, or why there is none ("" if nobody wants it)."""
    forced = os.environ.get(ISA_VARIABLE) or None
    if forced == "none":
        return ""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; install a C++ compiler and {AGAIN}"
    try:
        handle = ctypes.CDLL(str(LIBRARY))
        for function in FUNCTIONS:
            getattr(handle, function)
        for target in FFI_TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{LIBRARY.name} cannot be used: {error}; {AGAIN}"
    opened = _Opened(handle, _contents(handle))
    if forced is not None:
        usable = opened.library.usable
        if forced not in usable:
            raise ValueError(f"{ISA_VARIABLE}={forced}: not available; there is: {', '.join(usable)}, none")
        opened.force(forced)
    return opened


def _contents(handle: ctypes.CDLL) -> Library:
    """What a library has for this machine."""
    handle.llmjax_isa_name.restype = ctypes.c_char_p
    isas = tuple(handle.llmjax_isa_name(i).decode() for i in range(handle.llmjax_isa_count()))
    usable = tuple(isa for i, isa in enumerate(isas) if handle.llmjax_isa_usable(i))
    here = {isa: handle.llmjax_isa_here(i) for i, isa in enumerate(isas)}
    made_from = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(handle, "llmjax_digest"))).decode()
    unknown = made_from.partition(LEFT_OUT)[2].split()
    best = isas.index(usable[-1])  # narrower ones that it takes nothing from are not missed
    missed = [isa for i, isa in enumerate(isas) if here[isa] == 1 and i > best]
    return Library(
        isas=isas,
        usable=usable,
        left_out=tuple(isa for isa in missed if isa in unknown),
        not_compiled=tuple(isa for isa in missed if isa not in unknown),
        refused=tuple(isa for isa in isas if here[isa] == REFUSED),
    )


@functools.cache
def _warn(why: str) -> None:
    logger.warning("%s: %s", MISSING, why)
