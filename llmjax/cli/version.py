"""``llmjax version``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from llmjax.cli.parser import Parser
from llmjax.version import __version__


def main(argv: list[str]) -> int:
    """Prints the versions that a bug report needs."""
    Parser(prog="llmjax version", description="Print the versions of llmjax and of what it runs on.").parse(argv)
    print(f"llmjax {__version__}")
    for package in ("jax", "jaxlib", "flax", "numpy"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} not installed")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    return 0
