"""The compiled kernels: whether they are there, and which instruction sets of this machine they can use."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax

from llmjax.kernels.devices import CPU, platform_of

LIBRARY = Path(__file__).parent / "libllmjax_cpu.so"
TARGETS = (
    "llmjax_argmax",
    "llmjax_attention",
    "llmjax_linears",
    "llmjax_attention_block",
    "llmjax_convolution",
    "llmjax_experts",
    "llmjax_finite",
    "llmjax_mlp",
    "llmjax_recurrence",
    "llmjax_sample",
    "llmjax_selective_scan",
    "llmjax_zeros",
)
FUNCTIONS = ("llmjax_fit_affine", "llmjax_fit_symmetric")  # called from Python (`searches.py`)
AGAIN = "run `pip install` again, or `python -m llmjax.kernels.cpu.build`"
LEFT_OUT = " without "  # in what the library says it was made from: before instruction sets that it lacks
CPUINFO = Path("/proc/cpuinfo")
FLAGS = {  # by which Linux says that a machine has an instruction set
    "avx2": "avx2",
    "avxvnni": "avx_vnni",
    "avx512": "avx512f",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx": "amx_tile",
    "dotprod": "asimddp",
}
ISA_VARIABLE = "LLMJAX_CPU_ISA"  # for tests and bug reports: an instruction set by name, or "none" for portable kernels


@dataclass(frozen=True)
class Library:
    """The loaded library; its handlers are registered with XLA."""

    isas: tuple[str, ...]  # in the library's order, from narrow to wide
    usable: tuple[str, ...]  # those that this machine has
    forced: str | None  # by the environment
    left_out: tuple[str, ...] = ()  # those that this machine has and the compiler did not know

    @property
    def best(self) -> str:
        """What a call gets that asks for none."""
        return self.forced or self.usable[-1]

    def index(self, isa: str | None) -> int:
        """What the handlers take: -1 for the best at run time, so that a cached program fits other machines.

        Raises:
            ValueError: this machine or build does not have ``isa``.
        """
        isa = isa or self.forced
        if isa is None:
            return -1
        if isa not in self.usable:
            raise ValueError(f"instruction set {isa!r} is not available; there is: {', '.join(self.usable)}")
        return self.isas.index(isa)


def library() -> Library | None:
    """The kernels, or None where they are not built; then a CPU process is warned, once."""
    loaded = _load()
    if isinstance(loaded, Library):
        return loaded
    if loaded and platform_of(jax.devices()[0]) == CPU:
        _warn(loaded)
    return None


def describe() -> str:
    """One line for people: what computes attention and few-row products on a CPU."""
    loaded = _load()
    if not isinstance(loaded, Library):
        return f"portable XLA operations ({loaded or f'{ISA_VARIABLE}=none'})"
    return f"C++ kernels for {loaded.best} (available: {', '.join(loaded.usable)})"


def why_slow() -> str | None:
    """Why this CPU is slower than it could be, and what to do; None: it is not, or somebody wants it so."""
    loaded = _load()
    if isinstance(loaded, Library):
        if not loaded.left_out or loaded.forced is not None:
            return None
        return (
            f"the compiler of the C++ kernels did not know {', '.join(loaded.left_out)}, which this CPU has; install "
            f"GCC 11, clang 12 or newer and {AGAIN}"
        )
    if not loaded:
        return None
    return f"the C++ kernels for CPUs are missing, so everything runs several times slower: {loaded}"


@functools.cache
def _load() -> Library | str:
    """The library, or why there is none ("" if nobody wants it)."""
    forced = os.environ.get(ISA_VARIABLE) or None
    if forced == "none":
        return ""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; install a C++ compiler and {AGAIN}"
    try:
        handle = ctypes.CDLL(str(LIBRARY))
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="cpu")
        for function in FUNCTIONS:
            getattr(handle, function)  # an older library, made before a source was changed, lacks it
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{LIBRARY.name} cannot be used: {error}; {AGAIN}"
    handle.llmjax_isa_name.restype = ctypes.c_char_p
    isas = tuple(handle.llmjax_isa_name(i).decode() for i in range(handle.llmjax_isa_count()))
    usable = tuple(isa for i, isa in enumerate(isas) if handle.llmjax_isa_usable(i))
    if forced is not None and forced not in usable:
        raise ValueError(f"{ISA_VARIABLE}={forced}: not available; there is: {', '.join(usable)}, none")
    made_from = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(handle, "llmjax_digest"))).decode()
    unknown = made_from.partition(LEFT_OUT)[2].split()
    return Library(isas=isas, usable=usable, forced=forced, left_out=tuple(isa for isa in unknown if _has(isa)))


def _has(isa: str) -> bool:
    """Whether this machine has an instruction set that the library knows nothing of, as Linux says."""
    if not CPUINFO.exists():
        return False
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    features = next((value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), [])
    return FLAGS[isa] in features


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(
        f"the C++ kernels for CPUs are missing, so attention and one-row products run several times slower: {why}",
        RuntimeWarning,
        stacklevel=4,
    )
