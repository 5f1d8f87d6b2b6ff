"""Which models have been pulled: a JSON file in the folder of their files, which people can read."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmjax.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE = "pulled.json"
FOLDER_PARTS = 4  # of a model's folder: host, owner, model and tag


@dataclass(frozen=True, kw_only=True)
class PulledModel:
    """A model that a server has fetched.

    Args:
        name: what clients call it.
        source: where it comes from.
        folder: the folder of its files, below that of all pulled models.
        model: what ``--model`` takes: the path of a folder or of a .gguf file.
        sampling: parameters of sampling that it comes with, as generation_config.json has them.
        ignored: what came with it and changes nothing.
        pulled: when, as ISO 8601 has it.
    """

    name: str
    source: str
    folder: str
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    pulled: str = ""


def folder_of_pulled(download_dir: str | None) -> Path:
    """Where pulled models are, and the file that lists them.

    Args:
        download_dir: folder of all downloads; None: ``~/.cache/llmjax/models``.
    """
    return Path(download_dir or "~/.cache/llmjax/models").expanduser().absolute() / "pulled"


class PulledModels:
    """The models in a folder. Several servers may have the same one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._file = root / FILE

    def all(self) -> list[PulledModel]:
        """The models whose files are there; raises CheckpointError if the list cannot be read."""
        found = [_pulled(name, entry, self._file) for name, entry in self._entries().items()]
        for one in found:
            if not os.path.exists(one.model):
                logger.warning("%s was pulled, but %s is not there any more", one.name, one.model)
        return [one for one in found if os.path.exists(one.model)]

    def find(self, name: str) -> PulledModel | None:
        """The model of that name, whether or not its files are there."""
        entry = self._entries().get(name)
        return None if entry is None else _pulled(name, entry, self._file)

    def put(self, model: PulledModel) -> None:
        """Adds a model, or takes the place of one of that name."""
        entry = dataclasses.asdict(model)
        with self._locked():
            self._write({**self._entries(), entry.pop("name"): entry})

    def unfinished(self) -> list[Path]:
        """Folders of pulls that have broken off, or still go on."""
        kept = {entry.get("folder") for entry in self._entries().values()}
        folders = self.root.glob("/".join("*" * FOLDER_PARTS))
        return sorted(each for each in folders if each.is_dir() and str(each.relative_to(self.root)) not in kept)

    def remove(self, name: str) -> None:
        """Removes a model and its files, unless another name has the same."""
        with self._locked():
            entries = self._entries()
            if name not in entries:  # `llmjax rm` has removed it
                return
            gone = _pulled(name, entries.pop(name), self._file)
            self._write(entries)
            shared = any(entry.get("folder") == gone.folder for entry in entries.values())
            folder = (self.root / gone.folder).resolve()
            if not shared and self.root.resolve() in folder.parents:
                self.clear(folder)

    def clear(self, folder: Path) -> None:
        """Removes the folder of a model, and those of its owner and host if nothing else is there."""
        shutil.rmtree(folder, ignore_errors=True)
        for parent in folder.parents:
            if parent == self.root.resolve() or any(parent.iterdir()):
                break
            parent.rmdir()

    def _locked(self) -> FileLock:
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self._file.with_name(f"{FILE}.lock"))

    def _entries(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._file} cannot be read: {error}") from None
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise CheckpointError(f"{self._file} must be an object of models by their names")
        return found

    def _write(self, entries: Mapping[str, Any]) -> None:
        fresh = self._file.with_name(f"{FILE}.new")
        fresh.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        fresh.replace(self._file)


def _pulled(name: str, entry: Mapping[str, Any], file: Path) -> PulledModel:
    try:
        return PulledModel(name=name, **entry)
    except TypeError as error:
        raise CheckpointError(f"{file}: {name}: {error}") from None
