"""Prompts that one server computes and another continues: what a request says of it, and what its answer says."""

from __future__ import annotations

import uuid
from typing import Any

from llmjax.kv_transfer import FIELD, KVTransfer
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import Job
from llmjax.serve.interfaces import Engine
from llmjax.serve.protocol.common import GenerationRequest


def transfer_of(engine: Engine, body: GenerationRequest, *, id: str, prompts: int = 1) -> KVTransfer | None:
    """What becomes of the pages of a request's prompt at other servers.

    Args:
        id: the answer's id.
        prompts: the request's prompts.

    Raises:
        ApiError: the request has several answers, or is one that cannot be answered so.
        InvalidRequest: its ``kv_transfer_params`` are wrong.
    """
    name = f"{id}-{uuid.uuid4().hex}"  # ids may be the clients' own, and known to others
    transfer = KVTransfer.of(body.kv_transfer_params, engine.config.kv_transfer, name=name)
    if transfer is None:
        return None
    if prompts > 1 or body.continuations > 1 or body.use_beam_search:
        raise ApiError(f"`{FIELD}` is for one prompt and one answer", param=FIELD)
    if transfer.give is not None and body.stream:
        raise ApiError(f"`{FIELD}`: do_remote_decode cannot be streamed", param=FIELD)
    return transfer


def transfer_answer(engine: Engine, job: Job) -> dict[str, Any]:
    """What the answer to such a request has beside others."""
    transfer, config = job.params[0].kv_transfer, engine.config.kv_transfer
    if transfer is None or transfer.give is None or config is None:
        return {}
    num_pages = (len(job.prompts[0].token_ids) - 1) // engine.config.page_size
    return {FIELD: config.answer(name=transfer.give, num_pages=num_pages)}
