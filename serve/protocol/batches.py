"""POST /v1/batches: the request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from llmjax.serve.protocol.common import ApiModel, few_short_texts, object_of


class BatchRequest(ApiModel):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], object_of(str), AfterValidator(few_short_texts)] | None = None
    output_expires_after: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"output_expires_after": ()}
    reasons: ClassVar[Mapping[str, str]] = {"output_expires_after": "is not supported; results are kept like files"}
