"""Finds models in Hugging Face's local cache that the hub's library misses.

It misses a snapshot whose reference ends in a newline or is absent, as after copying it to a machine without a network.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

logger = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")


def cached_commit(cache: Path, repo: str, revision: str | None) -> str | None:
    """The commit of a repository that is in the cache, though the hub's library does not see it.

    Args:
        revision: a branch or tag; None: the main one, for which a snapshot without a reference may stand, if it is
            whole and no other one is.
    """
    folder = cache / repo_folder_name(repo_id=repo, repo_type="model")
    reference = folder / "refs" / (revision or "main")
    if reference.is_file():
        text = reference.read_text(errors="replace")
        commit = text.strip()
        usable = commit != text and COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir()
        return commit if usable else None
    if revision is not None:
        return None
    snapshots = [path for path in folder.glob("snapshots/*") if COMMIT.fullmatch(path.name) and is_whole(path)]
    if len(snapshots) != 1:
        return None
    logger.warning("%s: there is no refs/main; the one whole snapshot is read", snapshots[0])
    return snapshots[0].name


def is_whole(snapshot: Path) -> bool:
    """Whether there are weights, and nothing that is named is missing."""
    files = [path for path in snapshot.rglob("*") if not path.is_dir()]
    if not any(path.suffix in (".safetensors", ".gguf") for path in files):
        return False
    named = [name for index in snapshot.glob("*.safetensors.index.json") for name in _shards(index)]
    return all(path.exists() for path in [*files, *(snapshot / name for name in named)])  # not links to nothing


def _shards(index: Path) -> set[str]:
    try:
        return set(map(str, json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # what is wrong with it, its reader says
