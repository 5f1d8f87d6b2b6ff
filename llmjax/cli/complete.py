"""``llmjax complete``: texts in the terminal, which a running server continues."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Any

from llmjax.bench.client import OpenAIClient
from llmjax.cli.chat import NOT_IN_CHAT
from llmjax.cli.models import KEY_VARIABLE, RemoteModel, key_for_server
from llmjax.cli.parser import Parser
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.errors import LLMJaxError

URL = "http://localhost:8000"


def main(argv: list[str]) -> int:
    """Continues texts until the input ends.

    Raises:
        LLMJaxError: a value is wrong, the server cannot be reached, or it refuses the text of --quick.
    """
    sampling = sampling_settings(without=NOT_IN_CHAT, max_tokens=None)
    parser = Parser(prog="llmjax complete", description="Have a running server continue texts, in the terminal.")
    parser.add_argument("--url", default=URL, help=f"address of the server (default: {URL})")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask for (default: the first that it lists)")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {KEY_VARIABLE})")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue this text, and leave")
    add_sampling_flags(parser, sampling)
    values = parser.parse(argv)
    with asyncio.Runner() as runner:
        model = runner.run(_connect(values.url, values.api_key, values.model_name, given_sampling(values, sampling)))
        try:
            if values.quick is not None:
                runner.run(_show(model, values.quick))
            else:
                _converse(model, runner)
        finally:
            runner.run(model.close())
    return 0


async def _connect(url: str, key: str | None, name: str | None, sampling: dict[str, Any]) -> RemoteModel:
    client = OpenAIClient(url, api_key=key_for_server(key))
    try:
        return RemoteModel(client, name or await client.first_model(), sampling)
    except LLMJaxError:
        await client.close()
        raise


def _converse(model: RemoteModel, runner: asyncio.Runner) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{model.name}: a line is a text to continue; Ctrl-C stops an answer, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            text = input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not text:
            continue
        try:
            runner.run(_show(model, text))
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
        except LLMJaxError as error:
            print(f"llmjax: error: {error}", file=sys.stderr)


async def _show(model: RemoteModel, text: str) -> None:
    async with aclosing(model.continued(text)) as pieces:
        async for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
