"""Replicas of the server on Ray Serve: ``serve run llmjax.deploy.ray:app model=Qwen/Qwen3-8B num_replicas=2``.

A replica is the server's own ASGI application around an engine of its own. Tokens go from it straight to Serve's proxy,
never through deployment handles. With ``nnodes`` it is rank 0 of a group, and starts the others as actors, each with a
bundle of the replica's placement group: so all of them are there or none, they come and go together, and Ray knows
which machines they are on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve import Application
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.applications import Starlette

from llmjax.async_llm import AsyncLLM
from llmjax.config import EngineConfig, ServerConfig
from llmjax.config_file import Configs
from llmjax.errors import ConfigError
from llmjax.migration.tables import collect_known
from llmjax.serve.app import create_app
from llmjax.settings import Setting, parse_text, settings_of, spellings
from llmjax.step_sizes import MOST

SOURCE = "an argument of llmjax.deploy.ray"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# What is Ray's, with what each must be.
RAY_OPTIONS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "num_replicas": (
        "a number of at least 1, or auto",
        lambda value: value == "auto" or _is_number(value, int, least=1),
    ),
    "autoscaling_config": ("a mapping", lambda value: isinstance(value, dict)),
    "num_cpus": ("a number of at least 0", lambda value: _is_number(value, int | float, least=0)),
    "num_gpus": ("a number of at least 0", lambda value: _is_number(value, int | float, least=0)),
    "placement_group_strategy": (f"one of {', '.join(STRATEGIES)}", lambda value: value in STRATEGIES),
}
HEALTH_SECONDS = 10.0  # between questions whether a replica's engine hangs
LAST_WORDS_SECONDS = 1.0  # in which streams end with an error, when their engine has died
# Answers are made on the loop that sends them: another one's thread would have to be woken for each token.
REPLICA_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}

logger = logging.getLogger(__name__)


@serve.ingress()
class Replica:
    """An engine and the application around it, in an actor of Ray's.

    Args:
        engine: configuration of the engine, whose model is loaded before requests come.
        server: how requests are treated; it listens nowhere.
    """

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._server = server
        self._others: list[Any] = []  # actors, which end when nothing refers to them
        if engine.nnodes > 1:
            address = get_node_ip_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family) as free:
                port = free.getsockname()[1]
            engine = engine.replace(
                master_addr=address,
                master_port=port,
                master_secret=engine.master_secret or secrets.token_hex(),
            )
            self._others = _start_ranks(engine)
        if engine.engine_process == "auto":
            engine = engine.replace(engine_process="process")  # as a server's: steps and answers share no interpreter
        # Not on the loop: Ray's own code runs there as well.
        self._engine = await asyncio.to_thread(AsyncLLM.from_config, engine)
        await self._engine.wait_ready()
        self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """Without an engine everything is refused, which is soon done, and so Ray would send it the most until it has
        asked three times for its health. It sees an actor's end at once."""
        status = await self._engine.wait_died()
        logger.error("without its engine the replica ends in %g s", LAST_WORDS_SECONDS)
        await asyncio.sleep(LAST_WORDS_SECONDS)
        os._exit(status)

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self._engine, self._server)

    def check_health(self) -> None:
        """Ray starts another replica in place of one that raises.

        Raises:
            EngineDead: its engine has died, or hangs.
        """
        self._engine.check_health()

    async def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            await engine.shutdown(drain_timeout=0)


class Rank:
    """Another rank of a replica, in an actor of Ray's, which ends with it.

    Args:
        engine: configuration of the replica's engine, except ``node_rank``.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine

    def follow(self) -> None:
        """Computes with rank 0 until that ends, and ends the process.

        Raises:
            LLMJaxError: the model cannot be loaded, or rank 0 does not want this rank.
        """
        from llmjax.engine.ranks.worker import (
            run_worker,  # it imports JAX, which looks at the devices that Ray has chosen
        )

        run_worker(self._engine)


def _start_ranks(engine: EngineConfig) -> list[Any]:
    """The ranks but the first, with a bundle of the replica's placement group each."""
    group = ray.util.get_current_placement_group()
    actors = []
    for rank, bundle in enumerate(group.bundle_specs[1:], 1):
        actor = ray.remote(Rank).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # the whole group is started again
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        actors.append(actor.remote(engine.replace(node_rank=rank)))
        actors[-1].follow.remote()
    return actors


def app(arguments: Mapping[str, Any]) -> Application:
    """The application as ``serve run`` and Serve's configuration files make it.

    Args:
        arguments: settings of ``llmjax serve``, by name; text is read as on a command line. Beside them, for Ray:
            ``num_replicas`` (1; ``auto``: as ``autoscaling_config`` says), ``autoscaling_config`` (a mapping),
            ``num_cpus`` and ``num_gpus`` of each replica, or of each of its ranks (``nnodes``), and
            ``placement_group_strategy`` of these (``PACK``: on as few machines as have room for them).

    Raises:
        ConfigError: an argument is unknown, or its value is wrong.
    """
    configs = configs_of(arguments)
    options: dict[str, Any] = {name: _option(name, arguments[name]) for name in RAY_OPTIONS if name in arguments}
    actor: dict[str, Any] = {name: options.pop(name) for name in ("num_cpus", "num_gpus") if name in options}
    actor["runtime_env"] = {"env_vars": REPLICA_ENVIRONMENT}
    engine = configs.engine
    if engine.nnodes > 1:
        options["placement_group_bundles"] = [_bundle(actor)] * engine.nnodes
    elif "placement_group_strategy" in options:
        raise ConfigError("placement_group_strategy: a replica is one process; it is for several (nnodes)")
    try:
        deployment = serve.deployment(
            Replica,
            name="llmjax",
            ray_actor_options=actor,
            # The engine queues and refuses by itself; Ray is to send it all that it may have.
            max_ongoing_requests=(engine.max_num_seqs or MOST.max_num_seqs) + engine.max_num_queued_reqs,
            graceful_shutdown_timeout_s=configs.server.shutdown_timeout,
            health_check_period_s=HEALTH_SECONDS,
            **options,
        )
    except (ValueError, TypeError) as error:  # of what is within autoscaling_config, or does not go together
        raise ConfigError(f"Ray Serve refuses {', '.join(options)}: {' '.join(str(error).split())}") from error
    bound: Application = deployment.bind(engine, configs.server)
    return bound


def _bundle(actor: Mapping[str, Any]) -> dict[str, float]:
    """What a rank takes of a machine, as Ray's placement groups name it."""
    named = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0)}
    return {name: float(number) for name, number in named.items() if number}


def configs_of(arguments: Mapping[str, Any]) -> Configs:
    """The settings among the arguments of `app`; raises as it does."""
    engine, server = settings_of(EngineConfig), settings_of(ServerConfig)
    settings_known = spellings([*engine.values(), *server.values()])
    given = {name: value for name, value in arguments.items() if name not in RAY_OPTIONS}
    typed = {
        name: _typed(settings_known[name][0], value) if name in settings_known else value
        for name, value in given.items()
    }
    values, notes = collect_known({**engine, **server}, typed, source=SOURCE)
    for note in notes:
        print(f"llmjax: note: {note}", file=sys.stderr)
    configs = Configs(
        engine=EngineConfig(**{name: values[name] for name in engine if name in values}),
        server=ServerConfig(**{name: values[name] for name in server if name in values}),
    )
    if configs.engine.node_rank:
        raise ConfigError("node_rank: on Ray Serve a replica starts its other ranks itself (nnodes)")
    if configs.engine.kv_transfer is not None and not configs.engine.master_secret:
        raise ConfigError("kv_transfer_config on Ray Serve needs master_secret: replicas must know the same one")
    # Ray's proxy listens, and requests are addressed to it.
    return replace(configs, server=replace(configs.server, host="0.0.0.0"))


def _option(name: str, value: Any) -> Any:
    """An argument of Ray's."""
    option, (expected, fits) = _yaml(value), RAY_OPTIONS[name]
    if not fits(option):
        raise ConfigError(f"{name} must be {expected}, not {value!r}")
    return option


def _is_number(value: Any, kind: Any, *, least: int) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value >= least


def _typed(setting: Setting, value: Any) -> Any:
    """The command line of Ray has text alone."""
    if not isinstance(value, str) or setting.kind is str:
        return value
    return _yaml(value) if setting.kind is bool else parse_text(setting, value, source=setting.flag)


def _yaml(value: Any) -> Any:
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value  # text, which whoever wants something else refuses by name
