"""The Starlette application: routes, error handlers and middleware around one engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from llmjax.config import ServerConfig
from llmjax.errors import LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.serve.access import ApiKeys, HostCheck, OriginCheck, open_paths
from llmjax.serve.answers import OutputFormats
from llmjax.serve.batches.service import Batches
from llmjax.serve.choice import ModelChoice
from llmjax.serve.context import Server, Shared, fingerprint, model_root, names_of
from llmjax.serve.conversations import Conversations
from llmjax.serve.downloads import DownloadRules
from llmjax.serve.drain import Gate
from llmjax.serve.errors import ApiError, ClientDisconnected, handle_error
from llmjax.serve.files import FileStore
from llmjax.serve.interfaces import Engine
from llmjax.serve.limits import BodyLimits
from llmjax.serve.listen import on_loopback
from llmjax.serve.literal_texts import LiteralTexts
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.metrics import EngineMetrics, PoolMetrics, registry
from llmjax.serve.middleware import DrainGate, ProxyPrefix, RequestLog
from llmjax.serve.models import Models, OneModel
from llmjax.serve.openapi import docs_routes
from llmjax.serve.pulls import Pulls
from llmjax.serve.rates import HEADERS, RateLimits
from llmjax.serve.responses.store import ResponseStore
from llmjax.serve.routes.adapters import ADAPTER_ROUTES
from llmjax.serve.routes.admin import ADMIN_ROUTES
from llmjax.serve.routes.batches import BATCH_ROUTES
from llmjax.serve.routes.chat import CHAT_ROUTES
from llmjax.serve.routes.chat_batch import CHAT_BATCH_ROUTES
from llmjax.serve.routes.completions import COMPLETION_ROUTES
from llmjax.serve.routes.conversations import CONVERSATION_ROUTES
from llmjax.serve.routes.files import FILE_ROUTES
from llmjax.serve.routes.generate import GENERATE_ROUTES
from llmjax.serve.routes.generative_scoring import GENERATIVE_SCORING_ROUTES
from llmjax.serve.routes.invocations import INVOCATION_ROUTES
from llmjax.serve.routes.llama_server import LLAMA_SERVER_MODEL_ROUTES, LLAMA_SERVER_ROUTES
from llmjax.serve.routes.messages import MESSAGE_ROUTES
from llmjax.serve.routes.models import MODEL_ROUTES
from llmjax.serve.routes.ollama import OLLAMA_MODEL_ROUTES, OLLAMA_ROUTES
from llmjax.serve.routes.ops import hint, ops_routes
from llmjax.serve.routes.pooling import POOLING_ROUTES
from llmjax.serve.routes.refused import REFUSED_ROUTES
from llmjax.serve.routes.render import RENDER_ROUTES
from llmjax.serve.routes.responses import RESPONSE_ROUTES
from llmjax.serve.routes.tokens import TOKEN_ROUTES
from llmjax.serve.routes.tool_servers import TOOL_SERVER_ROUTES
from llmjax.serve.routes.web import WEB_ROUTES
from llmjax.serve.several import SeveralModels
from llmjax.serve.sources import Sources
from llmjax.serve.traces import Traces
from llmjax.serve.volatile_lines import VolatileLines

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from llmjax.config_file import Configs, ServedModel
    from llmjax.serve.pictures import Pictures
    from llmjax.several.pool import ModelPool

BATCH_WIDTH = 24  # requests of batches that are asked at once where there are several models


# Routes at which a model answers.
ANSWERING: list[BaseRoute] = [
    *(*CHAT_ROUTES, *COMPLETION_ROUTES, *RESPONSE_ROUTES, *MESSAGE_ROUTES, *POOLING_ROUTES),
    *(*CHAT_BATCH_ROUTES, *GENERATE_ROUTES, *GENERATIVE_SCORING_ROUTES, *INVOCATION_ROUTES),
    *(*OLLAMA_ROUTES, *LLAMA_SERVER_ROUTES),
]


def routes_of(config: ServerConfig, collectors: CollectorRegistry) -> list[BaseRoute]:
    """All routes of a server, and of those the documents where they are wanted.

    Args:
        collectors: the metrics that it shows.
    """
    routes = [
        *ANSWERING,
        *CONVERSATION_ROUTES,
        *FILE_ROUTES,
        *BATCH_ROUTES,
        *MODEL_ROUTES,
        *TOOL_SERVER_ROUTES,
        *OLLAMA_MODEL_ROUTES,
        *LLAMA_SERVER_MODEL_ROUTES,
        *TOKEN_ROUTES,
        *RENDER_ROUTES,
        *ADMIN_ROUTES,
        *ADAPTER_ROUTES,
        *(WEB_ROUTES if config.web else [Route("/", hint, methods=["GET"])]),
        *ops_routes(collectors),
    ]
    if config.docs:
        routes += docs_routes([*routes], keys=bool(config.api_key), root_path=config.root_path)
    return [*routes, *REFUSED_ROUTES]  # these are not in the documents: nothing can be asked there


POSTS = frozenset(route.path for route in ANSWERING if isinstance(route, Route) and "POST" in (route.methods or ()))
IN_QUERY = frozenset(route.path for route in ADAPTER_ROUTES)
# Whose clients are also curl as it comes, which says no Content-Type of JSON.
ANY_TYPE = frozenset(
    route.path for route in (*OLLAMA_ROUTES, *OLLAMA_MODEL_ROUTES, *LLAMA_SERVER_ROUTES, *LLAMA_SERVER_MODEL_ROUTES)
)
# Other routes that one of the models answers.
OF_A_MODEL = frozenset(
    {
        *(route.path for route in (*TOKEN_ROUTES, *RENDER_ROUTES, *LLAMA_SERVER_MODEL_ROUTES)),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
        *IN_QUERY,
    }
)


def create_app(
    engine: Engine, config: ServerConfig, *, gate: Gate | None = None, tracer: Tracer | None = None
) -> Starlette:
    """An ASGI application that serves ``engine``; its own metrics are added to the engine's stat loggers.

    Args:
        gate: closed to stop the server; by default one that stays open.
        tracer: traces requests for answers; None: they are not traced.
    """
    metrics = EngineMetrics(engine)
    engine.add_stat_logger(metrics)
    shared = _shared(config, gate or Gate(), BodyLimits.of(engine, config))
    names, any_name = names_of(engine), engine.config.any_name
    server = _server(engine, config, shared=shared, names=names, any_name=any_name)
    # A quarter of the places is left to those who wait for an answer.
    width = max(1, 3 * engine.config.max_num_seqs // 4)
    app, inner = _applications(
        shared, OneModel(server), metrics, width=width, model=engine.info.model_name, tracer=tracer
    )
    app.state.shared = inner.state.shared = server
    app.state.server = inner.state.server = server
    return app


def create_app_of_several(
    models: dict[str, ServedModel],
    pool: ModelPool,
    configs: Configs,
    *,
    gate: Gate | None = None,
    tracer: Tracer | None = None,
) -> Starlette:
    """An ASGI application that serves the models of a pool.

    Args:
        models: by name, and in order; the mapping that the pool reads, which models join that are pulled.
        configs: what concerns all of them, also those that join.
        gate, tracer: as in `create_app`.
    """
    config = configs.server
    shared = _shared(config, gate or Gate(), BodyLimits.of_any(config))
    metrics = PoolMetrics(pool)

    def make(engine: Engine, own: ServerConfig, **named: Any) -> Server:
        metrics.attach(engine)
        return _server(engine, own, shared=shared, **named)

    several = SeveralModels(models, pool, make)
    interval = config.sse_keep_alive_interval
    choice = Middleware(
        ModelChoice, models=several, paths=POSTS | OF_A_MODEL, in_query=IN_QUERY, any_type=ANY_TYPE, interval=interval
    )
    app, _ = _applications(shared, several, metrics, width=BATCH_WIDTH, model="", tracer=tracer, inside=[choice])
    app.state.pulls = Pulls(several, configs)
    return app


def _applications(
    shared: Shared,
    models: Models,
    metrics: Collector,
    *,
    width: int,
    model: str,
    tracer: Tracer | None,
    inside: Sequence[Middleware] = (),
) -> tuple[Starlette, Starlette]:
    """The application, and the one that batches ask.

    Args:
        width: requests of batches that are asked at once.
        model: what traces call the model where a request does not say.
        inside: middleware just around the routes.
    """
    config = shared.config
    traces = [] if tracer is None else [Middleware(Traces, paths=POSTS, model=model, tracer=tracer)]
    middleware = [
        Middleware(ProxyPrefix),
        *_cors(config),
        Middleware(RequestLog, enabled=config.access_log, id_header=config.enable_request_id_headers),
        *_access(config),
        *traces,
        *_rates(config, POSTS),
        Middleware(DrainGate, gate=shared.gate, retry_after=config.shutdown_timeout),
        *inside,
    ]
    handlers: Any = dict.fromkeys((ApiError, ClientDisconnected, LLMJaxError, HTTPException), handle_error)
    app = Starlette(routes=routes_of(config, registry(metrics)), middleware=middleware, exception_handlers=handlers)
    # What batches ask: no key, no rates, and no gate, for the server does not wait for them.
    log = Middleware(RequestLog, enabled=config.access_log, id_header=True)
    inner = Starlette(routes=ANSWERING, middleware=[log, *inside], exception_handlers=handlers)
    app.state.shared = inner.state.shared = shared
    app.state.models = inner.state.models = models
    app.state.pulls = None  # nothing joins an only model
    app.state.batches = Batches(shared.files, inner, limits=shared.limits, width=width)
    return app, inner


def _shared(config: ServerConfig, gate: Gate, limits: BodyLimits) -> Shared:
    files = FileStore(
        None if config.files_dir is None else Path(config.files_dir).expanduser(),
        most_bytes=config.max_files_bytes,
        lifetime=config.file_lifetime,
    )
    return Shared(
        config=config,
        gate=gate,
        limits=limits,
        responses=ResponseStore(
            most=config.max_stored_responses,
            most_bytes=config.max_stored_response_bytes,
            lifetime=config.stored_response_lifetime,
        ),
        conversations=Conversations(
            most=config.max_conversations if config.record_conversation else 0,
            most_bytes=config.max_conversation_bytes,
            most_request_bytes=limits.bytes,
            lifetime=config.conversation_lifetime,
        ),
        files=files,
        sources=_sources(config, files),
        tool_servers=ToolServers.of(config),
    )


def _server(engine: Engine, config: ServerConfig, *, shared: Shared, **named: Any) -> Server:
    """A loaded model.

    Args:
        config: the settings of the server, some of which may be the model's own.
        named: its names, and what `Server` knows of where it comes from.
    """
    return Server(
        **{**vars(shared), "config": config, "limits": BodyLimits.of(engine, config)},
        **named,
        engine=engine,
        formats=OutputFormats(engine.tokenizer, config),
        pictures=_pictures(engine, shared.sources),
        literal_texts=_literal_texts(engine, config),
        volatile_lines=VolatileLines.of(config.volatile_lines),
        fingerprint=fingerprint(engine.config),
        model_root=model_root(engine.info.model_name, engine.config),
    )


def _sources(config: ServerConfig, files: FileStore) -> Sources:
    hosts, folder = frozenset(config.allowed_media_domains), config.allowed_local_media_path
    return Sources(
        files=files,
        folder=None if folder is None else Path(folder).expanduser(),
        downloads=DownloadRules(hosts=hosts) if hosts else None,
    )


def _pictures(engine: Engine, sources: Sources) -> Pictures | None:
    """What reads the pictures of requests; None: the model sees none."""
    images = getattr(engine, "images", None)
    if images is None:
        return None
    from llmjax.media.pool import PicturePool  # most models need nothing of it
    from llmjax.serve.pictures import PictureRules, Pictures

    rules = PictureRules(
        most=engine.config.most_images,
        most_videos=engine.config.most_videos,
        most_tokens=engine.info.max_model_len,
    )
    pool = PicturePool(images.processor, size=max(1, usable_cores() // 2))
    return Pictures(images, pool.prepare, pool.prepare_video, sources=sources, rules=rules)


def _literal_texts(engine: Engine, config: ServerConfig) -> LiteralTexts | None:
    if engine.tokenizer is None or not config.split_special_tokens:
        return None
    return LiteralTexts(engine.tokenizer)


def _cors(config: ServerConfig) -> list[Middleware]:
    """Without origins there is nothing to add: browsers then let only pages of the server's own origin read answers."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            expose_headers=["X-Request-Id", "Retry-After", "metadata", *HEADERS],
        )
    ]


def _access(config: ServerConfig) -> list[Middleware]:
    checks = []
    if config.allowed_hosts or on_loopback(config):
        checks.append(Middleware(HostCheck, allowed=(config.host, *config.allowed_hosts)))
    checks.append(Middleware(OriginCheck, allowed=config.allowed_origins))
    if config.api_key or config.admin_key:
        checks.append(
            Middleware(
                ApiKeys,
                keys=config.api_key,
                admin_keys=config.admin_key,
                open_paths=open_paths(config),
                salted=config.keys_apart,
            )
        )
    return checks


def _rates(config: ServerConfig, paths: frozenset[str]) -> list[Middleware]:
    requests, tokens = config.max_requests_per_minute, config.max_tokens_per_minute
    return [Middleware(RateLimits, paths=paths, requests=requests, tokens=tokens)] if requests or tokens else []
