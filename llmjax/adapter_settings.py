"""The adapters that settings name: ``lora_modules``, as vLLM has them, and ``lora`` and ``lora_scaled``, as
llama-server has them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmjax.errors import ConfigError

KEYS = ("name", "path", "base_model_name")
UNUSED_KEYS = frozenset({"is_3d_lora_weight"})  # of vLLM's: a file says it itself


@dataclass(frozen=True, kw_only=True)
class AdapterModule:
    """An adapter that requests may name from the start.

    Args:
        base: the name of the model that it is said to be for; None: the model's own.
    """

    name: str
    path: str
    base: str | None = None

    @classmethod
    def of(cls, text: str) -> AdapterModule:
        """From ``name=path``, or vLLM's JSON form; raises ConfigError."""
        if not text.lstrip().startswith("{"):
            name, equals, path = text.partition("=")
            if not name or not equals or not path:
                raise ConfigError(f"lora_modules must be name=path, or a JSON object with name and path, not {text!r}")
            return cls(name=name, path=path)
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"lora_modules: {text!r} is not JSON ({error})") from None
        if other := next((key for key in given if key not in KEYS and key not in UNUSED_KEYS), None):
            raise ConfigError(f"lora_modules: unknown key {other!r}; it has {', '.join(KEYS)}")
        values = [given.get(key) for key in KEYS]
        for key, value in zip(KEYS, values, strict=True):
            if not (isinstance(value, str) and value) and not (key == KEYS[-1] and value is None):
                raise ConfigError(f"lora_modules: {key} must be a string that is not empty, not {value!r}")
        return cls(name=given["name"], path=given["path"], base=given.get("base_model_name"))


@dataclass(frozen=True, kw_only=True)
class FixedAdapter:
    """An adapter that requests get that name none, with its factor."""

    path: str
    scale: float


def modules_of(items: Sequence[str]) -> tuple[AdapterModule, ...]:
    """The parsed ``lora_modules``; raises ConfigError, also if two have the same name."""
    modules = tuple(AdapterModule.of(item) for item in items)
    names = [module.name for module in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"lora_modules names {twice!r} twice")
    return modules


def fixed_of(plain: Sequence[str], scaled: Sequence[str], *, applied: bool) -> tuple[FixedAdapter, ...]:
    """The adapters of ``lora`` and of ``lora_scaled``, in this order; raises ConfigError.

    Args:
        applied: whether they have their factors from the start, and not 0.
    """
    found = [FixedAdapter(path=path, scale=1.0 if applied else 0.0) for path in plain]
    for item in scaled:
        path, colon, text = item.rpartition(":")
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not path or not colon or not math.isfinite(scale):
            raise ConfigError(f"lora_scaled must be path:factor, not {item!r}")
        found.append(FixedAdapter(path=path, scale=scale if applied else 0.0))
    return tuple(found)
