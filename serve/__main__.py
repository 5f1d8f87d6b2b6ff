"""``python -m serve``: the same as ``llmjax serve``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llmjax.cli import run
from llmjax.cli.serve import main as serve
from llmjax.engine.programs.threads import leave


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; a deliberate error is one line on stderr and status 1.

    Args:
        argv: the arguments after the program's name; None: those of the process.
    """
    return run(serve, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    leave(main())
