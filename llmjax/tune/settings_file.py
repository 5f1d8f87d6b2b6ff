"""The YAML file of tuned settings, which ``llmjax serve --config`` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from llmjax.config import EngineConfig

SECRET = frozenset({"hf_token", "master_secret"})  # never written to a file that people pass on


def text_of(config: EngineConfig, *, about: Sequence[str], why: Mapping[str, str]) -> str:
    """The file.

    Args:
        config: all settings; those that differ from their defaults are written, but for secrets.
        about: lines of comment at its beginning.
        why: comments by the name of a setting.
    """
    default = dataclasses.asdict(EngineConfig())
    changed = {name: value for name, value in dataclasses.asdict(config).items() if value != default[name]}
    lines = [f"# {line}" for line in about]
    for name, value in changed.items():
        if name not in SECRET:
            lines += [f"# {why[name]}"] if name in why else []
            lines.append(_entry(name, value))
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> str:
    if isinstance(value, tuple | list | dict):
        flow = yaml.safe_dump(value if isinstance(value, dict) else list(value), default_flow_style=True, width=1000)
        return f"{name}: {flow.strip()}"
    return yaml.safe_dump({name: value}, width=1000, allow_unicode=True).strip()
