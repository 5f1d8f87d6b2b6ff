"""``llmjax collect-env``: what a report of a bug should say of a machine."""

from __future__ import annotations

from llmjax.cli import doctor


def main(argv: list[str]) -> int:
    """Prints what ``llmjax doctor`` finds; what should be mended does not fail the command.

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    doctor.main(argv, prog="llmjax collect-env")
    return 0
