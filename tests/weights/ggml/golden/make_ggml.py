"""Writes ggml.npz: weights, and what ggml's own quantizers make of them.

Usage: python make_ggml.py LLAMA_CPP, where LLAMA_CPP is a source tree of llama.cpp (made with the one in
llama-cpp-python 0.3.36's source distribution). ggml-quants.c is compiled alone for baseline x86-64, as ggml's build
does: without fused multiply-add.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.weights.ggml.reference import QUANTIZERS

# ggml-quants.c asks for sizes only to return the number of bytes written.
SHIM = """
#include <stdint.h>
#include <stdlib.h>
size_t ggml_row_size(int type, int64_t n) { return 0; }
size_t ggml_type_size(int type) { return 0; }
const char * ggml_type_name(int type) { return ""; }
void ggml_abort(const char * file, int line, const char * format, ...) { abort(); }
"""


def library(llama_cpp: Path) -> ctypes.CDLL:
    source = llama_cpp / "ggml"
    with tempfile.TemporaryDirectory() as folder:
        shim, output = Path(folder) / "shim.c", Path(folder) / "libggml.so"
        shim.write_text(SHIM)
        flags = ["-O3", "-std=gnu11", "-DNDEBUG", "-w", "-fPIC", "-shared", "-march=x86-64"]
        includes = [f"-I{source / 'include'}", f"-I{source / 'src'}"]
        sources = [source / "src" / "ggml-quants.c", shim]
        subprocess.run(["gcc", *flags, *includes, *sources, "-o", output, "-lm"], check=True)
        return ctypes.CDLL(str(output))


def quantized(ggml: ctypes.CDLL, weights: np.ndarray, scheme: str) -> np.ndarray:
    block = QUANTIZERS[scheme].block
    numbers = np.ascontiguousarray(weights.reshape(-1, block.elems))
    result = np.zeros((len(numbers), block.nbytes), np.uint8)
    function = getattr(ggml, "quantize_" + scheme.replace("_k", "_K"))
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function(numbers.ctypes.data, result.ctypes.data, *numbers.shape, None)
    return result


def weights() -> np.ndarray:
    """f32 [n, 256]: ordinary and extreme super-blocks."""
    rng = np.random.default_rng(0)
    shape = (2, 256)
    signs = rng.choice([-1.0, 1.0], shape)
    cases = [
        rng.standard_normal((4, 256)) * 0.02,
        rng.standard_t(2, (4, 256)),
        rng.standard_normal((2, 8, 32)).reshape(shape) * np.repeat(np.exp(rng.uniform(-30, 5, (2, 8))), 32, axis=1),
        rng.integers(-8, 8, shape) * 0.125,
        rng.integers(-1, 2, shape) * 3.0,
        rng.random(shape),
        -rng.random(shape) - 1,
        rng.standard_normal(shape) * (rng.random(shape) < 0.02),
        np.where(rng.random(shape) < 0.01, 1e4, 1) * rng.standard_normal(shape),
        rng.integers(0, 2**12, shape, dtype=np.uint32).view(np.float32) * signs,  # denormal
        signs * 10 ** rng.uniform(37, 38.5, shape),
        rng.standard_normal(shape) * 1e-15,
        rng.standard_normal(shape) * 1e-7,
        np.zeros((1, 256)),
        np.full((1, 256), -0.0),
        np.full((1, 256), 0.75),
        np.full((1, 256), -0.75),
        np.where(np.arange(256) == 77, 3e38, 0)[None],
        np.where(np.arange(256) % 3 == 0, -0.0, 0.0)[None],
    ]
    halves = (rng.standard_normal(shape) * 0.05).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    everything = [case.astype(np.float32) for case in cases] + [halves.view(np.float32), bits]
    numbers = np.concatenate(everything)
    return np.where(np.isfinite(numbers), numbers, np.float32(1.5))


if __name__ == "__main__":
    ggml = library(Path(sys.argv[1]))
    numbers = weights()
    golden: dict[str, Any] = {scheme: quantized(ggml, numbers, scheme) for scheme in QUANTIZERS}
    np.savez_compressed(Path(__file__).with_name("ggml.npz"), weights=numbers, **golden)
