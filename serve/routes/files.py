"""/v1/files: what batches read and write, and what messages name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from llmjax.serve.body import MIN_BYTES_PER_SECOND
from llmjax.serve.context import Shared, owner_of, shared_of
from llmjax.serve.errors import ApiError, ClientDisconnected
from llmjax.serve.files import StoredFile, page_of
from llmjax.serve.records import storing

FORM_BYTES = 64 * 1024  # of an upload, beside its file
LEAST_LIFETIME, MOST_LIFETIME = 3600, 30 * 24 * 3600  # OpenAI's
MOST_LISTED = 10_000
PURPOSES = ("batch", "user_data", "vision")  # of which messages may name any
NOT_STORED = "the file cannot be stored"


async def upload_file(request: Request) -> Response:
    """Leave a file for a batch, or for messages that name it."""
    server = shared_of(request)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError("Content-Type must be multipart/form-data", status=415)
    owner = owner_of(request)
    parser = MultiPartParser(request.headers, _bounded(request, server), max_files=1, max_fields=8)
    try:
        with storing(NOT_STORED):
            form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(f"the form is not valid: {error.message}", code="invalid_form") from None
    try:
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise ApiError("`file` is required", param="file", code="missing_required_parameter")
        if not isinstance(purpose, str) or purpose not in PURPOSES:
            raise ApiError(f"`purpose` must be one of {', '.join(PURPOSES)}", param="purpose")
        lifetime = _lifetime(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        path = server.files.new_path()
        with storing(NOT_STORED):
            try:
                await asyncio.to_thread(_copy, upload, str(path))
                filename = upload.filename or "file"
                file = server.files.keep(path, owner=owner, filename=filename, purpose=purpose, lifetime=lifetime)
            finally:
                path.unlink(missing_ok=True)
    finally:
        await form.close()
    return _json(file.body())


def _copy(upload: UploadFile, path: str) -> None:
    with open(path, "xb") as target:
        while piece := upload.file.read(2**20):
            target.write(piece)


def _lifetime(anchor: Any, seconds: Any) -> float | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or not str(seconds).isdecimal() or len(str(seconds)) > 9:
        raise ApiError("`expires_after` must be seconds from created_at", param="expires_after", code="invalid_value")
    if not LEAST_LIFETIME <= int(seconds) <= MOST_LIFETIME:
        message = f"`expires_after[seconds]` must be between {LEAST_LIFETIME} and {MOST_LIFETIME}"
        raise ApiError(message, param="expires_after", code="invalid_value")
    return float(seconds)


async def _bounded(request: Request, server: Shared) -> AsyncGenerator[bytes, None]:
    """The body, while it comes fast enough and is not too large."""
    most = server.config.max_file_bytes + FORM_BYTES
    end = asyncio.get_running_loop().time() + server.config.read_timeout
    size = 0
    try:
        async with asyncio.timeout_at(end) as timer:
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    message = f"the file is larger than {server.config.max_file_bytes} bytes (--max-file-bytes)"
                    closing = {"Connection": "close"}
                    raise ApiError(message, status=413, param="file", code="body_too_large", headers=closing)
                timer.reschedule(end + size / MIN_BYTES_PER_SECOND)
                yield piece
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        message = f"the file did not arrive in time: {size} bytes came"
        raise ApiError(message, status=408, headers={"Connection": "close"}) from None


async def list_files(request: Request) -> Response:
    """The files of a key."""
    query = request.query_params
    files = shared_of(request).files.of(owner_of(request))
    if (purpose := query.get("purpose")) is not None:
        files = [file for file in files if file.purpose == purpose]
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise ApiError("order must be asc or desc", param="order", code="invalid_value")
    if order == "asc":
        files.reverse()
    shown, more = page_of(files, lambda file: file.id, query, most=MOST_LISTED)
    return _json(listing([file.body() for file in shown], more=more))


async def get_file(request: Request) -> Response:
    """What is known of a file."""
    return _json(_file(request).body())


async def get_content(request: Request) -> Response:
    """What is in a file."""
    file = _file(request)
    return FileResponse(shared_of(request).files.path(file), media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Forget a file."""
    file = _file(request)
    shared_of(request).files.delete(file)
    return _json({"id": file.id, "object": "file", "deleted": True})


def listing(items: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page of OpenAI's lists."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": more}


def _file(request: Request) -> StoredFile:
    return shared_of(request).files.get(owner_of(request), request.path_params["file_id"])


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


FILE_ROUTES = [
    Route("/v1/files", upload_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", get_file, methods=["GET"]),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", get_content, methods=["GET"]),
]
