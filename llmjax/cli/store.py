"""What the commands about stored models share: a flag, and sizes for people."""

from __future__ import annotations

from llmjax.cli.parser import Parser


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
