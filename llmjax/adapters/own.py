"""The adapter that a checkpoint has of its own, with which its text model reads prompts with pictures."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from llmjax.adapters.peft_config import PeftConfig
from llmjax.adapters.reference import AdapterReference, digest_of
from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.files import ADAPTER, read_object

logger = logging.getLogger(__name__)

NUMBER = 0  # which no adapter of users has


def own_adapter(checkpoint: Checkpoint) -> AdapterReference | None:
    """The adapter of a model; None: it has none.

    It is in a folder beside the weights, as Hugging Face's conversion has it, or among them, as they were published.
    Then its path is that of the model.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not (name := checkpoint.adapter):
        return None
    if checkpoint.adapter_tensors:
        said, shapes = (
            own_config(checkpoint),
            sorted((key, each.shape) for key, each in checkpoint.adapter_tensors.items()),
        )
        digest = hashlib.sha256(f"{name} {said.rank} {said.alpha} {shapes}".encode()).hexdigest()
        return AdapterReference(name=name, path=str(checkpoint.path), digest=digest, number=NUMBER)
    folder = _folder(checkpoint)
    if not (folder / ADAPTER).is_file():
        logger.warning(
            "%s: prompts with pictures are computed without an adapter, as %s is missing", checkpoint.path, folder
        )
        return None
    return AdapterReference(name=name, path=str(folder), digest=digest_of(folder), number=NUMBER)


def own_config(checkpoint: Checkpoint) -> PeftConfig:
    """What the files say of a model's own adapter.

    Raises:
        CheckpointError: they say what is not supported.
    """
    if not checkpoint.adapter_tensors:
        return PeftConfig.read(_folder(checkpoint))
    path, key = checkpoint.path / "config.json", f"{checkpoint.adapter}_lora"
    return PeftConfig.of(read_object(path).get(key), path, key=key)


def _folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / f"{checkpoint.adapter}-lora"
