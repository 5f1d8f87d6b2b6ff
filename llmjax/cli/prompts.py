"""The prompts of a command: arguments, a file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError
from llmjax.text_file import read_text

TextOrIds = str | list[int]


def read_prompts(arguments: Sequence[str], *, file: str | None, lines: bool) -> list[TextOrIds]:
    """The prompts to continue.

    Args:
        arguments: prompts given on the command line.
        file: where prompts are: one a line in a ``.jsonl`` file, else the whole text is one; "-": standard input.
        lines: every line of the text that is not blank is a prompt.

    Raises:
        ConfigError: there is no prompt, there are two sources, or the file is malformed.
    """
    if arguments and (file is not None or lines):
        raise ConfigError("prompts come from arguments or from a file, not from both")
    if arguments:
        return list(arguments)
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, with --file, or on standard input")
    source = "standard input" if file in (None, "-") else str(file)
    text = _read(None if file in (None, "-") else Path(str(file)))
    if source.endswith(".jsonl"):
        prompts = [_parse(line, f"{source}:{i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    elif lines:
        prompts = [line for line in text.splitlines() if line.strip()]
    else:
        # Editors and echo end a text with a newline that nobody meant as part of the prompt.
        prompts = [text.removesuffix("\n")] if text.strip() else []
    if not prompts:
        raise ConfigError(f"{source}: no prompt in it")
    return prompts


def _read(path: Path | None) -> str:
    if path is not None:
        return read_text(path, name=f"--file: {path}")
    try:
        return sys.stdin.read()
    except OSError as error:
        raise ConfigError(f"standard input: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: is not UTF-8 text ({error.reason})") from None


def _parse(line: str, where: str) -> TextOrIds:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from None
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or len({"prompt", "prompt_token_ids"} & row.keys()) != 1:
        raise ConfigError(f'{where}: expected a text, {{"prompt": …}} or {{"prompt_token_ids": [...]}}')
    prompt = row["prompt"] if "prompt" in row else row["prompt_token_ids"]
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return list(prompt)
    if isinstance(prompt, str) and "prompt" in row:
        return prompt
    raise ConfigError(f"{where}: a prompt is a text or a list of token ids")
