"""The events of each API, as the types of its official client have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

EVENTS: dict[str, TypeAdapter[Any]] = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletionChunk),
    "/v1/responses": TypeAdapter(openai.types.responses.ResponseStreamEvent),
    "/v1/messages?beta=true": TypeAdapter(anthropic.types.RawMessageStreamEvent),
}


def first_error(path: str, events: Iterable[dict[str, Any]]) -> str | None:
    """What is wrong with the first event that is not of the API's types; None: all are.

    Args:
        path: where the request went.
    """
    for event in events:
        try:
            EVENTS[path].validate_python(event)
        except ValidationError as error:
            first = _plainest(error.errors(include_url=False, include_input=False))
            return f"{path}: {event.get('type', 'an event')}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


def _plainest(errors: list[ErrorDetails]) -> ErrorDetails:
    """An error about the type that the event says it is of, where it may be of many."""
    others = {error["loc"][0] for error in errors if error["type"] == "literal_error" and error["loc"][1:] == ("type",)}
    return next((error for error in errors if error["loc"][0] not in others), errors[0])
