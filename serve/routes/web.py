"""The chat page at / and its files, which `npm run build` in web/ writes to serve/web/."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.context import KEY, shared_of
from llmjax.serve.routes.ops import hint

FOLDER = Path(__file__).parents[1] / "web"
PAGE = "index.html"
SUFFIXES = frozenset({".html", ".js", ".css", ".svg", ".txt", ".webmanifest"})  # the folder has no others to serve

# Everything comes from this server, no script or style stands in the page, and text becomes markup in one place only.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again, and answered 304 unless the server is a newer one
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True)
class WebFile:
    """A file of the page, as it is sent."""

    data: bytes
    packed: bytes
    kind: str
    tag: str


@cache
def read(name: str) -> WebFile | None:
    """A file of the page by its name; None: there is none of that name."""
    path = FOLDER / name
    if Path(name).name != name or path.suffix not in SUFFIXES or not path.is_file():
        return None
    data = path.read_bytes()
    kind = {".js": "text/javascript", ".webmanifest": "application/manifest+json"}.get(path.suffix)
    kind = kind or mimetypes.guess_type(name)[0] or "text/plain"
    return WebFile(
        data, gzip.compress(data, mtime=0), f"{kind}; charset=utf-8", f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    )


def answer(request: Request, name: str) -> Response:
    """One file, as the request's headers want it.

    Raises:
        HTTPException: 404, there is no such file.
    """
    file = read(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "etag": file.tag}
    if file.tag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.kind, headers={**headers, "content-encoding": "gzip"})
    return Response(file.data, media_type=file.kind, headers=headers)


async def page(request: Request) -> Response:
    """The chat page for browsers; for other clients a line that says what this is."""
    config = shared_of(request).config
    # The page itself says nothing of the model, so it comes without a key too, and asks for one.
    secret = config.guard_metrics and config.api_key and KEY not in request.scope["state"]
    if secret or "text/html" in request.headers.get("accept", ""):
        return answer(request, PAGE)
    response = await hint(request)
    response.headers["vary"] = "accept"
    return response


async def web_file(request: Request) -> Response:
    """A script, a style or a picture of the chat page."""
    return answer(request, request.path_params["name"])


WEB_ROUTES = [Route("/", page, methods=["GET"]), Route("/web/{name}", web_file, methods=["GET"])]
