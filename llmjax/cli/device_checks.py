"""What steps ask of a device, one thing after another, each against what NumPy computes: ``llmjax doctor``.

    python -m llmjax.cli.device_checks PLATFORM [FIRST]

runs the checks, from number FIRST on, and prints a line of JSON before and after each. `run_checks` does that in a
process of its own, since a compiler that meets what it does not know may end the process, or never answer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from llmjax.errors import ConfigError

SECONDS = 180.0  # that a check may take, compilations included
OPEN = "open"

Devices = Sequence[jax.Device]


class Wrong(Exception):
    """A result is not what it should be."""


@dataclass(frozen=True)
class Check:
    """One thing that steps do.

    Attributes:
        name: for people.
        run: does it on the devices; returns what is worth knowing, or raises whatever is wrong.
        meaning: what it means if that fails.
        needed: by every model; else some settings do not work, or cost more.
    """

    name: str
    run: Callable[[Devices], str]
    meaning: str
    needed: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a check ended; ``error`` is None where it passed, and ``detail`` what it found."""

    name: str
    seconds: float
    error: str | None
    detail: str
    meaning: str
    needed: bool


def _same(found: Any, expected: Any, what: str) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Wrong(f"{what} is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}")
    if not np.array_equal(found.view(np.uint8), expected.view(np.uint8)):
        different = np.flatnonzero((found != expected).ravel())
        raise Wrong(
            f"{what}: {len(different)} of {found.size} entries are wrong, the first at {different[:1].tolist()}"
        )


def _near(found: Any, expected: np.ndarray, scale: Any, limit: float, what: str) -> float:
    """The largest error in units of ``scale``.

    Raises:
        Wrong: it is above ``limit``.
    """
    error = float(np.max(np.abs(np.asarray(found, np.float64) - expected) / scale))
    if not error <= limit:
        raise Wrong(f"{what}: an error of {error:.1e}, where {limit:.0e} is as much as the type explains")
    return error


def _on(devices: Devices, x: Any) -> jax.Array:
    return jax.device_put(x, devices[0])


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _transfers(devices: Devices) -> str:
    for dtype in (np.float32, jnp.bfloat16, np.float16, np.int32, np.uint32, np.uint16, np.uint8, np.bool_):
        values = (_rng().standard_normal((37, 53)) * 50).astype(dtype)
        for strided, x in (("", values), (" transposed", values.T), (" strided", values[::2, 1:])):
            _same(_on(devices, x), np.ascontiguousarray(x), f"{np.dtype(dtype).name}{strided}")
    large = _rng().standard_normal(1 << 22).astype(np.float32)
    started = time.monotonic()
    copied = jax.block_until_ready(_on(devices, large))
    there = time.monotonic()
    _same(copied, large, "16 MiB")
    rates = (large.nbytes / max(1e-6, seconds) / 1e9 for seconds in (there - started, time.monotonic() - there))
    return "{:.1f} GB/s there, {:.1f} GB/s back".format(*rates)


def _compiles(devices: Devices) -> str:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    _same(jax.jit(lambda x: x * 2 + 1)(_on(devices, x)), x * 2 + 1, "2 x + 1")
    return ""


def _compiles_in_threads(devices: Devices) -> str:
    x = _on(devices, np.ones(8, np.float32))
    programs = [jax.jit(partial(jnp.multiply, float(number))).lower(x) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        compiled = list(threads.map(lambda program: program.compile(), programs))
    for number, program in enumerate(compiled):
        _same(program(x), np.full(8, number, np.float32), f"program {number}")
    return ""


def _products(dtype: Any, devices: Devices) -> str:
    rng = _rng()
    x, y = (rng.standard_normal(shape).astype(dtype) for shape in ((33, 1024), (128, 1024)))

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, y, dims, precision="highest", preferred_element_type=jnp.float32)

    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    product_there = jax.jit(product)(_on(devices, x), _on(devices, y))
    if product_there.dtype != jnp.float32:
        raise Wrong(f"the sum is {product_there.dtype}, not float32")
    error = _near(product_there, wide_x @ wide_y.T, np.abs(wide_x) @ np.abs(wide_y).T, 2e-6, "sums of 1024 products")
    return f"error {error:.0e}"


def _gathers(devices: Devices) -> str:
    table = _rng().standard_normal((100, 3, 16)).astype(np.float32)
    rows = _rng().integers(0, 100, (7, 5)).astype(np.int32)
    for dtype in (np.float32, jnp.bfloat16):
        taken = jax.jit(lambda table, rows: table[rows])(_on(devices, table.astype(dtype)), _on(devices, rows))
        _same(taken, table.astype(dtype)[rows], f"rows of {np.dtype(dtype).name}")
    clipped = jax.jit(lambda table, rows: table.at[rows].get(mode="clip"))(_on(devices, table), _on(devices, rows + 90))
    _same(clipped, table[np.minimum(rows + 90, 99)], "rows after the last")
    return ""


def _scatters_of(dtype: Any, devices: Devices) -> str:
    pages = np.zeros((9, 2, 3, 4, 8), dtype)
    page, offset = np.array([3, 5, 5, 9], np.int32), np.array([1, 0, 3, 2], np.int32)  # the last is outside
    new = (_rng().standard_normal((4, 2, 3, 8)) * 50).astype(dtype)

    def store(pages: jax.Array, page: jax.Array, offset: jax.Array, new: jax.Array) -> jax.Array:
        at = (page[:, None, None], jnp.arange(2)[:, None], jnp.arange(3), offset[:, None, None])
        return pages.at[at].set(new, mode="drop")

    stored = jax.jit(store)(*(_on(devices, x) for x in (pages, page, offset, new)))
    expected = pages.copy()
    expected[page[:3], :, :, offset[:3]] = new[:3]
    _same(stored, expected, "stored keys")
    return ""


def _adds(devices: Devices) -> str:
    at, x = np.array([1, 4, 1, 9], np.int32), np.array([1.5, 2.0, 0.25, 7.0], np.float32)
    sums = jax.jit(lambda at, x: jnp.zeros(5).at[at].add(x, mode="drop"))(_on(devices, at), _on(devices, x))
    _same(sums, np.array([0, 1.75, 0, 0, 2], np.float32), "sums")
    return ""


def _slices(devices: Devices) -> str:
    x = np.arange(60, dtype=np.float32).reshape(6, 10)

    def moved(x: jax.Array, first: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, first, 2)
        return jax.lax.dynamic_update_slice_in_dim(x, part + 100, first + 2, axis=0)

    expected = x.copy()
    expected[3:5] = x[1:3] + 100
    _same(jax.jit(moved)(_on(devices, x), _on(devices, np.int32(1))), expected, "moved rows")
    return ""


def _static_loop(devices: Devices) -> str:
    x = np.arange(8, dtype=np.float32)
    result = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x * 2 + i, x))(_on(devices, x))
    for i in range(5):
        x = x * 2 + i
    _same(result, x, "five iterations")
    return ""


def _dynamic_loop(devices: Devices) -> str:
    def doubled(x: jax.Array, end: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda carry: carry[0] < end, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

    x = np.arange(8, dtype=np.float32)
    for end in (0, 3):
        _same(jax.jit(doubled)(_on(devices, x), _on(devices, np.int32(end))), x * 2**end, f"{end} iterations")
    return ""


def _conditional(devices: Devices) -> str:
    def chosen(x: jax.Array, yes: jax.Array) -> jax.Array:
        return jax.lax.cond(yes, lambda x: jnp.cumsum(x), lambda x: -x, x)

    x = np.arange(8, dtype=np.float32)
    for yes, expected in ((True, np.cumsum(x, dtype=np.float32)), (False, -x)):
        _same(jax.jit(chosen)(_on(devices, x), _on(devices, np.bool_(yes))), expected, f"the branch for {yes}")
    return ""


def _sorts(devices: Devices) -> str:
    x = _rng().permutation(3000).astype(np.float32).reshape(3, 1000)
    _same(jax.jit(lambda x: jnp.sort(x, axis=-1))(_on(devices, x)), np.sort(x), "sorted rows")
    keys = _rng().integers(0, 9, 500).astype(np.int32)
    order = jax.jit(lambda x: jnp.argsort(x, stable=True))(_on(devices, keys))
    _same(order, np.argsort(keys, kind="stable").astype(np.int32), "a stable order")
    top, index = jax.jit(lambda x: jax.lax.top_k(x, 20))(_on(devices, x))
    _same(top, -np.sort(-x)[:, :20], "the largest")
    _same(index, np.argsort(-x, kind="stable")[:, :20].astype(np.int32), "their places")
    sums = jax.jit(lambda x: jnp.cumsum(x, axis=-1))(_on(devices, keys))
    _same(sums, np.cumsum(keys, dtype=np.int32), "running sums")
    return ""


def _bits(devices: Devices) -> str:
    words = _rng().integers(0, 1 << 32, 4096, dtype=np.uint32)

    def mixed(x: jax.Array) -> jax.Array:
        return (x * jnp.uint32(0x9E3779B1) ^ x >> 13) + (x << 7)

    with np.errstate(over="ignore"):
        expected = (words * np.uint32(0x9E3779B1) ^ words >> 13) + (words << 7)
    _same(jax.jit(mixed)(_on(devices, words)), expected, "32-bit arithmetic")
    finite = words & np.uint32(0x7F7FFFFF)
    as_floats = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, jnp.float32))
    _same(as_floats(_on(devices, finite)), finite.view(np.float32), "words as floats")
    as_bytes = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8))
    _same(as_bytes(_on(devices, words)), words.view(np.uint8).reshape(-1, 4), "words as bytes")
    return ""


def _float8(devices: Devices) -> str:
    x = (_rng().standard_normal(4096) * 20).astype(np.float32)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        there_and_back = jax.jit(lambda x, dtype=dtype: x.astype(dtype).astype(jnp.float32))
        expected = x.astype(dtype).astype(np.float32)
        _same(there_and_back(_on(devices, x)), expected, f"rounded to {np.dtype(dtype).name}")
    return ""


def _functions(devices: Devices) -> str:
    x = np.linspace(-30, 30, 4001, dtype=np.float32)
    errors = []
    for name in ("exp", "tanh", "sin", "cos"):
        expected = getattr(np, name)(x.astype(np.float64))
        result = jax.jit(getattr(jnp, name))(_on(devices, x))
        errors.append(_near(result, expected, np.maximum(np.abs(expected), 1e-2), 1e-5, name))
    positive = np.exp(x)
    result = jax.jit(lambda x: jax.lax.rsqrt(x) * jnp.log(x))(_on(devices, positive))
    wide = positive.astype(np.float64)
    expected = np.log(wide) / np.sqrt(wide)
    errors.append(_near(result, expected, np.maximum(np.abs(expected), 1e-2 / np.sqrt(wide)), 1e-5, "rsqrt and log"))
    return f"error {max(errors):.0e}"


def _not_finite(devices: Devices) -> str:
    x = np.array([1.0, np.nan, np.inf, -np.inf, 0.0], np.float32)
    finite, least = jax.jit(lambda x: (jnp.isfinite(x * 1.5), jnp.where(x > 0, x, -jnp.inf)))(_on(devices, x))
    _same(finite, np.isfinite(x), "which numbers are finite")
    _same(least, np.where(x > 0, x, -np.inf).astype(np.float32), "a choice by comparing")
    return ""


def _donates(devices: Devices) -> str:
    from llmjax.kernels.devices import platform_of, take_donations

    take_donations(platform_of(devices[0]))
    x = _on(devices, np.zeros((1024, 1024), np.float32))
    program = jax.jit(lambda x: x.at[3].add(1.0), donate_argnums=0).lower(x).compile()
    y = program(x)
    _same(y[2:5, 0], np.array([0, 1, 0], np.float32), "the changed array")
    if not x.is_deleted():
        raise Wrong("the argument is still there, so that the result is a copy")
    memory = program.memory_analysis()
    if memory is not None and memory.alias_size_in_bytes < x.nbytes:
        raise Wrong("the compiler keeps the result beside the argument")
    return ""


def _memory(devices: Devices) -> str:
    stats = devices[0].memory_stats() or {}
    missing = [name for name in ("bytes_limit", "bytes_in_use") if name not in stats]
    if missing:
        raise Wrong(f"memory_stats() says nothing of {' and '.join(missing)}")
    return f"{stats['bytes_limit'] / 2**30:.1f} GiB, {stats['bytes_in_use'] / 2**30:.1f} GiB in use"


def _step_memory(devices: Devices) -> str:
    x = _on(devices, np.ones((64, 64), np.float32))
    if jax.jit(lambda x: jnp.sin(x) @ x).lower(x).compile().memory_analysis() is None:
        raise Wrong("compiled programs do not say how much memory they take")
    return ""


def _attention(dtype: Any, cache: Any, limit: float, devices: Devices) -> str:
    """A chunk and two decodes over pages, as the portable operations compute it."""
    from llmjax.kernels.attention import KVPages, RaggedBatch, make_pages, portable, reference
    from llmjax.kernels.loops import bounded_loops

    rng, page, heads, kv_heads, size = _rng(), 8, 8, 2, 32
    length, count = np.array([29, 40, 3], np.int32), np.array([5, 1, 1], np.int32)
    start = np.concatenate(([0], np.cumsum(count))).astype(np.int32)
    table = np.arange(1, 19, dtype=np.int32).reshape(3, 6)
    where = np.concatenate([np.arange(n - c, n) for n, c in zip(length, count, strict=True)])
    row = np.repeat(np.arange(3), count)
    index = (table[row, where // page] * page + where % page).astype(np.int32)
    batch = RaggedBatch(query_start=start, kv_len=length, page_table=table, kv_index=index)
    make = partial(make_pages, num_pages=19, page_size=page, num_kv_heads=kv_heads, head_dim=size, dtype=cache)
    single, words = (jax.eval_shape(partial(make, as_words=as_words)) for as_words in (False, True))
    keys, values = (rng.standard_normal((19 * page, kv_heads, size)) for _ in range(2))
    empty = single.with_data(np.zeros(single.data.shape, single.data.dtype))
    filled = reference.write_kv(empty, keys, values, np.arange(19 * page))
    q, k, v = (rng.standard_normal((7, n, size)).astype(dtype) for n in (heads, kv_heads, kv_heads))
    expected_pages = reference.write_kv(filled, k, v, index)
    expected = reference.ragged_paged_attention(q, expected_pages, batch, scale=size**-0.5)
    given = words.with_data(np.asarray(filled.data).view(words.data.dtype))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch) -> Any:
        return portable.attend(q, k, v, pages, batch, None, scale=size**-0.5, window=None, softcap=None)

    arguments = jax.tree.map(partial(_on, devices), (q, k, v, given, batch))
    with bounded_loops(True):
        out, pages = jax.jit(attend)(*arguments)
    _same(np.asarray(pages.data).view(np.asarray(expected_pages.data).dtype), expected_pages.data, "stored keys")
    return f"error {_near(out, expected.astype(np.float64), 1.0, limit, 'attention'):.0e}"


def _collectives(devices: Devices) -> str:
    if len(devices) == 1:
        return "one device"
    n, mesh = len(devices), Mesh(np.array(devices), ("tensor",))
    part = PartitionSpec("tensor")

    def together(x: jax.Array) -> tuple[jax.Array, ...]:
        number = jax.lax.axis_index("tensor").astype(x.dtype)
        summed = jax.lax.psum(x, "tensor")
        every = jax.lax.all_gather(x, "tensor", tiled=True)
        rows = jax.lax.all_to_all(jnp.broadcast_to(x, (n, *x.shape)), "tensor", 0, 0)
        return summed, jax.lax.pmax(x, "tensor"), every[None], rows[None], number[None]

    for dtype in (np.float32, jnp.bfloat16, np.int32):
        x = np.arange(3 * n * 16).reshape(3 * n, 16).astype(dtype)  # sums of whole numbers that all types hold
        x = (x.astype(np.float32) % 32).astype(dtype)
        specs = (PartitionSpec(), PartitionSpec(), part, part, part)
        run = jax.jit(jax.shard_map(together, mesh=mesh, in_specs=part, out_specs=specs, check_vma=False))
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, part))
        summed, largest, every, rows, own = run(placed)
        parts, name = x.reshape(n, 3, 16), np.dtype(dtype).name
        _same(summed, parts.astype(np.float32).sum(0).astype(dtype), f"psum of {name}")
        _same(largest, parts.astype(np.float32).max(0).astype(dtype), f"pmax of {name}")
        _same(every, np.broadcast_to(x, (n, *x.shape)), f"all_gather of {name}")
        _same(rows, np.broadcast_to(parts, (n, *parts.shape)), f"all_to_all of {name}")
        _same(own, np.arange(n).astype(dtype), "axis_index")
    return f"{n} devices"


NOTHING_WORKS = "nothing can run on this device"
CHECKS: tuple[Check, ...] = (
    Check("host transfers", _transfers, NOTHING_WORKS),
    Check("compile and run", _compiles, NOTHING_WORKS),
    Check("compile in threads", _compiles_in_threads, "set --compile-threads 1", needed=False),
    Check("products of float32", partial(_products, np.float32), "--dtype float32 is not exact", needed=False),
    Check("products of bfloat16", partial(_products, jnp.bfloat16), "set --dtype to a type whose products are right"),
    Check("products of float16", partial(_products, np.float16), "--dtype float16 does not work", needed=False),
    Check("gather", _gathers, "embeddings and the KV cache cannot be read"),
    Check("scatter of float32", partial(_scatters_of, np.float32), "keys and values cannot be stored"),
    Check("scatter of bfloat16", partial(_scatters_of, jnp.bfloat16), "set --kv-cache-dtype float32"),
    Check("scatter of words", partial(_scatters_of, np.uint32), "--kv-cache-dtype int8 and fp8 do not work"),
    Check("scatter of bytes", partial(_scatters_of, np.uint8), "nothing: bytes are stored as words", needed=False),
    Check("scattered sums", _adds, "mixtures of experts and penalties of repetition do not work"),
    Check("slices at run time", _slices, "layers cannot find their pages"),
    Check("loop of fixed length", _static_loop, "attention cannot go over the pages of a sequence"),
    Check("loop until", _dynamic_loop, "leave --decode-steps at 1", needed=False),
    Check("conditional", _conditional, "loops cannot end early, and sampling does not work"),
    Check("sort and top-k", _sorts, "sampling and mixtures of experts do not work"),
    Check("bits", _bits, "noise of sampling and quantized weights are wrong"),
    Check("8-bit floats", _float8, "--kv-cache-dtype fp8 and fp8 weights do not work", needed=False),
    Check("functions", _functions, "softmax, rotations and activations are not exact"),
    Check("not finite", _not_finite, "a failed computation would not be seen, and masks do not hold"),
    Check("donation", _donates, "every step copies the whole KV cache: slow, and twice the memory"),
    Check("memory of the device", _memory, "set --kv-cache-memory-bytes", needed=False),
    Check("memory of programs", _step_memory, "set --kv-cache-memory-bytes", needed=False),
    Check("attention", partial(_attention, np.float32, np.dtype(np.float32), 1e-5), "--dtype float32 is wrong"),
    Check(
        "attention, bfloat16", partial(_attention, jnp.bfloat16, np.dtype(jnp.bfloat16), 3e-2), "answers would be wrong"
    ),
    Check(
        "attention, int8 cache",
        partial(_attention, np.float32, np.dtype(np.int8), 1e-5),
        "--kv-cache-dtype int8 does not work",
        needed=False,
    ),
    Check("collectives", _collectives, "--tensor-parallel-size must stay 1", needed=False),
)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}")[:500]


def _run(check: Check, devices: Devices) -> Outcome:
    started, error, detail = time.monotonic(), None, ""
    try:
        detail = check.run(devices)
    except Exception as caught:  # whatever a plug-in raises is what is asked for
        error = _one_line(caught)
    seconds = time.monotonic() - started
    return Outcome(check.name, seconds, error, detail, check.meaning, check.needed)


def main(platform: str, first: int) -> None:
    """Runs the checks on all devices of a platform, from number ``first`` on."""
    from llmjax.jax_settings import use_device
    from llmjax.platforms import devices_of

    try:
        devices = devices_of(platform)
    except ConfigError as error:
        sys.exit(str(error))
    use_device(devices[0])
    for check in CHECKS[first:]:
        print(json.dumps({"begin": check.name}), flush=True)
        print(json.dumps(asdict(_run(check, devices))), flush=True)


def run_checks(command: Sequence[str], *, seconds: float = SECONDS) -> Iterator[Outcome]:
    """The outcomes of all checks, as they come; one that ends its process, or takes too long, has failed.

    Args:
        command: command that runs the checks from a number on, which is appended to it.
        seconds: seconds that each check may take.
    """
    done = 0
    while done < len(CHECKS):
        before = done
        child = subprocess.Popen(
            [*command, str(done)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            began = False
            lines, errors = _lines(child.stdout), _lines(child.stderr)
            while (line := _next(lines, seconds)) is not None:
                if line.startswith('{"begin"'):
                    began = True
                elif began and line.startswith("{"):
                    began, done = False, done + 1
                    yield Outcome(**json.loads(line))
            if done == len(CHECKS):
                return
            why = _end(child, errors, seconds)
        finally:
            child.kill()
            child.wait()
        if not began and done > before:
            continue
        if not began:
            yield Outcome(OPEN, 0.0, why, "", NOTHING_WORKS, True)
            return
        check, done = CHECKS[done], done + 1
        yield Outcome(check.name, 0.0, why, "", check.meaning, check.needed)


def _lines(stream: IO[str] | None) -> queue.SimpleQueue[str | None]:
    """The lines of a stream as they come, then None."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert stream is not None
        with stream:
            for line in stream:
                lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next(lines: queue.SimpleQueue[str | None], seconds: float) -> str | None:
    """The next line; None: there is no other one, or not in time."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return None


def _end(child: subprocess.Popen[str], errors: queue.SimpleQueue[str | None], seconds: float) -> str:
    """Why a process did not go on, in one line."""
    try:
        status = child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    lines = []
    while (line := _next(errors, 1)) is not None:
        lines += [line.strip()] if line.strip() else []
    name = f"status {status}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
    return f"its process ended ({name}){': ' + lines[-1][:500] if lines else ''}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
