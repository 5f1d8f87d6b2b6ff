"""What is known before settings are chosen: sizes that files say, and speeds that were measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights in one form.

    Attributes:
        quantization: value of the setting; None: as the files have them.
        num_bytes: what they take in memory.
    """

    quantization: str | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVType:
    """The KV cache in one type.

    Attributes:
        name: value of the setting ``kv_cache_dtype``.
        request_bytes: what one request of the wanted length takes.
        most_bytes: what all requests of a step can take, each as long as the model allows.
    """

    name: str
    request_bytes: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sizes.

    Attributes:
        free: bytes of memory that are free.
        tokens: wanted length of a request, prompt and answer.
        weights: from the form that loses least to the smallest.
        kv_types: the same.
    """

    free: int
    tokens: int
    weights: tuple[Weights, ...]
    kv_types: tuple[KVType, ...]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The speed of one stream.

    Attributes:
        threads: how many threads computed.
        step: seconds of a token.
        attention: seconds that attention alone takes of a token that has the wanted length before it, by type of the
            KV cache; empty: not measured.
    """

    threads: int
    step: float
    attention: dict[str, float]
