"""Pulls a model from Hugging Face's hub into a folder of its own."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.utils import filter_repo_objects

from llmjax.checkpoint.download import check_sha256, require_space
from llmjax.checkpoint.gguf.choice import choose_gguf, model_ggufs
from llmjax.checkpoint.hub import HubOptions, RemoteFile, from_hugging_face, remote_files, wanted_files
from llmjax.checkpoint.resolve import resolve
from llmjax.pulled.check import check_served
from llmjax.pulled.names import PullName
from llmjax.pulled.progress import Step, Tell

USUAL = "q4_k_m"  # of several .gguf files the one that is meant where no tag says which, as for Ollama
LOOK_SECONDS = 0.2  # between looks at how much has come
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pull_from_hub(name: PullName, folder: Path, *, token: str | None, tell: Tell) -> Path:
    """Fetches a model; files of it that are in the folder stay, those of an older version go.

    Args:
        folder: its own; a cache as the hub's library has it.
        token: None: that of the environment, or the stored login.

    Returns:
        What ``--model`` takes: the folder of its files, or its .gguf file.

    Raises:
        CheckpointError: there is no such repository or file, it cannot be reached, a file is not what the hub says, or
            the disk is too small.
        NotServed: it is of a kind that there is not here.
    """
    repo = f"{name.owner}/{name.model}"
    options = HubOptions(token=token, cache_dir=str(folder), progress=False)
    tell(Step("pulling manifest"))
    files = remote_files(repo, options)
    gguf_file = _gguf_of(files, name.tag, repo)
    allowed, left_out = wanted_files(gguf_file)
    chosen = list(
        filter_repo_objects(files, allow_patterns=allowed, ignore_patterns=left_out, key=lambda file: file.name)
    )
    for broken in folder.rglob("*.incomplete"):  # the hub's library begins anew
        broken.unlink()
    sizes = {file.sha256 or file.name: file.num_bytes for file in chosen}
    there = {path.name for path in folder.glob("models--*/blobs/*")}
    require_space(folder, sum(size for digest, size in sizes.items() if digest not in there))
    with _Watch(folder, {file.sha256: file.num_bytes for file in chosen if file.sha256 is not None}, tell):
        found = from_hugging_face(repo, gguf_file, options)
    tell(Step("verifying sha256 digest"))
    for blob in folder.glob("models--*/blobs/*"):
        if _SHA256.fullmatch(blob.name):
            check_sha256(blob, blob.name, name=f"{repo}: {blob.name[:12]}")
    model = resolve(found)
    check_served(model, what=name.source)
    _keep_only(folder.joinpath(*found.relative_to(folder).parts[:3]))  # models--owner--name, snapshots, commit
    return model


def _gguf_of(files: Sequence[RemoteFile], tag: str | None, repo: str) -> str | None:
    """The .gguf file that is meant; None: the repository has other weights."""
    names = [file.name for file in files]
    if tag is None and (not model_ggufs(names) or any(name.endswith(".safetensors") for name in names)):
        return None
    return choose_gguf(names, USUAL if tag is None and len(model_ggufs(names)) > 1 else tag, where=repo)


def _keep_only(snapshot: Path) -> None:
    """Removes all other versions of a repository, and files of this one that are not linked any more."""
    for other in snapshot.parent.iterdir():
        if other != snapshot:
            shutil.rmtree(other)
    linked = {path.resolve() for path in snapshot.rglob("*") if path.is_symlink()}
    for blob in (snapshot.parent.parent / "blobs").glob("*"):
        if linked and blob.resolve() not in linked:
            blob.unlink()


class _Watch:
    """Tells while it is entered how much of each file has come.

    Args:
        sizes: bytes of the files, by their SHA-256, which the cache calls them by.
    """

    def __init__(self, folder: Path, sizes: dict[str, int], tell: Tell) -> None:
        self._folder = folder
        self._sizes = sizes
        self._tell = tell
        self._told: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pull-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        for path in self._folder.glob("models--*/blobs/*"):
            digest = path.name.partition(".")[0]
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # it has just got its name
                continue
            if digest in self._sizes and self._told.get(digest) != size:
                self._told[digest] = size
                self._tell(Step.of_file(digest, total=self._sizes[digest], completed=size))
