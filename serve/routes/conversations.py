"""What is kept of conversations, for those whose they are."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.context import owner_of, shared_of
from llmjax.serve.conversations import Conversation


async def get_conversation(request: Request) -> Response:
    """A conversation's messages."""
    conversation = shared_of(request).conversations.get(owner_of(request), request.path_params["conversation_id"])
    return Response(_written(conversation), media_type="application/json")


def _written(conversation: Conversation) -> bytes:
    about = {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": {},
        "messages": [orjson.Fragment(message) for message in conversation.messages],
    }
    return orjson.dumps(about)


async def delete_conversation(request: Request) -> Response:
    """Forget a conversation."""
    id = request.path_params["conversation_id"]
    shared_of(request).conversations.delete(owner_of(request), id)
    answer = {"id": id, "object": "conversation.deleted", "deleted": True}
    return Response(orjson.dumps(answer), media_type="application/json")


CONVERSATION_ROUTES = [
    Route("/v1/conversations/{conversation_id:path}", get_conversation, methods=["GET"]),
    Route("/v1/conversations/{conversation_id:path}", delete_conversation, methods=["DELETE"]),
]
