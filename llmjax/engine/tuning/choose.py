"""Chooses the methods of a model's products by what was measured on this machine, in this start or one before."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from llmjax.config import EngineConfig
from llmjax.engine.loading.kept_files import line
from llmjax.engine.loading.model import load_model
from llmjax.engine.programs.cache import ProgramCache
from llmjax.engine.tuning.kept import Measured, keep, path_of, read
from llmjax.engine.tuning.measure import NotMeasured, Product, measure
from llmjax.errors import ConfigError
from llmjax.jax_settings import use_compilation_cache
from llmjax.kernels.choices import NATIVE, ROWS, TABLE, Choice, Choices, Timing, decide, kind_of
from llmjax.kernels.cpu.library import Library, library
from llmjax.kernels.cpu.matrices import candidates, tabled
from llmjax.kernels.offloading import SplitStack
from llmjax.kernels.qtensor import QTensor, rounding_decodes
from llmjax.platforms import Platform, select_platform

logger = logging.getLogger(__name__)

WORTH = 32 << 20  # bytes of matrices of a kind: with fewer a step takes less than measuring could save in an hour


def choose(weights: Iterable[jax.Array | QTensor | SplitStack], platform: Platform, directory: Path | None) -> Choices:
    """The choices for a model. Measures what no start before has measured.

    Args:
        weights: the model's.
        directory: where compiled programs are kept; None: nothing is measured, since the next start might choose
            otherwise.

    Returns:
        Choices; those of the table where there is nothing to choose, or measuring fails, which a warning says.
    """
    native = library()
    if not platform.is_cpu or native is None or directory is None:
        return Choices()
    products = products_of(weights, native)
    if not products:
        return Choices()
    try:
        found = read(path_of(directory, products)) or _measure(products, directory)
    except (NotMeasured, OSError) as error:
        logger.warning("products were not measured, so their methods are those of the table: %s", line(error))
        return Choices()
    return choices_of(found.timings, native)


def tune(config: EngineConfig) -> Measured | None:
    """Measures the products of a model again, whatever was measured before, and keeps that for later starts.

    Returns:
        What was measured; None: there is nothing to choose for this model on this machine.

    Raises:
        CheckpointError: the model cannot be found or read.
        ConfigError: it cannot run with these settings, or products cannot be measured.
    """
    directory = use_compilation_cache(config.compilation_cache_dir)
    platform = select_platform(config)
    native = library()
    if not platform.is_cpu or native is None:
        return None
    if directory is None:
        raise ConfigError("what is measured is kept beside compiled programs: leave out compilation_cache_dir off")
    programs = ProgramCache.of(directory, platform.device)
    model = load_model(config, platform, cache_dir=directory, programs=programs)
    products = products_of(model.params.values(), native)
    try:
        return _measure(products, directory, again=True) if products else None
    except (NotMeasured, OSError) as error:
        raise ConfigError(f"products cannot be measured: {line(error)}") from error


def _measure(products: Sequence[Product], directory: Path, *, again: bool = False) -> Measured:
    kinds = ", ".join(product.kind for product in products)
    logger.info("measuring once which methods multiply fastest on this machine (%s)", kinds)
    began = time.monotonic()
    measured = keep(path_of(directory, products), Measured.now(measure(products)), again=again)
    logger.info("measured in %.1f s; llmjax doctor shows the figures", time.monotonic() - began)
    return measured


def products_of(weights: Iterable[jax.Array | QTensor | SplitStack], native: Library) -> tuple[Product, ...]:
    """What is to be measured: for each kind of matrix that has several methods, the columns that most weights have."""
    sizes: dict[str, Counter[int]] = {}  # bytes by columns
    examples: dict[tuple[str, int], Any] = {}
    for weight in weights:
        if isinstance(weight, SplitStack):  # of accelerators
            continue
        for kind, as_used in {kind_of(one): one for one in (weight, rounding_decodes(weight))}.items():
            if len(as_used.shape) < 2 or len(candidates(as_used, native)) < 2:
                continue
            columns = as_used.shape[-1]
            sizes.setdefault(kind, Counter())[columns] += as_used.nbytes
            examples.setdefault((kind, columns), as_used)
    return tuple(
        _product(kind, examples[kind, columns], native)
        for kind, counted in sorted(sizes.items())
        if counted.total() >= WORTH
        for columns, _ in counted.most_common(1)
    )


def _product(kind: str, weight: jax.Array | QTensor, native: Library) -> Product:
    quantized = isinstance(weight, QTensor)
    return Product(
        kind=kind,
        methods=candidates(weight, native),
        shape=(weight.shape[-2], weight.shape[-1]),
        format=weight.format if quantized else None,
        dtype=str(weight.dtype),
        activations=weight.activations if quantized else "",
    )


def choices_of(timings: Sequence[Timing], native: Library) -> Choices:
    """The choices that follow from what was measured."""
    made = []
    for kind in dict.fromkeys(timing.kind for timing in timings):
        of_kind = [timing for timing in timings if timing.kind == kind]
        if any(timing.method == NATIVE for timing in of_kind):
            plain = {rows: tabled(rows, jax.ShapeDtypeStruct((1, 1), kind), native) for rows in ROWS}
        else:
            plain = dict.fromkeys(ROWS, TABLE)
        if steps := decide(of_kind, plain):
            made.append(Choice(kind, steps))
    return Choices(tuple(made))
