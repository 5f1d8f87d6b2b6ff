"""Requests about adapters: vLLM's bodies, and llama-server's list of factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.common import AdapterScale, AdapterScales, ApiModel

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(ApiModel):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    base_model_name: Name | None = None


class UnloadAdapterRequest(ApiModel):
    lora_name: Name
    lora_int_id: int | None = None


class WeighAdaptersRequest(ApiModel):
    """llama-server's body is the list alone."""

    lora: AdapterScales


def scales_of(given: Sequence[AdapterScale]) -> dict[int, float]:
    """Factors by the places of adapters; raises ApiError if one has two."""
    scales = {one.id: one.scale for one in given}
    if len(scales) < len(given):
        raise ApiError("`lora` names an adapter twice", param="lora", code="invalid_value")
    return scales
