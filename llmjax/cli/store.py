"""What the commands about stored models share: a flag, finding one by name, and sizes for people."""

from __future__ import annotations

from collections.abc import Iterable

from llmjax.checkpoint.store import PULLED, StoredModel
from llmjax.cli.parser import Parser
from llmjax.errors import CheckpointError
from llmjax.settings import nearest


def stored(name: str, models: Iterable[StoredModel]) -> StoredModel:
    """The model of that name, or that was pulled by it.

    Raises:
        CheckpointError: it is not among them.
    """
    known = {model.name: model for model in models}
    name = name if name in known or f"{PULLED}{name}" not in known else f"{PULLED}{name}"
    if name not in known:
        hint = "llmjax list shows what is, llmjax pull fetches it"
        raise CheckpointError(f"{name!r} is not on this machine{nearest(name, known)}", hint=hint)
    return known[name]


def add_download_dir(parser: Parser) -> None:
    """Adds ``--download-dir``."""
    parser.add_argument(
        "--download-dir",
        metavar="FOLDER",
        help="folder of all downloads (default: the hub's own cache and ~/.cache/llmjax/models)",
    )


def size(num_bytes: float) -> str:
    """A size for people: ``98.4 MB``."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
