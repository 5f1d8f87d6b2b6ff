"""``llmjax serve``, and the command line of ``python -m serve``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from llmjax.cli.parser import Parser, add_config_flags, add_model, configs_of
from llmjax.config import EngineConfig, ModelSettings, ServerConfig
from llmjax.config_file import Configs
from llmjax.launcher import launched_settings
from llmjax.migration import candle_vllm


def main(argv: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be loaded, or the port is busy.
    """
    parser = serve_parser()
    given = parser.parse(argv)
    named = given.positional_model is not None or vars(given).keys() & {"model", "gguf_file"}
    if not named and given.config is None and getattr(given, "load", None) != "demand":
        from llmjax.cli.pick import pick_model  # which reads files of models, for which it needs NumPy

        argv = [*argv, *pick_model(getattr(given, "download_dir", None))]
    configs = settings(parser, argv)
    from llmjax.serve.run import run  # the one import of serve from llmjax: the console script starts the server

    return run(configs) or 0


def parse(argv: list[str], *, prog: str = "llmjax serve") -> Configs:
    """The settings of a server from its command line.

    Raises:
        ConfigError: a flag, key or value is wrong.
    """
    return settings(serve_parser(prog), argv)


def serve_parser(prog: str = "llmjax serve") -> Parser:
    """The flags of a server."""
    parser = Parser(prog=prog, description="Serve a model over HTTP with OpenAI's API.")
    add_model(parser)
    add_config_flags(parser, EngineConfig, ServerConfig, ModelSettings)
    return parser


def settings(parser: Parser, argv: list[str]) -> Configs:
    """What a command line comes to; see ``parse``."""
    values = parser.parse(argv)
    derived = partial(_derived, argv)
    return configs_of(values, EngineConfig, ServerConfig, ModelSettings, model=values.positional_model, derived=derived)


def _derived(argv: Sequence[str], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What mpiexec or srun says, where one of them has started this process, and the manners and the NUMA nodes of
    candle-vLLM, where its flags and its environment variable have."""
    bound, numa = candle_vllm.mapped_nodes(given, os.environ)
    launched, note = launched_settings({**given, **bound})
    manners, noted = candle_vllm.manners(argv, given)
    for line in (numa, note, noted):
        if line:
            print(f"llmjax: note: {line}", file=sys.stderr)
    return {**bound, **launched, **manners}
