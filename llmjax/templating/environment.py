"""The Jinja environment that published chat templates are written for: the one of Hugging Face's transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from llmjax.errors import InvalidRequest


def chat_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja's immutable sandbox with every filter and test of Jinja, and with what transformers adds or replaces.

    The sandbox keeps a template away from Python's internals and from changing what it was given. It bounds neither
    time nor memory; the process does.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks an assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own has a scope of its own: what is set inside is not seen after it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Any) -> str:
        text: str = caller()
        return text


class _Dict:
    """``dict`` without the attributes of the type, among which are its subclasses."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """``namespace(…)``, which stores no name with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name for self, so that a template may use that one
        self, *values = args
        for name in dict(*values, **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *values, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace stores no name with a leading underscore: {name[:80]!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """``tojson`` without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise InvalidRequest(" ".join(str(message).split()), field="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
