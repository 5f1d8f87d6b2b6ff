"""A model that sees, for servers in tests: its settings, its pictures, and questions about them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from llmjax.config import EngineConfig
from tests.checkpoints import SEEING

QUESTION = "What is it?"


def seeing(compile_cache_dir: str, **changes: Any) -> EngineConfig:
    """The engine of a golden checkpoint."""
    options: dict[str, Any] = {
        "model": str(SEEING / "qwen2-vl"),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 2**20,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
        "served_model_name": "seeing",
        "page_size": 8,
        **changes,
    }
    return EngineConfig(**options)


def golden(name: str) -> np.ndarray:
    with np.load(SEEING / "qwen2-vl" / "golden.npz") as archive:
        found: np.ndarray = archive[name]
        return found


def png(pixels: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=options.pop("format", "PNG"), **options)
    return file.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*urls: str, text: str = QUESTION) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def asked(server: Any, messages: list[Any], **options: Any) -> Any:
    with server.http() as http:
        body = {"model": "seeing", "messages": messages, "max_tokens": 4, "temperature": 0, **options}
        return http.post("/v1/chat/completions", json=body)
