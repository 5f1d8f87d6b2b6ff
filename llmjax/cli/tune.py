"""``llmjax tune``: measures this machine for a model, and writes settings for ``llmjax serve --config``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from llmjax.cli.parser import Parser, add_config_flags, add_model, configs_of
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.cores import physical_cores
from llmjax.system import processor_name

if TYPE_CHECKING:
    from llmjax.config import EngineConfig
    from llmjax.engine.tuning.kept import Measured
    from llmjax.tune.decide import Fit
    from llmjax.tune.facts import Decode, Memory

MIB = 2**20
Row = tuple[str, str, str]  # a setting, its value, and what it follows from


def main(argv: list[str]) -> int:
    """Measures, prints a table on standard error, and the settings on standard output or to a file.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be read or does not fit, or nothing can be measured.
    """
    parser = Parser(
        prog="llmjax tune",
        description="Measure this machine for a model, and write settings for llmjax serve --config: the form of the "
        "weights and the KV cache that fit the memory, threads, and methods of products. Settings that are given "
        "stay as they are. Run it while the machine has nothing else to do.",
    )
    add_model(parser)
    parser.add_argument("--output", metavar="FILE", help="where to write the settings (default: standard output)")
    parser.add_argument("--force", action="store_true", help="replace that file if it is there")
    add_config_flags(parser)
    values = parser.parse(argv)
    target = None if getattr(values, "output", None) is None else Path(values.output)
    if target is not None:
        _check_target(target, replace=values.force)
    config = configs_of(values, model=values.positional_model).engine
    tuned, why, rows = tune(config, Console(stderr=True))
    today = datetime.now(UTC).date().isoformat()
    about = (f"llmjax tune, {today}, on {processor_name()}", "for this machine, this model and this much free memory")

    from llmjax.tune.settings_file import text_of

    text = text_of(tuned, about=about, why=why)
    Console(stderr=True, highlight=False).print(_table(rows))
    if target is None:
        print(text, end="")
        return 0
    target.write_text(text, encoding="utf-8")
    print(f"To serve with it: llmjax serve --config {target}", file=sys.stderr)
    return 0


def tune(config: EngineConfig, console: Console) -> tuple[EngineConfig, dict[str, str], list[Row]]:
    """Measures and chooses.

    Returns:
        The settings, why some of them are what they are, and the rows of the table.
    """
    from llmjax.engine.tuning.choose import tune as measure_products
    from llmjax.platforms import select_platform
    from llmjax.tune.decide import fit, threads
    from llmjax.tune.decode import Order, measure, numbers_of_threads
    from llmjax.tune.sizes import sizes_of

    platform = select_platform(config.replace(threads=0))
    if not platform.is_cpu:
        raise ConfigError(
            f"llmjax tune is for CPUs; the device is {platform.device}",
            hint="kernels of NVIDIA GPUs are tuned by python -m benchmarks.tune_gpu",
        )
    with console.status("reading what the model's files say"):
        _, memory = sizes_of(config, platform)
        chosen = fit(memory)
    kv_bytes = config.kv_cache_memory_bytes or chosen.kv_bytes
    config = config.replace(
        quantization=chosen.weights.quantization, kv_cache_dtype=chosen.kv.name, kv_cache_memory_bytes=kv_bytes
    )
    with console.status("measuring methods of products"):
        products = None if config.compilation_cache_dir == "off" else measure_products(config)
    decodes: list[Decode] = []
    for number in numbers_of_threads(config):
        kinds = () if decodes else tuple(kind.name for kind in memory.kv_types)
        with console.status(f"measuring one stream with {number} threads (programs are compiled at the first time)"):
            order = Order(config=config.replace(threads=number), kv_types=kinds, tokens=memory.tokens)
            decodes.append(measure(order))
    best = threads(decodes)
    why = {
        "threads": _speeds(decodes),
        "quantization": f"stored, the weights take {memory.weights[0].num_bytes / MIB:,.0f} MiB",
        "kv_cache_dtype": f"a request of {memory.tokens:,} tokens does not fit in bfloat16",
        "kv_cache_memory_bytes": f"{kv_bytes / MIB:,.0f} MiB, of {memory.free / MIB:,.0f} MiB free",
    }
    rows = [*_memory_rows(memory, chosen, decodes[0], kv_bytes), ("threads", str(best.threads), _speeds(decodes))]
    return config.replace(threads=best.threads), why, [*rows, *_product_rows(products)]


def _check_target(path: Path, *, replace: bool) -> None:
    if path.exists() and not replace:
        raise ConfigError(f"{path}: is there already", hint="--force replaces it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")


def _memory_rows(memory: Memory, chosen: Fit, decode: Decode, kv_bytes: int) -> Iterator[Row]:
    stored, free = memory.weights[0], f"{memory.free / MIB:,.0f} MiB of memory are free"
    size = f"{chosen.weights.num_bytes / MIB:,.0f} MiB"
    if chosen.weights is stored:
        yield "quantization", stored.quantization or "as stored", f"weights take {size}; {free}"
    else:
        before = f"{stored.num_bytes / MIB:,.0f} MiB as they are do not fit"
        yield "quantization", str(chosen.weights.quantization), f"weights take {size}; {before}; {free}"
    for kind in memory.kv_types:
        said = f"a request of {memory.tokens:,} tokens takes {kind.request_bytes / MIB:,.0f} MiB"
        if kind.name in decode.attention:
            took = 1e3 * decode.attention[kind.name]
            said += f"; attention to them {took:.2f} ms a token, all else {1e3 * decode.step:.2f} ms"
        mark = "" if kind is chosen.kv else " (not taken)"
        yield "kv_cache_dtype", kind.name + mark, said
    requests = kv_bytes // max(1, chosen.kv.request_bytes)
    yield "kv_cache_memory_bytes", f"{kv_bytes / MIB:,.0f} MiB", f"{requests:,} such requests at once"


def _speeds(decodes: Sequence[Decode]) -> str:
    speeds = ", ".join(f"{1 / decode.step:.1f} tokens/s with {decode.threads}" for decode in decodes)
    return f"one stream: {speeds} ({physical_cores()} physical cores)"


def _product_rows(measured: Measured | None) -> Iterator[Row]:
    from llmjax.engine.tuning.choose import choices_of
    from llmjax.kernels.cpu.library import library

    native = library()
    if measured is None or native is None:
        yield "methods", "as the table says", "there is nothing to choose for this model on this machine"
        return
    chosen = {choice.kind: choice for choice in choices_of(measured.timings, native).made}
    for kind in dict.fromkeys(timing.kind for timing in measured.timings):
        steps = chosen[kind].steps if kind in chosen else ()
        taken = ", ".join(f"{method} up to {rows} rows" for rows, method in steps) or "as the table says"
        yield "methods", taken, f"{kind}; kept beside compiled programs, llmjax doctor shows the figures"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "value", "what was measured"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
