"""Every failure as OpenAI's error body: one line, the field at fault, an HTTP status, never a traceback."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from llmjax.errors import (
    Asleep,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    LLMJaxError,
    ModelUnavailable,
    PromptTooLong,
    QueueFull,
    TokenizerError,
    UnknownAdapter,
)

log = logging.getLogger("serve")

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 100
ANTHROPIC = "/v1/messages"  # where paths of its API begin
OLLAMA = "/api/"  # likewise
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
ASLEEP_SECONDS = 5.0  # after which asking a server that sleeps again makes sense
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that went away; seen in logs only


def cut(name: str) -> str:
    """A name that came with a request, short enough to be sent back."""
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…"


class ApiError(Exception):
    """A failure that has an HTTP status.

    Args:
        message: one line for the user.
        status: HTTP status.
        param: the request field at fault.
        code: machine-readable reason, such as ``model_not_found``.
        headers: extra response headers.
        too_long: tokens of a prompt, and how many it may have.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = " ".join(message[: 2 * MAX_MESSAGE_CHARS].split())[:MAX_MESSAGE_CHARS]
        self.status = status
        self.param = None if param is None else cut(param)
        self.code = code
        self.headers = dict(headers or {})
        self.too_long = too_long

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str, request_id: str) -> Response:
        """The answer to a request for ``path``, in the form of the API that it belongs to."""
        body = self.body()
        if path.startswith(ANTHROPIC):
            body = anthropic_error(self, request_id)
        elif path.startswith(OLLAMA):
            body = ollama_error(self)
        return Response(orjson.dumps(body), self.status, headers=self.headers, media_type="application/json")


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


def anthropic_error(failure: ApiError, request_id: str) -> dict[str, Any]:
    """A failure as Anthropic's error body, which is also the event of a stream that fails."""
    if failure.status >= 500:
        kind = "overloaded_error" if failure.code == "queue_full" else "api_error"
    else:
        kind = ANTHROPIC_TYPES.get(failure.status, "invalid_request_error")
    message = failure.message
    if failure.too_long is not None:  # the words by which agents know that they must compact the conversation
        message = "prompt is too long: {} tokens > {} maximum".format(*failure.too_long)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_error(failure: ApiError) -> dict[str, Any]:
    """A failure as Ollama's error body, which is also the line of a stream that fails: it has one text, which names the
    field, too."""
    field = failure.param
    named = field is None or field in failure.message
    return {"error": failure.message if named else f"`{field}`: {failure.message}"}


def unsupported(field: str, detail: str = "is not supported yet") -> ApiError:
    return ApiError(f"`{field}` {detail}", param=field, code="unsupported_parameter")


def retry_later(message: str, *, seconds: float, code: str) -> ApiError:
    return ApiError(message, status=503, code=code, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


def as_api_error(error: BaseException) -> ApiError:
    """Translate any exception; what is not deliberate is logged and hidden from the user."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            over = (error.tokens, error.limit)
            return ApiError(str(error), param=error.field, code="context_length_exceeded", too_long=over)
        case UnknownAdapter():
            return ApiError(str(error), status=404, param=error.field, code="model_not_found")
        case InvalidRequest():
            return ApiError(str(error), param=error.field, code="invalid_value")
        case TokenizerError():
            return ApiError(str(error), param="messages", code="invalid_value")
        case QueueFull():
            return retry_later(str(error), seconds=error.retry_after, code="queue_full")
        case ModelUnavailable():
            return retry_later(str(error), seconds=error.retry_after, code="model_unavailable")
        case Asleep():
            return retry_later(str(error), seconds=ASLEEP_SECONDS, code="asleep")
        case EngineDead():
            return ApiError(str(error) or "the engine has stopped", status=503, code="engine_dead")
        case GenerationFailed():
            return ApiError(str(error), status=500, code="engine_error")
        case LLMJaxError():
            return ApiError(str(error), status=500)
        case ClientDisconnected():
            return ApiError("the client closed the connection", status=CLIENT_CLOSED_REQUEST)
        case HTTPException():
            return ApiError(error.detail, status=error.status_code, headers=error.headers)
        case _:
            log.error("internal error", exc_info=error)
            return ApiError("internal error; see the server's log", status=500, code="internal_error")


def _near_path(request: Request) -> str:
    """A hint for clients whose base URL lacks ``/v1``, or has it twice."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    for near in (f"/v1{path}", path.removeprefix("/v1")):
        scope = {"type": "http", "method": request.method, "path": near, "root_path": ""}
        if near != path and any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return f"; did you mean {near[:200]}?"
    return ""


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every class that ``as_api_error`` knows."""
    failure = as_api_error(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        failure.message = f"there is no {request.method} {request.url.path[:200]}{_near_path(request)}"
    request.scope["state"]["record"].error = failure.message
    return failure.response(request.url.path, request.scope["state"]["record"].id)
