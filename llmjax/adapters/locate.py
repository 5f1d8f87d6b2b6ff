"""Where an adapter is: on this machine, or on Hugging Face, from which it is fetched."""

from __future__ import annotations

import re
from pathlib import Path

from llmjax.config import EngineConfig

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(path: str | Path, config: EngineConfig) -> Path:
    """An adapter's folder or file, as all processes of this machine know it.

    Args:
        path: where it is or, if there is nothing, perhaps its id on Hugging Face (``organization/name``).
        config: how to reach the hub.

    Raises:
        CheckpointError: it looks like an id, and cannot be fetched.
    """
    local = Path(path).expanduser()
    if local.exists() or not _REPOSITORY.fullmatch(str(path)) or local.suffix in (".gguf", ".safetensors"):
        return local.absolute()
    from llmjax.checkpoint.hub import HubOptions, from_hugging_face  # few starts need it

    options = HubOptions(token=config.hf_token, cache_dir=config.download_dir, offline=config.offline)
    return from_hugging_face(str(path), None, options)
