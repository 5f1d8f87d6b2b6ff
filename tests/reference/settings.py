"""docs/reference/settings.md, written from the settings classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llmjax.config import Alias, EngineConfig, ModelSettings, ServerConfig
from llmjax.settings import Setting, settings_of
from tests.reference.markdown import cell, code

HEAD = """# Settings

```console
$ llmjax serve --help all
$ llmjax serve --config smollm2 --port 8001 --max-model-len 2048
```

A setting is a flag (`--max-model-len 4096`), a key of a YAML file (`max_model_len: 4096`, `--config FILE` or the
name of one of [configs/](../../configs)) and a keyword argument in Python (`LLM(max_model_len=4096)`). A flag
wins over the file, the file over the default; an unknown name is an error that says the nearest one. A switch
`--x` also has `--no-x`. Tokens may be written 8k (8,000) or 8K (8,192), bytes also 4GB or 4GiB. A flag that takes
JSON also takes its keys one by one: `--x.key value`. A list is repeated, or given `a,b,c` where items hold no
commas. Flags of other programs are [known too](../flags.md).
"""
UNITS = {2**10: "KiB", 2**20: "MiB", 2**30: "GiB"}
ABOUT = {
    EngineConfig: "Of `llmjax serve`, of `LLM` and `AsyncLLM`, and of every other command that loads a model.",
    ServerConfig: "Of `llmjax serve` alone.",
    ModelSettings: "Of `llmjax serve` with [several models](../several-models.md), where each may have its own.",
}
TITLES = {EngineConfig: "The engine", ServerConfig: "The server", ModelSettings: "Several models"}


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *_parts()])


def _parts() -> Iterator[str]:
    for cls, about in ABOUT.items():
        yield f"## {TITLES[cls]}\n\n{about}\n"
        section = None
        for setting in settings_of(cls).values():
            if setting.section != section:
                section = setting.section
                if section not in ("server", "several models"):
                    yield f"### {str(section).capitalize()}\n"
            yield from _entry(setting)


def _entry(setting: Setting) -> Iterator[str]:
    yield f"#### `{setting.flag}`\n"
    told = re.sub(r"'(\{.*?\})'", r"`\1`", cell(setting.help))
    yield f"{told[:1].upper()}{told[1:]}.\n"
    facts = [f"value: {accepted(setting)}", f"default: {default(setting)}"]
    if setting.aliases:
        facts.append("also: " + ", ".join(map(_alias, setting.aliases)))
    yield " · ".join(facts) + "\n"


def accepted(setting: Setting) -> str:
    """The values that a setting takes."""
    if setting.kind is bool:
        kind = "on or off"
    elif setting.choices:
        kind = ", ".join(f"`{choice}`" for choice in setting.choices)
    elif setting.kind is dict:
        kind = "JSON object"
    else:
        kind = setting.expected
    limits = "" if setting.limits is None else f", {setting.limits}"
    same: dict[str, list[str]] = {}
    for word, value in setting.words.items():
        if word:
            same.setdefault(code(value), []).append(f"`{word}`")
    words = [f"{', '.join(some)} for {value}" for value, some in same.items()]
    return kind + limits + (f"; {', '.join(words)}" if words else "")


def default(setting: Setting) -> str:
    """The default, in words where the field holds none."""
    value: Any = setting.default
    if setting.name == "model":
        return "SmolLM2-135M-Instruct"
    if value is None:
        return "none"
    if setting.kind is bool:
        return "on" if value else "off"
    if value in ("", (), {}):
        return "empty"
    if setting.unit == "bytes":
        unit = next((size for size in sorted(UNITS, reverse=True) if value % size == 0), None)
        return f"{value:,}" if unit is None else f"{value // unit:,} {UNITS[unit]}"
    if isinstance(value, int | float):
        return f"{value:,}"
    return code(value if isinstance(value, str) else json.dumps(value))


def _alias(alias: Alias) -> str:
    if alias.value is not None:
        return f"`{alias.flag}` for {code(alias.value)}"
    return f"`{alias.flag}`" + (f" in {UNITS[alias.unit]}" if alias.unit != 1 else "")
