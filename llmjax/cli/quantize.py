"""``llmjax quantize``: writes a model with quantized weights, as GGUF or as safetensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table

from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.progress import progress_bar
from llmjax.quantization.report import QuantizationReport
from llmjax.quantization.settings import ENGINE_SETTINGS, CalibrationSettings, SaveSettings
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax.conversion import Progress


def main(argv: list[str]) -> int:
    """Quantizes a model.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be read, or the result cannot be written.
    """
    parser = Parser(
        prog="llmjax quantize",
        description="Write a model with quantized weights: DST.gguf, or a folder of safetensors that vLLM and "
        "transformers read too. Embeddings, head and norms of such a folder stay as they are.",
    )
    parser.add_argument("source", metavar="SRC", help="what --model takes: folder, .gguf file, Hugging Face id …")
    parser.add_argument("target", metavar="DST", help="the .gguf file or folder to write")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    for cls in (SaveSettings, CalibrationSettings):
        add_settings(parser, settings_of(cls).values(), section=cls.__name__)
    add_config_flags(parser, without=[name for name in settings_of(EngineConfig) if name not in ENGINE_SETTINGS])
    values = parser.parse(argv)
    settings = (*settings_of(SaveSettings), *settings_of(CalibrationSettings))
    given = {name: getattr(values, name) for name in settings if hasattr(values, name)}
    if given.get("scheme") is None:
        raise ConfigError("--scheme says how to quantize and is required")
    engine = configs_of(values, model=values.source).engine
    given |= {name: getattr(engine, name) for name in ENGINE_SETTINGS}

    from llmjax.conversion import quantize

    with _bar() as advance:
        report = quantize(engine.model, values.target, progress=advance, **given)
    if values.json:
        print(json.dumps(report.fields(), indent=2))
    else:
        # Wide enough for a file: lines are not cut where no terminal says how long they may be.
        Console(width=None if sys.stdout.isatty() else 160).print(_report(report), highlight=False, markup=False)
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    with progress_bar("Quantizing") as bar:
        task = bar.add_task("", total=None, note="")

        def advance(step: Progress) -> None:
            done = f"{step.name.removeprefix('model.').removesuffix('.weight')} {step.error}"
            bar.update(task, completed=step.done, total=step.total, note=done)

        yield advance


def _report(report: QuantizationReport) -> RenderableType:
    """The report as tables for a terminal."""
    columns = ("stored as", "tensors", "weights", "MB before", "MB after", "bits a weight", "relative error")
    stored = _table(*columns)
    for kind, tally in (*report.kinds.items(), ("total", report.total)):
        stored.add_row(
            kind,
            str(tally.tensors),
            f"{tally.weights:,}",
            f"{tally.before / 1e6:,.1f}",
            f"{tally.after / 1e6:,.1f}",
            f"{tally.bits:.2f}",
            "" if tally.difference is None else f"{tally.difference.relative:.4f}",
        )
    shown: list[RenderableType] = [stored]
    if report.outputs:
        outputs = _table("output error of", "rtn", report.method, "worst", "in layer")
        for kind, error in report.outputs.items():
            outputs.add_row(
                kind,
                f"{error.nearest.relative:.4f}",
                f"{error.calibrated.relative:.4f}",
                f"{error.worst:.4f}",
                error.worst_layer,
            )
        shown += ["", outputs]
    return Group(*shown, *(f"note: {note}" for note in report.notes), f"written: {report.target}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table
