"""Names of models to pull: of Hugging Face's hub, or of a registry that speaks Ollama's protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from llmjax.errors import InvalidRequest

HUB = "hf.co"
HUBS = frozenset({HUB, "huggingface.co"})
OLLAMA = frozenset({"ollama.com", "registry.ollama.ai"})
LATEST = "latest"
_SCHEME = re.compile(r"https?://", re.ASCII)
# Parts become names of folders, so none of them may leave its own.
_PART = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PullName:
    """A model of a host.

    Args:
        host: ``hf.co``, or the host of the registry, with its port if it has one.
        owner: the user or organization; of Ollama's own models ``library``.
        model: the model's, or on the hub the repository's name.
        tag: which one of it; on the hub the quantization or name of a .gguf file; None: the one that the host prefers.
    """

    host: str
    owner: str
    model: str
    tag: str | None

    @property
    def of_hub(self) -> bool:
        return self.host == HUB

    @property
    def folder(self) -> PurePosixPath:
        """Where its files are, in the folder of pulled models; no other name has the same."""
        return PurePosixPath(self.host.replace(":", "_"), self.owner, self.model, self.tag or LATEST)

    @property
    def source(self) -> str:
        """Where it comes from, in words that an operator can search for."""
        return f"{self.host}/{self.owner}/{self.model}" + (f":{self.tag}" if self.tag else "")


def parse_name(text: str, *, registry: str) -> PullName:
    """What a name to pull stands for.

    ``USER/REPO`` and ``hf.co/USER/REPO``, with or without ``:QUANTIZATION``, are repositories of the hub. ``NAME:TAG``,
    and the same after ``ollama.com/USER/`` or the registry's own host, are models of the registry.

    Args:
        registry: base URL of the registry.

    Raises:
        InvalidRequest: it is not such a name, or names another host.
    """
    path, slash, last = _SCHEME.sub("", text, count=1).rpartition("/")
    model, colon, tag = last.partition(":")
    parts = path.split("/") if slash else []
    own = urlsplit(registry).netloc
    host = parts.pop(0) if len(parts) == 2 else HUB if len(parts) == 1 else own
    if host in HUBS:
        host = HUB
    elif host in OLLAMA:
        host = own
    elif host != own:
        raise InvalidRequest(
            f"models are pulled from {HUB} and from {own}, not from {host[:100]!r}; --ollama-registry names another "
            "registry",
            field="model",
        )
    owner = parts.pop(0) if parts else "library"
    if parts or not all(map(_PART.fullmatch, [owner, model, *([tag] if colon else [])])):
        raise InvalidRequest(
            f"{text[:200]!r} is not a name of a model to pull: USER/REPO or {HUB}/USER/REPO:QUANTIZATION of the hub, "
            "NAME:TAG of Ollama's registry",
            field="model",
        )
    return PullName(host=host, owner=owner, model=model, tag=None if tag in ("", LATEST) else tag)
