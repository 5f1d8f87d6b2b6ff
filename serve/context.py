"""What every route reaches through ``request.app.state.server``: the engine, the settings, the gate."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.types import Scope

from llmjax.config import ServerConfig
from llmjax.engine.front.limits import RequestLimits
from llmjax.outputs import RequestMetrics
from llmjax.serve.answers import OutputFormats
from llmjax.serve.drain import Gate
from llmjax.serve.errors import ApiError
from llmjax.serve.interfaces import Engine
from llmjax.serve.limits import BodyLimits
from llmjax.serve.protocol.adapters import scales_of
from llmjax.version import __version__

if TYPE_CHECKING:
    from llmjax.adapters.reference import Adaptation
    from llmjax.serve.conversations import Conversations
    from llmjax.serve.files import FileStore
    from llmjax.serve.literal_texts import LiteralTexts
    from llmjax.serve.pictures import Pictures
    from llmjax.serve.protocol.common import AdapterScale, GenerationRequest
    from llmjax.serve.responses.store import ResponseStore
    from llmjax.serve.sources import Sources
    from llmjax.serve.volatile_lines import VolatileLines
    from llmjax.tokenizer import Tokenizer

# Where a request's state holds the digest of its API key, the salt of that, and whether it is an operator's.
KEY, KEY_SALT, ADMIN = "key", "key_salt", "admin"
OWNER_DIGITS = 16  # of a key's digest, that tell keys apart

SAFE_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Server:
    engine: Engine
    config: ServerConfig
    gate: Gate
    limits: BodyLimits
    formats: OutputFormats
    responses: ResponseStore
    conversations: Conversations
    files: FileStore
    sources: Sources
    pictures: Pictures | None = None  # None: the model sees none
    literal_texts: LiteralTexts | None = None  # None: special tokens in texts are special
    volatile_lines: VolatileLines | None = None  # None: every line stays where it is
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""
    model_root: str = ""

    @property
    def request_limits(self) -> RequestLimits:
        """What requests may ask of the engine."""
        return RequestLimits.of(self.engine.config, self.engine.info)

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` (404) unless ``name`` is absent, empty, the served model's or an adapter's.

        A server that was started on a folder and given no other name may be called by that folder too.
        """
        config = self.engine.config
        names = {self.engine.info.model_name, *(config.served_names or (config.model,))}
        if name and not config.any_name and name not in names and self.engine.adapters.named(name) is None:
            raise ApiError(
                f"the model `{name[:200]}` does not exist; this server has `{self.engine.info.model_name}` "
                "(a server with --served-model-name NAME '*' takes any name)",
                status=404,
                param="model",
                code="model_not_found",
            )

    def answer_name(self, name: str | None) -> str:
        """What answers call the model, to a request that calls it ``name``: an adapter's name, or the model's first."""
        found = None if name is None else self.engine.adapters.named(name)
        return self.engine.info.model_name if found is None else found.reference.name

    def adaptation(self, name: str | None, lora: Sequence[AdapterScale] | None = None) -> Adaptation:
        """What a request is computed with.

        Args:
            name: what it calls the model.
            lora: its factors for the adapters of ``--lora``; None: those of all requests.

        Raises:
            ApiError: there is no such model, or it names an adapter in both ways.
            InvalidRequest: there is no such adapter of ``--lora``.
        """
        self.check_model(name)
        scales = None if lora is None else scales_of(lora)
        found = None if name is None else self.engine.adapters.find(name)
        if found is None:
            return self.engine.adapters.scaled(scales)
        if scales is not None:
            raise ApiError(
                "`lora` weighs the adapters of --lora, and cannot be combined with a model that is an adapter",
                param="lora",
                code="unsupported_parameter",
            )
        return found

    def check_task(self, task: Literal["generate", "embed", "classify", "score", "pooling"]) -> None:
        """Raises ``ApiError`` (400), which says what the model does serve, unless it is made for ``task``."""
        pooler = self.engine.info.pooler
        if pooler is None:
            does, tasks, routes = "generates text", ["generate"], "/v1/chat/completions and /v1/completions"
        elif pooler.task == "embed":
            does, tasks = "makes embeddings", ["embed", "score", "pooling"]
            routes = "/v1/embeddings, /score, /rerank and /pooling"
        else:
            scores = len(pooler.labels) == 1
            does, tasks = "classifies texts", ["classify", "pooling", *(["score"] if scores else [])]
            routes = "/classify, /score, /rerank and /pooling" if scores else "/classify and /pooling"
        if task not in tasks:
            raise ApiError(f"this model {does}: it is served at {routes}", param="model", code="unsupported_task")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, or ``ApiError`` (400) when the server runs on token ids only."""
        if self.engine.tokenizer is None:
            raise ApiError("this server has no tokenizer: use /v1/completions with token ids", code="no_tokenizer")
        return self.engine.tokenizer


def fingerprint(engine: Engine) -> str:
    """OpenAI's ``system_fingerprint``: changes with anything that may change what a seed produces."""
    config = engine.config
    parts = (__version__, metadata.version("jax"), config.model, config.revision, config.dtype, config.kv_cache_dtype)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def model_root(engine: Engine) -> str:
    """What the served model was made from, for clients: no path of this machine."""
    model = engine.config.model
    return engine.info.model_name if os.path.exists(os.path.expanduser(model)) else model


@dataclass(kw_only=True)
class RequestRecord:
    """One HTTP request as the access log sees it; routes fill in the tokens.

    Attributes:
        owner: digest of the request's key; empty: it has none.
        ignored: fields that had no effect, which the response names too.
        moved_lines: volatile lines of its system prompt, which were moved to the end of the conversation.
        asked: settings that the request chose, by the names of traces.
        times: when things happened to the last continuation that brought something.
    """

    id: str
    started: float
    owner: str = ""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    ignored: list[str] = field(default_factory=list)
    user: str | None = None
    session: str | None = None
    metadata: dict[str, str] | None = None
    moved_lines: int = 0
    asked: dict[str, int | float] = field(default_factory=dict)
    times: RequestMetrics | None = None

    def note(self, body: GenerationRequest) -> None:
        """Keeps what a request says of itself."""
        self.user = body.safety_identifier or body.user
        self.session = body.session_id
        self.metadata = body.metadata
        self.ignored += body.without_effect()
        chosen = {"max_tokens": body.max_tokens, "temperature": body.temperature, "top_p": body.top_p, "n": body.n}
        self.asked = {name: value for name, value in chosen.items() if value is not None}


def new_id(headers: Mapping[str, Any]) -> str:
    """The client's X-Request-Id if it is harmless, else a fresh one."""
    client_id = headers.get("x-request-id", "")
    return client_id if SAFE_ID.fullmatch(client_id) else uuid.uuid4().hex


def engine_id(id: str, owner: str) -> str:
    """What the engine calls a request: clients may reuse an id while its first use still runs, and it says whose it is.

    Args:
        id: the answer's id.
        owner: what `owner_of` returns.
    """
    return f"{id}-{owner[:OWNER_DIGITS]}.{uuid.uuid4().hex[:8]}"


def is_of(engine_id: str, owner: str) -> bool:
    """Whether a request that the engine has is an owner's."""
    return engine_id.rpartition("-")[2].partition(".")[0] == owner[:OWNER_DIGITS]


def path_of(scope: Scope) -> str:
    """The path of a request, below the server's ``root_path``."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def is_post(scope: Scope, paths: frozenset[str]) -> bool:
    """Whether it is a POST request for one of ``paths``."""
    return scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in paths


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope["state"]["record"]
    return record


def ignored_fields(request: Request) -> list[str] | None:
    """Where the names of unknown fields go, if they are to be ignored."""
    return record_of(request).ignored if server_of(request).config.ignore_unknown_fields else None


def owner_of(request: Request) -> str:
    """The owner of what a request leaves on the server: its API key; without keys there is one owner."""
    owner: str = request.scope["state"].get(KEY, "")
    return owner


def client_of(request: Request) -> str:
    """The client that a request counts for where clients take turns: its API key or, without keys, its address."""
    return owner_of(request) or (request.client.host if request.client is not None else "")


def cache_salt_of(request: Request, own: str | None) -> str | None:
    """The salt of a request's cached prefixes: its ``own``, and its key's where keys have one."""
    key_salt = request.scope["state"].get(KEY_SALT)
    return own if key_salt is None else f"{key_salt}:{own or ''}"
