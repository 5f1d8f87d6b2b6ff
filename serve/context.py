"""What every route reaches: the engine of the model that a request is for, the settings, the gate."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.types import Scope

from llmjax.config import EngineConfig, ServerConfig
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
    from llmjax.serve.mcp.servers import ToolServers
    from llmjax.serve.pictures import Pictures
    from llmjax.serve.protocol.common import AdapterScale, GenerationRequest
    from llmjax.serve.responses.store import ResponseStore
    from llmjax.serve.sources import Sources
    from llmjax.serve.volatile_lines import VolatileLines
    from llmjax.tokenizer import Tokenizer

# Where a request's state holds the digest of its API key, the salt of that, and whether it is an operator's.
KEY, KEY_SALT, ADMIN = "key", "key_salt", "admin"
CHOSEN = "server"  # where it holds the model that the request is for, on a server with several
OWNER_DIGITS = 16  # of a key's digest, that tell keys apart

SAFE_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What does not depend on the model.

    Args:
        limits: limits on a request's body, as far as they are known before its model is.
    """

    config: ServerConfig
    gate: Gate
    limits: BodyLimits
    responses: ResponseStore
    conversations: Conversations
    files: FileStore
    sources: Sources
    tool_servers: ToolServers


@dataclass(frozen=True, kw_only=True)
class Server(Shared):
    """A model, with what is shared.

    Args:
        names: what clients may call it.
        any_name: whether they may call it anything.
        holding: makes what keeps the model there while it is entered; None: it is there for as long as the server.
    """

    engine: Engine
    formats: OutputFormats
    names: frozenset[str]
    any_name: bool = False
    holding: Callable[[], AbstractContextManager[None]] | None = None
    pictures: Pictures | None = None  # None: the model sees none
    literal_texts: LiteralTexts | None = None  # None: special tokens in texts are special
    volatile_lines: VolatileLines | None = None  # None: every line stays where it is
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""
    model_root: str = ""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Keeps the server and the model for work that goes on without its request."""
        with self.gate.passing(), nullcontext() if self.holding is None else self.holding():
            yield

    @property
    def request_limits(self) -> RequestLimits:
        """What requests may ask of the engine."""
        return RequestLimits.of(self.engine.config, self.engine.info)

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` (404) unless ``name`` is absent, empty, one of the model's or an adapter's."""
        if name and not self.any_name and name not in self.names and self.engine.adapters.named(name) is None:
            raise unknown_model(name, [self.engine.info.model_name])

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
        elif pooler.kind == "each":
            does, tasks = "makes a vector of each token", ["score", "pooling"]
            routes = "/pooling, /score and /rerank"
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


def unknown_model(name: str, known: Sequence[str], *, pulls: bool = False) -> ApiError:
    """The error for a model that the server does not have.

    Args:
        name: empty: the request names none, and there is none.
        known: names of those that it has.
        pulls: whether operators may pull further ones.
    """
    wanted = f"the model `{name[:200]}` does not exist; " if name else ""
    if known:
        has = ", ".join(f"`{one}`" for one in known)
        more = "; POST /api/pull fetches others" if pulls else ""
        has += f"{more} (a server with --served-model-name NAME '*' takes any name)"
    else:
        has = 'no models yet: POST /api/pull with an operator\'s key and {"model": NAME} fetches one'
    return ApiError(
        f"{wanted}this server has {has}",
        status=404,
        param="model",
        code="model_not_found",
    )


def names_of(engine: Engine) -> frozenset[str]:
    """What clients may call the only model. One that was started on a folder and given no other name may be called by
    that folder too."""
    config = engine.config
    return frozenset({engine.info.model_name, *(config.served_names or (config.model,))})


def fingerprint(config: EngineConfig) -> str:
    """OpenAI's ``system_fingerprint``: changes with anything that may change what a seed produces."""
    parts = (__version__, metadata.version("jax"), config.model, config.revision, config.dtype, config.kv_cache_dtype)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def model_root(name: str, config: EngineConfig) -> str:
    """What a model of that name was made from, for clients: no path of this machine."""
    return name if os.path.exists(os.path.expanduser(config.model)) else config.model


@dataclass(kw_only=True)
class RequestRecord:
    """One HTTP request as the access log sees it; routes fill in the tokens.

    Attributes:
        owner: digest of the request's key; empty: it has none.
        model: the model that it is for, on a server with several.
        ignored: fields that had no effect, which the response names too.
        moved_lines: volatile lines of its system prompt, which were moved to the end of the conversation.
        asked: settings that the request chose, by the names of traces.
        times: when things happened to the last continuation that brought something.
    """

    id: str
    started: float
    owner: str = ""
    model: str | None = None
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


def shared_of(request: Request) -> Shared:
    """What does not depend on the model, or less than on others: limits are the model's where it is known."""
    shared: Shared = request.scope.get("state", {}).get(CHOSEN) or request.app.state.shared
    return shared


def server_of(request: Request) -> Server:
    """The model that a request is for: the only one, or that which `ModelChoice` has found."""
    server: Server = request.scope["state"].get(CHOSEN) or request.app.state.server
    return server


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope["state"]["record"]
    return record


def ignored_fields(request: Request) -> list[str] | None:
    """Where the names of unknown fields go, if they are to be ignored."""
    return record_of(request).ignored if shared_of(request).config.ignore_unknown_fields else None


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
