"""``llmjax quantize``: writes a model with quantised weights, as GGUF or as safetensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.cli.quantize_report import QuantizeReport
from llmjax.config import EngineConfig, setting
from llmjax.errors import ConfigError
from llmjax.quantization.calibration.settings import CalibrationSettings
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax.checkpoint import Checkpoint
    from llmjax.quantization.rounding import Result
    from llmjax.quantization.save_plan import SavePlan

GGUF = ".gguf"
USED = (
    "gguf_file", "tokenizer", "skip_tokenizer_init", "revision", "hf_token", "download_dir", "offline", "hf_overrides",
    "dtype", "quantization_rules", "device", "device_ids", "threads", "cpu_list", "numa",
)  # fmt: skip
"""The engine's settings that mean something here."""


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """What is written."""

    scheme: str | None = setting(
        None,
        "for safetensors int8, int8_g128, int4, int4_g64, int4_asym, w8a8, fp8, fp8_tensor; for GGUF a type (q4k …), "
        "a mix as llama.cpp's files (q4_k_m …), f16, bf16 or f32 (required)",
        section="what is written",
    )
    format: str = setting(
        "compressed-tensors",
        "layout of quantised layers in safetensors",
        choices=("compressed-tensors", "gptq", "awq"),
    )
    group_size: int | None = setting(
        None, "columns that share a scale, of integers in safetensors; 0: whole rows (default: the scheme's)"
    )
    max_shard_size: int = setting(5_000_000_000, "size of a safetensors file at most", unit="bytes")
    force: bool = setting(False, "replace a model that is there already")


def main(argv: list[str]) -> int:
    """Quantises a model.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be read, or the result cannot be written.
    """
    parser = Parser(
        prog="llmjax quantize",
        description="Write a model with quantised weights: DST.gguf, or a folder of safetensors that vLLM and "
        "transformers read too. Embeddings, head and norms of such a folder stay as they are.",
    )
    parser.add_argument("source", metavar="SRC", help="what --model takes: folder, .gguf file, Hugging Face id …")
    parser.add_argument("target", metavar="DST", help="the .gguf file or folder to write")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    for cls in (SaveSettings, CalibrationSettings):
        add_settings(parser, settings_of(cls).values(), section=cls.__name__)
    add_config_flags(parser, without=[name for name in settings_of(EngineConfig) if name not in USED])
    values = parser.parse(argv)
    saved, calibration = (
        {name: getattr(values, name) for name in settings_of(cls) if hasattr(values, name)}
        for cls in (SaveSettings, CalibrationSettings)
    )
    engine = configs_of(values, model=values.source).engine
    job = Job.of(values.target, SaveSettings(**saved), CalibrationSettings(**calibration), engine)
    report = job.run()
    if values.json:
        print(json.dumps(report.fields(), indent=2))
    else:
        # Wide enough for a file: lines are not cut where no terminal says how long they may be.
        Console(width=None if sys.stdout.isatty() else 160).print(report.table(), highlight=False, markup=False)
    return 0


@dataclass(frozen=True)
class Job:
    """What was asked for, checked as far as it can be without opening the model.

    Attributes:
        target: file or folder.
        scheme: its name.
        is_gguf: what it is a scheme of.
        saved, calibration, engine: the settings.
    """

    target: Path
    scheme: str
    is_gguf: bool
    saved: SaveSettings
    calibration: CalibrationSettings
    engine: EngineConfig

    @classmethod
    def of(cls, target: str, saved: SaveSettings, calibration: CalibrationSettings, engine: EngineConfig) -> Job:
        """Raises ConfigError: the scheme is unknown, or settings do not go together."""
        if saved.scheme is None:
            raise ConfigError("--scheme says how to quantise and is required")
        is_gguf = _is_gguf(saved.scheme, target)
        path = Path(target).expanduser()
        if is_gguf and path.suffix.lower() != GGUF:
            path = path.with_name(path.name + GGUF)
        if is_gguf:
            given = {
                "--method": calibration.method != "rtn",
                "--group-size": saved.group_size is not None,
                "--format": saved.format != SaveSettings.format,
            }
            if wrong := [flag for flag, is_given in given.items() if is_given]:
                raise ConfigError(f"{wrong[0]} is for safetensors, but {saved.scheme} is written as GGUF")
        return cls(path, saved.scheme, is_gguf, saved, calibration, engine)

    def run(self) -> QuantizeReport:
        """Writes the model."""
        from llmjax.checkpoint import open_checkpoint
        from llmjax.checkpoint.resolve import resolve
        from llmjax.quantization.folder_export import check_target

        engine = self.engine
        path = resolve(
            engine.model,
            gguf_file=engine.gguf_file,
            revision=engine.revision,
            hf_token=engine.hf_token,
            download_dir=engine.download_dir,
            offline=engine.offline,
        )
        check_target(self.target, path, replace=self.saved.force)
        checkpoint = open_checkpoint(path, overrides=engine.hf_overrides)
        return self._gguf(checkpoint) if self.is_gguf else self._folder(checkpoint)

    def _gguf(self, checkpoint: Checkpoint) -> QuantizeReport:
        from llmjax.quantization.gguf_export import Exported, export_gguf
        from llmjax.tokenizer.gguf_export import tokenizer_metadata

        keys = None
        if not self.engine.skip_tokenizer_init and (checkpoint.gguf is None or self.engine.tokenizer is not None):
            folder = Path(self.engine.tokenizer or checkpoint.path).expanduser()
            keys = tokenizer_metadata(folder, vocab_size=checkpoint.config["vocab_size"])
        report = QuantizeReport(self.target, self.calibration.method)
        with _bar(len(checkpoint.tensors)) as advance:

            def add(tensor: Exported) -> None:
                report.add(
                    tensor.info.type_name.lower(),
                    weights=prod(tensor.info.shape),
                    before=tensor.source_nbytes,
                    after=tensor.info.nbytes,
                    difference=tensor.difference,
                )
                advance(tensor.name)

            written = export_gguf(
                checkpoint,
                self.target,
                scheme=self.scheme,
                rules=self.engine.quantization_rules,
                tokenizer=keys,
                progress=add,
            )
        report.notes.extend(written.notes)
        return report

    def _folder(self, checkpoint: Checkpoint) -> QuantizeReport:
        from llmjax.quantization.folder_export import export_folder
        from llmjax.quantization.save_plan import SavePlan

        plan = SavePlan.of(
            checkpoint,
            self.scheme,
            rules=self.engine.quantization_rules,
            form=self.saved.format,
            group_size=self.saved.group_size,
        )
        report = QuantizeReport(self.target, self.calibration.method)
        for name in plan.tensors:
            if name not in plan.layers:
                self._add_plain(report, plan, name)
        with _bar(len(plan.layers)) as advance:
            export_folder(
                plan,
                self.target,
                results=_watched(self._results(plan), plan, report, advance),
                write_tokenizer=partial(self._write_tokenizer, checkpoint),
                shard_bytes=self.saved.max_shard_size,
                replace=self.saved.force,
            )
        return report

    def _add_plain(self, report: QuantizeReport, plan: SavePlan, name: str) -> None:
        tensor, dtype = plan.tensors[name], plan.plain_dtype(name)
        weights = prod(tensor.shape)
        report.add(f"{dtype.name} (kept)", weights=weights, before=tensor.nbytes, after=weights * dtype.itemsize)

    def _results(self, plan: SavePlan) -> Iterator[Result]:
        if self.calibration.method == "rtn":
            from llmjax.quantization.rounding import round_to_nearest

            return round_to_nearest(plan.tensors, plan.layers)
        from llmjax.evaluation.perplexity import text_tokens
        from llmjax.platforms import select_platform
        from llmjax.quantization.calibration.calibrate import calibrate
        from llmjax.tokenizer import load_tokenizer

        assert self.calibration.calibration is not None
        text = _read(Path(self.calibration.calibration))
        if self.engine.tokenizer is None:
            tokenizer = load_tokenizer(plan.checkpoint.path, gguf=plan.checkpoint.gguf)
        else:
            tokenizer = load_tokenizer(self.engine.tokenizer)
        ids, bos = text_tokens(tokenizer, text)
        sequences = self.calibration.cut(ids, bos=bos)
        return calibrate(plan, sequences, self.calibration, select_platform(self.engine))

    def _write_tokenizer(self, checkpoint: Checkpoint, folder: Path) -> None:
        from llmjax.quantization.folder_export import copy_companions
        from llmjax.tokenizer import load_tokenizer
        from llmjax.tokenizer.folder_export import write_tokenizer

        if self.engine.skip_tokenizer_init:
            return
        source = Path(self.engine.tokenizer or checkpoint.path).expanduser()
        if source.is_dir():
            copy_companions(source, folder)
        else:
            gguf = checkpoint.gguf if self.engine.tokenizer is None else None
            write_tokenizer(load_tokenizer(source, gguf=gguf), folder)


def _is_gguf(scheme: str, target: str) -> bool:
    """Whether a scheme is one of GGUF's.

    Raises:
        ConfigError: it is not known at all, or not to the kind of file that `target` names.
    """
    from llmjax.quantization.gguf_export import PLAIN
    from llmjax.quantization.mixes import MIXES, mix_named
    from llmjax.weights.ggml.reference import SCHEMES
    from llmjax.weights.uniform import SAVED_SCHEMES

    name = scheme.lower()
    if name in SAVED_SCHEMES:
        if target.lower().endswith(GGUF):
            raise ConfigError(f"scheme {scheme} is for safetensors: DST must be a folder, not {target}")
        return False
    if name in PLAIN:
        return True
    try:
        mix_named(name)
    except ConfigError:
        ours, theirs = ", ".join(SAVED_SCHEMES), ", ".join(dict.fromkeys((*MIXES, *SCHEMES, *PLAIN)))
        message = f"scheme {scheme!r} is unknown; known are {ours} for safetensors and {theirs} for GGUF"
        raise ConfigError(message) from None
    return True


def _watched(results: Iterable[Result], plan: SavePlan, report: QuantizeReport, advance: Advance) -> Iterator[Result]:
    """The results, counted as they pass."""
    from llmjax.quantization.calibration.methods import Calibrated

    for result in results:
        yield result
        if result.name not in plan.layers:
            continue
        tensor = plan.tensors[result.name]
        report.add(
            plan.layers[result.name].name,
            weights=prod(tensor.shape),
            before=tensor.nbytes,
            after=sum(part.nbytes for part in plan.parts(result.name).values()),
            difference=result.difference,
        )
        error = "" if result.difference is None else f"error {result.difference.relative:.4f}"
        if isinstance(result, Calibrated):
            report.add_calibrated(result.name, result.nearest, result.outputs)
            error = f"output error {result.nearest.relative:.4f} → {result.outputs.relative:.4f}"
        advance(f"{result.name.removeprefix('model.').removesuffix('.weight')} {error}")


class Advance:
    """Moves the bar: called with what was just done."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, done="")

    def __call__(self, done: str) -> None:
        self._bar.update(self._task, advance=1, done=done)


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    columns = (
        TextColumn("Quantizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[done]}"),
    )
    console = Console(stderr=True)  # standard output is the report
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield Advance(bar, total)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--calibration {path}: no UTF-8 text ({error.reason} at byte {error.start})") from None
