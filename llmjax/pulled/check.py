"""Whether what has been fetched can be served, from its headers."""

from __future__ import annotations

from pathlib import Path

from llmjax.errors import CheckpointError


class NotServed(CheckpointError):
    """A model of a kind that there is not here; its files are of no use."""


def check_served(model: Path, *, what: str) -> None:
    """Raises NotServed where a model is of no known kind, or its files are not what they should be.

    Args:
        model: the folder of its files, or a .gguf file.
        what: the model, for messages.
    """
    from llmjax.checkpoint.checkpoint import open_checkpoint  # which imports JAX, and most that fails fails before

    try:
        open_checkpoint(model).declared_config()
    except CheckpointError as error:
        raise NotServed(f"{what} cannot be served: {error.message}", hint=error.hint) from None
