"""``llmjax generate``: continue prompts, streaming one to the terminal or writing many as JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmjax.cli.models import LocalModel, Message, user_message
from llmjax.cli.parser import Parser, add_config_flags, configs_of
from llmjax.cli.prompts import TextOrIds, read_prompts
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llmjax.engine.front.requests import PromptInput

DEFAULT_MAX_TOKENS = 256


def main(argv: list[str]) -> int:
    """Continues the prompts.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be loaded, or a prompt cannot be served.
    """
    sampling = sampling_settings(max_tokens=DEFAULT_MAX_TOKENS)
    parser = Parser(prog="llmjax generate", description="Continue prompts from arguments, a file or standard input.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; none: read --file or standard input")
    parser.add_argument(
        "--file",
        help='file with a prompt, or a .jsonl file whose lines are texts, {"prompt": …} or {"prompt_token_ids": […]}',
    )
    parser.add_argument("--lines", action="store_true", help="each line of the file or standard input is a prompt")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a chat message, to be answered")
    parser.add_argument("--system", metavar="TEXT", help="system message for --chat")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="picture before each message of --chat, for models that see; may be given more than once",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object per prompt")
    add_sampling_flags(parser, sampling)
    add_config_flags(parser)
    values = parser.parse(argv)
    if values.system is not None and not values.chat:
        raise ConfigError("--system goes with --chat")
    if values.image and not values.chat:
        raise ConfigError("--image goes with --chat")
    prompts = read_prompts(values.prompts, file=values.file, lines=values.lines)
    sampling_given = given_sampling(values, sampling)
    defaults = {name: setting.default for name, setting in sampling.items()}
    SamplingParams(**defaults | sampling_given)  # wrong values are refused before the model is loaded
    config = configs_of(values).engine
    if (
        len(prompts) == 1
        and not values.json
        and sampling_given.get("n", 1) == 1
        and sampling_given.get("detokenize", True)
    ):
        asyncio.run(_stream(prompts[0], LocalModel(config, sampling_given, defaults), values))
    else:
        outputs = _batch(prompts, config, sampling_given, defaults, values)
        return int(any(output.error is not None for output in outputs))
    return 0


async def _stream(prompt: TextOrIds, model: LocalModel, values: argparse.Namespace) -> None:
    try:
        if values.chat:
            asked: PromptInput = model.chat_prompt(_messages(prompt, values.system, values.image))
        else:
            asked = prompt
        async for piece in model.continued(asked):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
    finally:
        await model.close()


def _batch(
    prompts: list[TextOrIds],
    config: EngineConfig,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    values: argparse.Namespace,
) -> list[RequestOutput]:
    from llmjax import LLM

    llm = LLM.from_config(config)
    progress = sys.stdout.isatty() and not values.json  # it is drawn on standard output
    params = SamplingParams(**{**defaults, **llm.default_sampling_params, **given})
    if values.chat:
        asked = [_messages(prompt, values.system, values.image) for prompt in prompts]
        outputs = llm.chat(asked, params, use_tqdm=progress)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=progress)
    for number, output in enumerate(outputs):
        if values.json:
            print(json.dumps(json_of(output), ensure_ascii=False))
        else:
            _show(number, output)
    return outputs


def json_of(output: RequestOutput) -> dict[str, Any]:
    """A request's output as plain JSON values; timings are left out, they differ from run to run."""
    fields = dataclasses.asdict(dataclasses.replace(output, metrics=None, error=None))
    del fields["metrics"], fields["finished"], fields["error"]
    return fields if output.error is None else {**fields, "error": str(output.error)}


def _show(number: int, output: RequestOutput) -> None:
    for completion in output.outputs:
        part = f".{completion.index + 1}" if len(output.outputs) > 1 else ""
        print(f"[{number + 1}{part}] {completion.text or completion.token_ids}")


def _messages(prompt: TextOrIds, system: str | None, pictures: Sequence[str]) -> list[Message]:
    if not isinstance(prompt, str):
        raise ConfigError("--chat needs texts: a prompt of token ids is not a message")
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*head, user_message(prompt, pictures)]
