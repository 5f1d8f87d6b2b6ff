"""What an adapter's files hold, by the names of modules in the files of its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmjax.adapters.adapter import Floats
from llmjax.adapters.product import Product
from llmjax.checkpoint.stored_tensor import StoredStack


@dataclass(frozen=True, kw_only=True)
class StoredParts:
    """The content of an adapter.

    Attributes:
        products: low-rank changes, by names of the base's tensors; those of embeddings are of the matrix [vocabulary,
            hidden size].
        replaced: tensors that take the place of the base's, by their names.
        rows: rows that take the place of an embedding's, or a head's, by the name of its tensor: numbers and values
            [n, hidden].
    """

    products: Mapping[str, Product]
    replaced: Mapping[str, StoredStack] = field(default_factory=dict)
    rows: Mapping[str, tuple[tuple[int, ...], Floats]] = field(default_factory=dict)
