"""Pulls a model from a registry that speaks Ollama's protocol: a manifest, and blobs that it names by their SHA-256."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from llmjax.checkpoint.download import fetch, redacted, require_space
from llmjax.errors import CheckpointError
from llmjax.pulled.check import NotServed, check_served
from llmjax.pulled.names import LATEST, PullName
from llmjax.pulled.progress import Step, Tell

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LAYER = "application/vnd.ollama.image."
MOST_TEXT = 2**20  # bytes of a manifest, or of a layer that is not a file of weights
MOST_LAYERS = 64
TIMEOUT = 60.0  # seconds without a byte
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
# Ollama's words for parameters of sampling, by those of a generation_config.json.
SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
FILES = {"model": "model", "projector": "mmproj"}  # layers that are .gguf files, and what these are called
REFUSED = {
    "adapter": "it is an adapter on another model",
    "tensor": "its weights are not one GGUF file but single tensors",
}


@dataclass(frozen=True)
class Layer:
    """A blob of a manifest."""

    kind: str  # the last word of its media type
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class FromRegistry:
    """What a registry has given.

    Args:
        path: the .gguf file.
        sampling: parameters of sampling that the model comes with, as generation_config.json has them.
        ignored: layers and parameters that change nothing here.
    """

    path: Path
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def pull_from_registry(name: PullName, folder: Path, *, base_url: str, tell: Tell) -> FromRegistry:
    """Fetches a model; files of it that are in the folder stay, those of an older version go.

    Args:
        folder: its own.
        base_url: the registry's.

    Raises:
        CheckpointError: the registry has no such model or cannot be reached, a blob is not what the manifest says, or
            the disk is too small.
        NotServed: the model is of a kind that there is not here.
    """
    tell(Step("pulling manifest"))
    url = f"{base_url.rstrip('/')}/v2/{name.owner}/{name.model}"
    with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
        layers = _layers(_text(client, f"{url}/manifests/{name.tag or LATEST}", what=name.source), what=name.source)
        files = {layer: folder / f"{FILES[layer.kind]}-{layer.sha256[:12]}.gguf" for layer in layers if _is_file(layer)}
        require_space(folder, sum(layer.num_bytes for layer, path in files.items() if not path.exists()))
        for layer, path in files.items():
            _file(client, url, layer, path, tell)
        sampling: dict[str, Any] = {}
        ignored = [layer.kind for layer in layers if not _is_file(layer) and layer.kind != "params"]
        for layer in layers:
            if layer.kind == "params":
                sampling, without = _sampling(_blob(client, url, layer), what=name.source)
                ignored += without
    tell(Step("verifying sha256 digest"))  # each was, when it had come
    (model,) = [path for layer, path in files.items() if layer.kind == "model"]
    check_served(model, what=name.source)
    for path in folder.iterdir():
        if path not in files.values():
            path.unlink()
    if ignored:
        tell(Step(f"ignoring {', '.join(ignored)}: the GGUF file has a chat template of its own"))
    return FromRegistry(path=model, sampling=sampling, ignored=tuple(ignored))


def _is_file(layer: Layer) -> bool:
    return layer.kind in FILES


def _layers(manifest: bytes, *, what: str) -> list[Layer]:
    """The layers that a manifest names; raises CheckpointError where the model cannot be read."""
    try:
        found = orjson.loads(manifest)["layers"]
        if len(found) > MOST_LAYERS:
            raise CheckpointError(f"{what}: the manifest has {len(found)} layers; at most {MOST_LAYERS} are read")
        layers = [_layer(each) for each in found]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{what}: the registry's manifest cannot be read") from None
    for layer in layers:
        if layer.kind in REFUSED:
            raise NotServed(f"{what} cannot be served: {REFUSED[layer.kind]}")
    for kind, most in (("model", "one"), ("projector", "at most one"), ("params", "at most one")):
        count = sum(layer.kind == kind for layer in layers)
        if count > 1 or (kind == "model" and not count):
            raise NotServed(f"{what} cannot be served: it has {count} layers of the kind {kind}, not {most}")
    return layers


def _layer(entry: Mapping[str, Any]) -> Layer:
    digest, size = _DIGEST.fullmatch(entry["digest"]), entry["size"]
    if digest is None or not isinstance(size, int) or size < 0:
        raise ValueError(entry)
    return Layer(entry["mediaType"].removeprefix(LAYER).partition(";")[0], digest[1], size)


def _file(client: httpx.Client, url: str, layer: Layer, path: Path, tell: Tell) -> None:
    """Fetches a layer into a file, unless it is there, which it is only if it has the right hash."""

    def told(completed: int) -> None:
        tell(Step.of_file(layer.sha256, total=layer.num_bytes, completed=completed))

    if not path.exists():
        digest, size = layer.sha256, layer.num_bytes
        fetch(client, _url(url, layer), path, sha256=digest, num_bytes=size, progress=False, told=told)
    told(layer.num_bytes)


def _blob(client: httpx.Client, url: str, layer: Layer) -> bytes:
    """The content of a small layer."""
    content = _text(client, _url(url, layer), what=f"the layer {layer.kind}")
    if hashlib.sha256(content).hexdigest() != layer.sha256:
        raise CheckpointError(f"the layer {layer.kind} has not the sha256 that the manifest says")
    return content


def _url(url: str, layer: Layer) -> str:
    return f"{url}/blobs/sha256:{layer.sha256}"


def _text(client: httpx.Client, url: str, *, what: str) -> bytes:
    """A small answer of the registry."""
    try:
        with client.stream("GET", url, headers={"Accept": MANIFEST}) as response:
            if response.status_code == 404:
                raise CheckpointError(f"{what} is not in the registry", hint="check the spelling of its name and tag")
            if response.status_code != 200:
                raise CheckpointError(f"{redacted(url)}: HTTP {response.status_code}")
            content = b""
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MOST_TEXT:
                    raise CheckpointError(f"{redacted(url)}: the answer has more than {MOST_TEXT:,} bytes")
            return content
    except httpx.HTTPError as error:
        raise CheckpointError(f"{redacted(url)} cannot be reached: {error or type(error).__name__}") from None


def _sampling(params: bytes, *, what: str) -> tuple[dict[str, Any], list[str]]:
    """Parameters of sampling as generation_config.json has them, and the names of others."""
    try:
        given = orjson.loads(params)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise CheckpointError(f"{what}: the layer params is not a JSON object")
    known = {name: value for name, value in given.items() if name in SAMPLING and isinstance(value, int | float)}
    return {SAMPLING[name]: value for name, value in known.items()}, [
        f"params.{name}" for name in given if name not in known
    ]
