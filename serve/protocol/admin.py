"""POST /abort_requests: the request body."""

from __future__ import annotations

from llmjax.serve.protocol.common import ApiModel, Strings


class AbortRequest(ApiModel):
    request_ids: Strings | None = None
