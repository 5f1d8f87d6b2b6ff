"""Runs the server: port, model and application."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmjax.collector import permanent, put_aside
from llmjax.config import EngineConfig, ServerConfig
from llmjax.config_file import name_of
from llmjax.errors import ConfigError
from llmjax.launcher import place_of
from llmjax.parsing.choice import check_reasoning_parser, check_tool_parser
from llmjax.serve.listen import bind, check_tls
from llmjax.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from llmjax.config_file import Configs

logger = logging.getLogger(__name__)


def run(configs: Configs) -> int:
    """Load the models and serve them until SIGTERM or Ctrl-C; a rank that does not serve computes until rank 0 ends.

    Returns:
        The exit status: 0, or that of an engine that died.

    Raises:
        ConfigError: the port is busy, a TLS file or OpenTelemetry is missing, a parser is unknown or the file of tool
            servers is wrong, before a model is loaded; a tool server cannot be reached; or there is no model, and
            nobody could pull one.
        LLMJaxError: no model can be loaded.
    """
    engine_config, server_config, models = configs.engine, configs.server, configs.models
    _configure_logging(server_config.log_level)
    if engine_config.node_rank:
        from llmjax.engine.ranks.worker import run_worker

        place = place_of(os.environ)
        if place is not None and place.size > 1:  # what a launcher sends to all ranks is rank 0's affair
            for ignored in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ignored, signal.SIG_IGN)
            run_worker(engine_config)
        run_worker(engine_config, joined=_end_with_rank_0)
    check_tls(server_config)
    for own in (server_config, *(model.server for model in models or ())):
        check_tool_parser(own.tool_call_parser)
        check_reasoning_parser(own.reasoning_parser)
    if server_config.mcp_config is not None:
        from llmjax.serve.mcp.servers import ToolServers  # few servers need it

        ToolServers.of(server_config)  # what is wrong with them is said before the model is loaded
    tracer = None if server_config.otlp_traces_endpoint is None else _tracer(server_config.otlp_traces_endpoint)
    sock = bind(server_config)
    logger.info("llmjax %s starts with %s", __version__, _intention(configs))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            if models is not None:
                return runner.run(_serve_several(configs, sock, tracer))
            return runner.run(_serve(engine_config, server_config, sock, tracer))
    finally:
        sock.close()
        if server_config.uds:
            Path(server_config.uds).unlink(missing_ok=True)


def _end_with_rank_0() -> None:
    """Has the first SIGTERM leave this process to rank 0, which gets one as well where a whole group is ended (by
    Kubernetes, say), and has requests to finish."""

    def leave(number: int, frame: object) -> None:
        logger.warning("SIGTERM: this rank ends when rank 0 does; a second SIGTERM ends it at once")
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)


async def _serve(engine_config: EngineConfig, config: ServerConfig, sock: socket.socket, tracer: Tracer | None) -> int:
    # Not before the port is known to be free: the imports alone take a second. Those of an engine in a process of its
    # own and the server's run side by side.
    with permanent():
        from llmjax.engine.clients.process import begin_loading

        if engine_config.engine_process == "auto":
            engine_config = engine_config.replace(engine_process="process")
        loading = begin_loading(engine_config)

        from llmjax.async_llm import AsyncLLM
        from llmjax.engine.report import print_startup
        from llmjax.serve.app import create_app
        from llmjax.serve.server import DrainingServer

    engine = AsyncLLM.from_config(engine_config, loading)
    server = DrainingServer(create_app(engine, config, tracer=tracer), config, sock=sock)
    try:
        await engine.wait_ready()
        print_startup(engine.info, await engine.programs())
        put_aside()
        await server.serve(sockets=[sock])
    finally:
        await server.stop_engine()
    return engine.exit_status


def _intention(configs: Configs) -> str:
    """What the server is about to have, for the log."""
    if configs.models is None:
        name = (*configs.engine.served_names, name_of(configs.engine))[0]
        return f"{name}; it answers when the model is loaded"
    if not configs.models:
        return "the models that have been pulled, which are loaded on demand"
    at_start = any(model.settings.load == "start" for model in configs.models)
    what = "models are" if len(configs.models) > 1 else "model is"
    names = ", ".join(model.name for model in configs.models)
    return f"{names}; {f'it answers when the {what} loaded' if at_start else f'the {what} loaded on demand'}"


async def _serve_several(configs: Configs, sock: socket.socket, tracer: Tracer | None) -> int:
    with permanent():
        from llmjax.serve.app import create_app_of_several
        from llmjax.serve.pulls import pulled_before
        from llmjax.serve.server import DrainingServer
        from llmjax.several.serving import pool_of

    config = configs.server
    known = {model.name: model for model in [*(configs.models or ()), *pulled_before(configs)]}
    if not known and not config.api_key and not config.admin_key:
        raise ConfigError(
            "no model is named or has been pulled, and nobody may pull one: operators have a key for it",
            hint="give --admin-key WORD, or name a model",
        )
    pool = pool_of(known, memory=config.models_memory_bytes, patience=config.model_timeout)
    app = create_app_of_several(known, pool, configs, tracer=tracer)
    server = DrainingServer(app, config, sock=sock)
    try:
        await pool.start()
        put_aside()
        await server.serve(sockets=[sock])
    finally:
        await server.stop_engine()
    return 0


def _tracer(endpoint: str) -> Tracer:
    from llmjax.serve.traces import otlp_tracer  # few servers need it

    return otlp_tracer(endpoint)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.Loop


def _configure_logging(level: str) -> None:
    """Messages to stderr; access lines, which are JSON, to stdout."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for chatty in ("uvicorn", "jax", "asyncio"):
        logging.getLogger(chatty).setLevel("WARNING")
    access = logging.getLogger("llmjax.serve.access")
    access.handlers = [logging.StreamHandler(sys.stdout)]
    access.propagate = False
    access.setLevel("DEBUG" if level == "debug" else "INFO")
