"""How tokens are sampled in llama.cpp's words, which llama-server's requests and Ollama's have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmjax.serve.protocol.common import ApiModel, Strings


class LlamaCppSampling(ApiModel):
    """Fields of sampling; None: as the model's makers recommend, and not as llama.cpp does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
