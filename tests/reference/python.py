"""docs/reference/python.md, written from the docstrings of what `import llmjax` offers."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any

import llmjax
from tests.reference.markdown import cell

HEAD = """# Python

```python
from llmjax import LLM, SamplingParams

print(LLM().generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)
```

All that `import llmjax` offers, from its docstrings. Names and arguments are those of vLLM where vLLM has the
same. Settings are [on a page of their own](settings.md), errors [on
another](errors.md#of-commands-and-of-python).
"""
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\s*$", re.MULTILINE)
CONFIGS = ("EngineConfig", "ServerConfig")


def page() -> str:
    """The page as Markdown."""
    names = sorted((name for name in llmjax.__all__ if not name.startswith("_")), key=_order)
    return "\n".join([HEAD, *(line for name in names for line in _entry(name, getattr(llmjax, name)))])


def _order(name: str) -> tuple[int, str]:
    first = ("LLM", "AsyncLLM", "generate", "quantize", "SamplingParams")
    return (first.index(name), "") if name in first else (len(first), name)


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if not inspect.isclass(thing):
        yield f"```py\n{_signature(name, thing)}\n```\n"
        yield _told(thing)
        return
    if "__init__" in vars(thing) and not dataclasses.is_dataclass(thing):
        yield f"```py\n{_signature(name, thing.__init__)}\n```\n"
    yield _told(thing)
    if name in CONFIGS:
        yield "Its fields are [settings](settings.md).\n"
    elif issubclass(thing, enum.Enum):
        yield "\n".join(f"* `{member.name}`" for member in thing) + "\n"
    elif dataclasses.is_dataclass(thing):
        yield "| field | type | default |\n|---|---|---|"
        yield from map(_field, dataclasses.fields(thing))
        yield ""
    for method, value in _methods(thing):
        yield f"### {name}.{method}\n"
        yield f"```py\n{_signature(method, value)}\n```\n"
        yield _told(value)


def _methods(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and class methods that are written for the class or its own bases, in their order."""
    for name in dict.fromkeys(name for base in thing.__mro__ for name in vars(base)):
        value = inspect.getattr_static(thing, name)
        made = isinstance(value, classmethod | staticmethod) or inspect.isfunction(value)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if made and not name.startswith("_") and function.__module__.startswith("llmjax.") and function.__doc__:
            yield name, function


def _field(field: dataclasses.Field[Any]) -> str:
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    default = "" if field.default is dataclasses.MISSING else f"`{_value(field.default)}`"
    return f"| `{field.name}` | `{cell(kind)}` | {default} |"


def _value(value: Any) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def _signature(name: str, function: Any) -> str:
    """The signature, an argument a line where it is long."""
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    text = f"{name}{signature.replace(parameters=kept)}".replace("'", "")
    if len(text) <= 100:
        return text
    inside: list[str] = []
    star = False
    for parameter in kept:
        star_now = parameter.kind is parameter.KEYWORD_ONLY
        if star_now and not star and not any(one.kind is one.VAR_POSITIONAL for one in kept):
            inside.append("*")
        star = star_now
        inside.append(str(parameter).replace("'", ""))
    end = (
        "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}".replace("'", "")
    )
    return "\n".join([f"{name}(", *(f"    {line}," for line in inside), f"){end}"])


def _told(thing: Any) -> str:
    """A docstring as Markdown: its sections become lists."""
    text = inspect.getdoc(thing) or ""
    if thing.__doc__ is None or text.startswith(f"{getattr(thing, '__name__', '')}("):  # made by dataclasses
        return ""
    parts = SECTION.split(text)
    done = [_plain(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        done.append(f"**{title}**\n")
        done.append(_plain(body) if title in ("Returns", "Yields") else _items(body))
    return "\n".join(done)


def _items(body: str) -> str:
    """Items of a section, each ``name: meaning``, whose further lines stand further in."""
    items: list[str] = []
    rest = ""
    for line in inspect.cleandoc(body).splitlines():
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif re.match(r"[\w*`, .]+:", line):
            items.append(line)
        else:
            rest += f"{line}\n"
    listed = [re.sub(r"^([\w*`, .]+):", lambda match: f"* `{match[1].strip('`')}`:", item) for item in items]
    return _plain("\n".join(listed)) + (_plain(rest) if rest.strip() else "")


def _plain(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text)) + "\n"
