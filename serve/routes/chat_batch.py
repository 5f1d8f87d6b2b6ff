"""POST /v1/chat/completions/batch: several conversations in one request, each of which gets one answer."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.outputs import RequestOutput
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, ignored_fields, record_of, server_of
from llmjax.serve.generation import guarded, together, usage_of
from llmjax.serve.logprobs import num_logprobs
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import check_queue, off_loop
from llmjax.serve.protocol.chat import BatchChatRequest
from llmjax.serve.routes.chat import ChatAnswer, read_custom_tools, turn_of


async def batch_chat_completions(request: Request) -> Response:
    """An answer to each of several conversations."""
    server = server_of(request)
    body = parse(await read_json(request), BatchChatRequest, ignored=ignored_fields(request))
    check_queue(server, prompts=len(body.messages), choices=1, field="messages")
    custom, created = read_custom_tools(body), int(time.time())
    answers, ignored = [], record_of(request).ignored
    named = len(ignored)
    for number, chat in enumerate(body.chats()):
        del ignored[named:]  # each says the same of the fields that all have
        with other_names({"messages": f"messages.{number}"}):
            turn = await turn_of(request, server, chat, custom)
        answers.append(ChatAnswer(server=server, body=chat, turn=turn, created=created))
    whole = await guarded(request.receive, _whole(request, server, answers), timeout=server.config.request_timeout)
    return Response(whole, media_type="application/json")


async def _whole(request: Request, server: Server, answers: list[ChatAnswer]) -> bytes:
    outputs = await together([answer.turn.whole() for answer in answers])
    scores = num_logprobs(*(choice.logprobs for output in outputs for choice in output.outputs))
    texts = sum(len(choice.text) for output in outputs for choice in output.outputs)
    whole = await off_loop(lambda: _written(server, answers, outputs), size=4 * scores + texts)
    record, usage = record_of(request), whole["usage"]
    record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return orjson.dumps(whole)


def _written(server: Server, answers: list[ChatAnswer], outputs: list[RequestOutput]) -> dict[str, Any]:
    choices = []
    for index, (answer, output) in enumerate(zip(answers, outputs, strict=True)):
        (choice,) = output.outputs
        choices.append({**answer.choice(choice), "index": index, **answer.prompt()})
    whole = answers[0].envelope("chat.completion", choices)
    whole["usage"] = usage_of([answer.turn.tally for answer in answers])
    if server.config.enable_per_request_metrics:
        whole["metrics"] = None  # there are times of several
    return whole


CHAT_BATCH_ROUTES = [Route("/v1/chat/completions/batch", batch_chat_completions, methods=["POST"])]
