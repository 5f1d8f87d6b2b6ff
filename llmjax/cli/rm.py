"""``llmjax rm``: remove models from this machine."""

from __future__ import annotations

import sys

from llmjax.checkpoint.store import remove, stored_models
from llmjax.cli.parser import Parser
from llmjax.cli.store import add_download_dir, size, stored
from llmjax.errors import ConfigError


def main(argv: list[str]) -> int:
    """Removes models, after a question unless ``--yes`` is given.

    Raises:
        CheckpointError: a model is not on this machine, or cannot be removed.
    """
    parser = Parser(prog="llmjax rm", description="Remove models from this machine.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name that llmjax list shows")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_download_dir(parser)
    values = parser.parse(argv)
    models = stored_models(values.download_dir)
    chosen = [stored(name, models) for name in dict.fromkeys(values.models)]
    total = size(sum(model.num_bytes for model in chosen))
    if not values.yes and not _agrees(f"Remove {', '.join(model.name for model in chosen)} ({total})?"):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    for model in chosen:
        remove(model, values.download_dir)
        freed = "another name has the same files" if model.folder.exists() else f"{size(model.num_bytes)} are free"
        print(f"{model.name} is removed, {freed}.")
    return 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to be asked; --yes removes without a question")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
