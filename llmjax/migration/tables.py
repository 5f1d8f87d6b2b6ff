"""All tables together, and how keyword arguments and YAML files are read by them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmjax.migration import candle_vllm, llama_server, vllm
from llmjax.migration.answers import ForeignFlag, merge
from llmjax.settings import Setting, collect, spellings

PROGRAMS: Mapping[str, tuple[ForeignFlag, ...]] = MappingProxyType(
    {"vLLM": vllm.FLAGS, "candle-vLLM": candle_vllm.FLAGS, "llama-server": llama_server.FLAGS}
)

FLAGS: tuple[ForeignFlag, ...] = tuple(flag for flags in PROGRAMS.values() for flag in flags)

_BY_NAME = {name: flag for flag in reversed(FLAGS) if not flag.ours for name in flag.names}


def collect_known(
    settings: Mapping[str, Setting], values: Mapping[str, Any], *, source: str
) -> tuple[dict[str, Any], list[str]]:
    """Checked values by field name, from a mapping that may use other programs' names too.

    Args:
        settings: ours, by name.
        source: where the mapping comes from, for errors.

    Returns:
        The values, and lines to print.

    Raises:
        ConfigError: see ``llmjax.settings.collect`` and ``ForeignFlag.answer``.
    """
    known = spellings(settings.values())
    own: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    notes = []
    for key, value in values.items():
        name = key.replace("-", "_") if isinstance(key, str) else ""
        flag = None if name in known else _BY_NAME.get(name)
        if flag is None:
            own[key] = value
            continue
        answer = flag.answer(value, source=f"{source}: {key}", settings=settings)
        merge(foreign, answer.values)
        if answer.note:
            notes.append(answer.note)
    collected = collect(settings.values(), own, source=source)
    merge(collected, foreign)
    return collected, notes
