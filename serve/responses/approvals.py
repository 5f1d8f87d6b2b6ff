"""Approval of calls of tool servers: what clients have been asked, and what they have answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.serve.errors import ApiError, cut

Item = dict[str, Any]
REQUEST, RESPONSE = "mcp_approval_request", "mcp_approval_response"


def checked_response(item: Mapping[str, Any], path: str, requests: Mapping[str, Any]) -> str:
    """The id of the request that an ``mcp_approval_response`` answers.

    Args:
        item: the response.
        path: where it stands.
        requests: requests before it by their ids.

    Raises:
        ApiError: it answers no request of the conversation, or does not say whether the call is approved.
    """
    id = item.get("approval_request_id")
    if not isinstance(id, str) or id not in requests:
        raise ApiError(
            f"`{path}.approval_request_id`: {cut(str(id))!r} is not the id of an {REQUEST} of this conversation",
            param=f"{path}.approval_request_id",
            code="invalid_value",
        )
    if not isinstance(item.get("approve"), bool):
        raise ApiError(f"`{path}.approve` must be true or false", param=f"{path}.approve", code="invalid_type")
    if not isinstance(item.get("reason"), str | None):
        raise ApiError(f"`{path}.reason` must be a string", param=f"{path}.reason", code="invalid_type")
    return id


def denial(item: Mapping[str, Any]) -> str:
    """What the model is told of a call that was not approved."""
    reason = item.get("reason")
    return "Error: the user did not approve this call" + (f": {reason}" if reason else "")


def approved_calls(before: Sequence[Item], items: Sequence[Item]) -> list[Item]:
    """Requests whose calls are to be made now.

    Args:
        before: items of earlier responses.
        items: items of the request's own input, which say what is approved; both as `listed` returns them.
    """
    requests = {item["id"]: item for item in (*before, *items) if item["type"] == REQUEST}
    made = {item["approval_request_id"] for item in (*before, *items) if item["type"] == "mcp_call"}
    approved = [item["approval_request_id"] for item in items if item["type"] == RESPONSE and item["approve"]]
    return [requests[id] for id in dict.fromkeys(approved) if id not in made]
