"""How fast GGUF weights get from a file to the device, and how much memory that and a whole engine take.

    python -m benchmarks.loading [FILE.gguf ...] [--synthetic Q4_K ...] [--gigabytes 1] [--engine]

Each file is loaded in a process of its own: every tensor under its Hugging Face name, quantized matrices as records and
others in bfloat16. Synthetic files are random blocks of one type in matrices of 8192 x 4096. `s` is from opening the
file to the last tensor on the device, without starting Python and JAX; `peak - kept` is the largest resident memory
of the process, less what it had before and what the tensors take on the device, as Linux counts it. Files come from
the page cache if they fit.

With --engine a second table has the resident memory of a process with a whole `LLM` of each FILE: after the imports,
when `LLM()` returns (step programs compile by then), and when all of them are compiled or read from the cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from benchmarks.machine import this_machine
from llmjax.checkpoint import GGUFFile, open_checkpoint
from llmjax.checkpoint.gguf.model import ConvertedTensor
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.kernels.qtensor import CPU_TILE, QTensor
from llmjax.weights.ggml.types import GGML_TYPES
from llmjax.weights.packing import pack, put

ROWS, COLUMNS = 8192, 4096
BLOCKS = {block.name: block for block in GGML_TYPES.values()}
SYNTHETIC = "synthetic"
KV_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Loading:
    """What one loading took; sizes in bytes."""

    seconds: float
    file_bytes: int
    kept_bytes: int
    extra_bytes: int


def load(path: Path) -> Loading:
    """Loads all tensors of a file; the process should have done nothing else."""
    device = jax.devices()[0]
    before = _memory("VmRSS")
    started = time.perf_counter()
    tensors = _tensors(path)
    arrays = [_put(tensor, device) for tensor in tensors.values()]
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - started
    kept_bytes = sum(weight.nbytes for weight in arrays)
    return Loading(
        seconds=seconds,
        file_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        kept_bytes=kept_bytes,
        extra_bytes=_memory("VmHWM") - before - kept_bytes,
    )


@dataclass(frozen=True)
class Resident:
    """Bytes that a process has in memory as its engine starts."""

    kv_bytes: int
    imported: int
    loaded: int
    compiled: int
    most: int


def start(path: Path) -> Resident:
    """Starts an engine for four short requests; the process should have done nothing else."""
    from llmjax import LLM

    jax.devices()
    imported = _memory("VmRSS")
    llm = LLM(str(path), max_num_seqs=4, max_model_len=2048, kv_cache_memory_bytes=KV_BYTES)
    loaded = _memory("VmRSS")
    llm.warm_up()
    kv_bytes = llm.info.kv_bytes
    resident = Resident(kv_bytes, imported, loaded, _memory("VmRSS"), _memory("VmHWM"))
    llm.close()
    return resident


def _tensors(path: Path) -> Mapping[str, StoredTensor]:
    file = GGUFFile.open(path)
    if file.metadata.get("general.architecture") != SYNTHETIC:
        return open_checkpoint(path).tensors
    return {name: ConvertedTensor(name, tensor) for name, tensor in file.tensors.items()}


def _put(tensor: StoredTensor, device: jax.Device) -> jax.Array | QTensor:
    source = tensor.row_source()
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    if source is None:
        return jax.device_put(tensor.read(bfloat16), device)
    return put(source, pack(source, tile=CPU_TILE), dtype=bfloat16, activations="float", device=device)


def _memory(field: str) -> int:
    """Bytes of the process: VmRSS now, VmHWM at most."""
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def write_synthetic(path: Path, type_name: str, num_bytes: int) -> None:
    """Matrices of random blocks with scales of 1, as many as `num_bytes` hold and at least one."""
    block = BLOCKS[type_name]
    if block.layout is None or block.format is None:
        raise SystemExit(f"--synthetic {type_name}: not a quantized type that can be read")
    raw = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // block.elems * block.nbytes), dtype=np.uint8)
    fields = raw.reshape(-1, block.nbytes).view(block.layout)[:, 0]
    for name, value in {"d": 1, "m": 1, "dmin": 1, "e": 127}.items():
        if name in (block.layout.names or ()):
            fields[name] = value
    if type_name == "IQ1_M":  # its scale is the top nibbles: 0x3C00 is 1, the lowest nibble first
        fields["scales"] = fields["scales"] & 0x0FFF | np.array([0, 0, 0xC000, 0x3000], np.uint16)
    count = max(1, num_bytes // raw.nbytes)
    infos = [TensorInfo(f"blk.{index}.weight", (ROWS, COLUMNS), type_name) for index in range(count)]
    with open_gguf_writer(path, {"general.architecture": SYNTHETIC}, infos) as writer:
        for info in infos:
            writer.write(info.name, [raw])


def _files(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    for path in arguments.files:
        yield path.name, path
    for type_name in arguments.synthetic:
        path = folder / "synthetic.gguf"
        write_synthetic(path, type_name, int(arguments.gigabytes * 1e9))
        yield f"{type_name}, synthetic", path


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf")
    parser.add_argument("--synthetic", nargs="*", default=["Q4_K"], choices=sorted(BLOCKS), metavar="TYPE")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of a synthetic file")
    parser.add_argument("--engine", action="store_true", help="start a whole engine with each FILE too")
    parser.add_argument("--folder", type=Path, help="where synthetic files are written (a temporary folder)")
    arguments = parser.parse_args(argv)
    print(f"{this_machine()}\n")
    print("| file | GB | s | GB/s | kept, GB | peak - kept, GB |\n|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        for name, path in _files(arguments, Path(folder)):
            try:
                loading = pool.apply(load, (path,))
            except CheckpointError as error:
                raise SystemExit(str(error)) from None
            size = loading.file_bytes / 1e9
            print(
                f"| {name} | {size:.2f} | {loading.seconds:.2f} | {size / loading.seconds:.2f} "
                f"| {loading.kept_bytes / 1e9:.2f} | {loading.extra_bytes / 1e9:.2f} |",
                flush=True,
            )
        if arguments.engine:
            print("\n| MB: file | KV cache | imports | loaded | beyond file and KV | compiled | peak |")
            print("|---|---|---|---|---|---|---|")
        for path in arguments.files if arguments.engine else ():
            resident, size = pool.apply(start, (path,)), path.stat().st_size
            beyond = resident.loaded - size - resident.kv_bytes
            cells = (resident.kv_bytes, resident.imported, resident.loaded, beyond, resident.compiled, resident.most)
            print(
                f"| {path.name}: {size / 1e6:.0f} | {' | '.join(f'{cell / 1e6:.0f}' for cell in cells)} |", flush=True
            )


if __name__ == "__main__":
    main()
