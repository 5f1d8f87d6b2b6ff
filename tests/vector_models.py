"""Settings of engines with the golden models that make vectors of pictures, of texts and of tokens."""

from __future__ import annotations

from typing import Any


def options(compile_cache_dir: str, **settings: Any) -> dict[str, Any]:
    """Settings of a small engine, but for the model; ``settings`` win over them."""
    return {
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 72,
        "kv_cache_memory_bytes": 2**20,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
        **settings,
    }
