"""``llmjax chat``: a conversation in the terminal, with an engine in this process or a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from llmjax.cli.conversation import Chat, read_tools
from llmjax.cli.models import KEY_VARIABLE, ChatModel, ChatOptions, LocalModel, RemoteModel, key_for_server
from llmjax.cli.parser import Parser, add_config_flags, add_model, configs_of
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.migration.candle_vllm import CHAT
from llmjax.settings import settings_of

# One answer of text is shown: several, and what goes with none of it, have no flags here.
NOT_IN_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize")


def main(argv: list[str]) -> int:
    """Talks until /exit or the end of the input.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be loaded or the server not reached.
    """
    sampling = sampling_settings(without=NOT_IN_CHAT, max_tokens=None)
    parser = Parser(prog="llmjax chat", description="Talk to a model in the terminal.")
    add_model(parser)
    parser.add_argument("--url", help="talk to this server instead of an engine in this process")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {KEY_VARIABLE})")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask the server for (default: its first one)")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="picture for the first message, for models that see; may be given more than once",
    )
    parser.add_argument(
        "--tools", metavar="FILE", help="JSON file of functions that the model may call (OpenAI's form)"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="have a model that reasons do so, or not (default: as its chat template does)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="talk to the server on this port of this machine: --url http://localhost:N",
    )
    parser.add_argument("--quick", metavar="TEXT", help="send this message, show the answer, and leave")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a line on each answer's length and speed (default: not with --quick)",
    )
    parser.add_argument(
        "--markdown",
        "--live",
        action=argparse.BooleanOptionalAction,
        default=sys.stdout.isatty(),
        help="render Markdown (default: only in a terminal)",
    )
    add_sampling_flags(parser, sampling)
    add_config_flags(parser, rows=CHAT)
    values = parser.parse(argv)
    sampling_given = given_sampling(values, sampling)
    if values.port is not None:
        if values.url is not None:
            raise ConfigError("the server is given twice: --url and --port")
        values.url = f"http://localhost:{values.port}"
    options = ChatOptions(tools=read_tools(values.tools) if values.tools else (), thinking=values.thinking)
    # One event loop for the whole conversation: the engine's requests belong to it.
    with asyncio.Runner() as runner:
        if values.url is None:
            for flag, value in (("--api-key", values.api_key), ("--model-name", values.model_name)):
                if value is not None:
                    raise ConfigError(f"{flag} is for a server: give --url too")
            defaults = {name: setting.default for name, setting in sampling.items()}
            model: ChatModel = LocalModel(
                configs_of(values, model=values.positional_model).engine, sampling_given, defaults
            )
        else:
            model = runner.run(_connect(values, sampling_given))
        try:
            stats = values.quick is None if values.stats is None else values.stats
            chat = Chat(model, options, system=values.system, markdown=values.markdown, stats=stats)
            for picture in values.image:
                chat.attach(picture)
            if values.quick is None:
                chat.run(runner)
            else:
                chat.quick(values.quick, runner)
        finally:
            runner.run(model.close())
    return 0


async def _connect(values: Any, sampling: dict[str, Any]) -> RemoteModel:
    from llmjax.bench.client import OpenAIClient

    without_effect = [name for name in settings_of(EngineConfig) if hasattr(values, name) and name != "model"]
    if without_effect or values.config is not None:
        flag = "--" + without_effect[0].replace("_", "-") if without_effect else "--config"
        raise ConfigError(f"{flag} has no effect on the server of --url")
    client = OpenAIClient(values.url, api_key=key_for_server(values.api_key))
    named = values.model_name or values.positional_model or getattr(values, "model", None)
    return RemoteModel(client, named or await client.first_model(), sampling)


def _port(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise ConfigError(f"--port must be 1 to 65535, not {text!r}")
    return int(text)
