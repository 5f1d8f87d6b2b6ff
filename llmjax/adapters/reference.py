"""References to adapters: plain data that names an adapter, says where it is, and identifies its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmjax.checkpoint.files import ADAPTER
from llmjax.errors import CheckpointError

WEIGHTS = "adapter_model.safetensors"  # of a PEFT folder, beside ``ADAPTER``
MOST_BYTES = 8 * 2**30  # of an adapter's files


@dataclass(frozen=True, kw_only=True)
class AdapterReference:
    """An adapter as a user has named it.

    Attributes:
        name: what requests call it.
        path: its PEFT folder or GGUF file on this machine.
        digest: SHA-256 over its configuration and its weights, in hexadecimal digits. Another content under the same
            name has another digest, so it never finds the other's pages in a cache.
        number: vLLM's ``lora_int_id``: at least 1, and no two adapters of an engine have the same.
    """

    name: str
    path: str
    digest: str
    number: int

    @classmethod
    def read(cls, name: str, path: Path, *, number: int) -> AdapterReference:
        """The reference to the adapter that a path has now; all of its files are read.

        Raises:
            CheckpointError: there is no adapter, or it is larger than ``MOST_BYTES``.
        """
        return cls(name=name, path=str(path), digest=digest_of(path), number=number)


@dataclass(frozen=True, kw_only=True)
class ScaledAdapter:
    """An adapter and the factor of what it adds."""

    reference: AdapterReference
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What a request adds to the weights: the sum of some adapters, each with a factor. Made by ``of``.

    Attributes:
        parts: the adapters; none: the model as it is.
        digest: identifies the sum; that of an adapter alone, with a factor of 1, is the adapter's.
    """

    parts: tuple[ScaledAdapter, ...]
    digest: str

    @classmethod
    def of(cls, parts: Iterable[ScaledAdapter]) -> Adaptation:
        """The sum of adapters; those with a factor of 0 are left out."""
        parts = tuple(part for part in parts if part.scale)
        if len(parts) == 1 and parts[0].scale == 1.0:
            return cls(parts=parts, digest=parts[0].reference.digest)
        terms = sorted(f"{part.reference.digest} {part.scale.hex()}" for part in parts)
        return cls(parts=parts, digest=hashlib.sha256("\n".join(terms).encode()).hexdigest())

    @property
    def name(self) -> str:
        """The names of the adapters."""
        return "+".join(part.reference.name for part in self.parts)


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of an adapter: the configuration and the weights of a PEFT folder, or a GGUF file.

    Raises:
        CheckpointError: they are not there.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not an adapter: give a PEFT folder, or a .gguf file")
        return (path,)
    files = (path / ADAPTER, path / WEIGHTS)
    if missing := next((file.name for file in files if not file.is_file()), None):
        pickled = path / "adapter_model.bin"
        hint = f"; {pickled.name} is pickled, so save the adapter as safetensors" if pickled.is_file() else ""
        raise CheckpointError(f"{path} is not an adapter: it has no {missing}{hint}")
    return files


def digest_of(path: Path) -> str:
    """SHA-256 over the digests of an adapter's files, in hexadecimal digits.

    Raises:
        CheckpointError: as ``files_of``, or the files are too large or cannot be read.
    """
    try:
        files = files_of(path)
        if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
            raise CheckpointError(f"{path}: an adapter of {size} bytes, where {MOST_BYTES} are the most")
        whole = hashlib.sha256()
        for file in files:
            with file.open("rb") as data:
                whole.update(hashlib.file_digest(data, "sha256").digest())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return whole.hexdigest()
