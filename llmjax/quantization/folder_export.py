"""Writes a model as a folder in Hugging Face's layout with quantized linear layers, one tensor at a time."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.checkpoint.checkpoint import CONFIG, GENERATION_CONFIG
from llmjax.checkpoint.formats.registry import CONFIG_KEYS
from llmjax.checkpoint.mistral_layout import PROCESSOR
from llmjax.checkpoint.safetensors import INDEX, SafetensorsWriter, open_safetensors_writer
from llmjax.errors import CheckpointError, ConfigError
from llmjax.quantization.plan import SavePlan, model_dtype
from llmjax.quantization.rounding import Result
from llmjax.weights.rows import QuantizedRows

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""Files that are copied from a folder."""


def export_folder(
    plan: SavePlan,
    folder: Path,
    *,
    results: Iterable[Result],
    write_tokenizer: Callable[[Path], None],
    shard_bytes: int,
    replace: bool = False,
) -> None:
    """Writes config, weights, tokenizer and generation settings.

    Args:
        plan: how each tensor is quantized.
        folder: the model's folder; it appears when it is complete.
        results: every layer of the plan once, in any order, and other tensors that have changed; consumed one by one.
        write_tokenizer: writes the tokenizer's files to a folder; called first.
        shard_bytes: the most bytes of tensors in a file.
        replace: whether an existing model in `folder` is replaced.

    Raises:
        ConfigError: see `check_target`.
        CheckpointError: a tensor or file cannot be read or written.
        TokenizerError: `write_tokenizer` fails.
    """
    with new_folder(folder, plan.checkpoint.path, replace=replace) as target:
        write_tokenizer(target)
        _write_json(target / CONFIG, _config(plan))
        if plan.checkpoint.generation_config:
            _write_json(target / GENERATION_CONFIG, plan.checkpoint.generation_config)
        if plan.checkpoint.vision_files and plan.checkpoint.processor_config:
            _write_json(target / PROCESSOR, dict(plan.checkpoint.processor_config))
        with open_safetensors_writer(target, plan.specs(), shard_bytes=shard_bytes) as writer:
            _write_tensors(plan, results, writer)


def copy_companions(source: Path, folder: Path) -> None:
    """Copies tokenizer, chat templates and licenses from a folder in Hugging Face's layout.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    try:
        for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern)}):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be copied to {folder}: {error.strerror}") from None


def check_target(path: Path, source: Path, *, replace: bool) -> None:
    """Refuses to overwrite anything that would be lost.

    Args:
        path: the file or folder to be written.
        source: the model that is read at the same time.
        replace: whether an older model may be replaced.

    Raises:
        ConfigError: there is something at `path`; the message says what to do.
    """
    if not path.exists():
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")
        return
    if source.resolve() in (path.resolve(), *path.resolve().parents) or path.resolve() in source.resolve().parents:
        raise ConfigError(f"{path}: is what is read; write elsewhere")
    if path.is_dir() and any(path.iterdir()) and not (path / CONFIG).is_file():
        raise ConfigError(f"{path}: holds files but no {CONFIG}, so it is not a model that could be replaced")
    if not replace and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path}: is there already; --force replaces it")


@contextmanager
def new_folder(path: Path, source: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to write to, which becomes `path` if nothing fails; `path` is a whole model both before and after.

    Other files in an older model's folder stay in it.

    Raises:
        ConfigError: see `check_target`.
        CheckpointError: it cannot be written.
    """
    check_target(path, source, replace=replace)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is a file, not a folder")
    path = path.resolve()  # a link to a folder stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.mkdir()
        yield temporary
        _put_in_place(temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        temporary.rename(path)
        return
    shutil.copystat(path, temporary)
    for old in path.iterdir():
        # Weights of the older model would otherwise be read with the new ones.
        if old.suffix == ".safetensors" or old.name == INDEX or (temporary / old.name).exists():
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, temporary / old.name, symlinks=True, copy_function=_link)
        else:
            _link(old, temporary / old.name)
    if not _exchange(temporary, path):
        older = temporary.with_suffix(".old")
        path.rename(older)
        try:
            temporary.rename(path)
        except OSError:
            older.rename(path)
            raise
        older.rename(temporary)


def _link(source: str | Path, target: str | Path) -> None:
    """Makes a hard link to a file, or a copy if the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(left: Path, right: Path) -> bool:
    """Swaps two names atomically; False if the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    return swap is not None and not swap(AT_FDCWD, os.fsencode(left), AT_FDCWD, os.fsencode(right), RENAME_EXCHANGE)


def _config(plan: SavePlan) -> dict[str, Any]:
    whole = plan.checkpoint.whole_config if plan.encoder else plan.checkpoint.config
    config = {key: value for key, value in whole.items() if key not in CONFIG_KEYS}
    if "dtype" not in config:
        config["torch_dtype"] = model_dtype(config).name
    return config | {"quantization_config": plan.settings()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=_number) + "\n", encoding="utf-8")


def _number(value: Any) -> Any:
    """Converts NumPy's numbers, which metadata of GGUF files contains."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _write_tensors(plan: SavePlan, results: Iterable[Result], writer: SafetensorsWriter) -> None:
    tensors = plan.tensors
    written = set()
    for result in results:
        if isinstance(result.value, QuantizedRows):
            for name, part in plan.parts(result.name).items():
                writer.write(name, part.make(result.value))
        else:
            writer.write(plan.stored_name(result.name), result.value.astype(plan.plain_dtype(result.name)))
        written.add(result.name)
    for name, tensor in tensors.items():
        if name not in written and name not in plan.layers:
            writer.write(plan.stored_name(name), tensor.read(plan.plain_dtype(name)))
    for name, tensor in plan.encoder.items():
        writer.write(name, tensor.read(plan.own_dtype(tensor)))
