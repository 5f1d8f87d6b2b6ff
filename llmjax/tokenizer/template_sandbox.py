"""A Jinja environment for templates that nobody has read: they come with models and in requests.

Jinja's immutable sandbox keeps a template away from Python's internals, but not from using up time and memory. So
every operation that can make a value much larger than its inputs is measured before it runs, every call and loop
round looks at the clock, and what one rendering makes in all is counted.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from llmjax.errors import InvalidRequest, TokenizerError

MAX_SECONDS = 1.5
MAX_OUTPUT = 4 * 2**20  # characters of one value, and of the result
MAX_TOTAL = 2**29  # characters made in one rendering
ENTRY = 16  # an entry of a list counts as so many characters
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 1000  # padding, indentation, digits

# Filters and string methods that make long things out of short ones, and that no chat template needs.
_NO_FILTERS = frozenset(
    [
        "center",
        "lipsum",
        "urlize",
        "wordwrap",
        "xmlattr",
        "pprint",
        "batch",
        "slice",
        "filesizeformat",
        "random",
        "forceescape",
        "wordcount",
        "striptags",
    ]
)
_NO_METHODS = frozenset(
    [
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "translate",
        "format_map",
        "to_bytes",
        "__mul__",
        "__mod__",
        "__format__",
    ]
)
# A width of four digits or one given by an argument, in %-formats and in {}-fields ({{ is a brace).
_FIELD = r"(?<!\{)(?:\{\{)*\{(?!\{)[^{}]*:[^{}]*"
_WIDE_FORMAT = re.compile(rf"%[^a-zA-Z%(]*(?:\d{{4,}}|\*)|%\(.*\d{{4,}}|{_FIELD}(?:\d{{4,}}|\{{)", re.DOTALL)


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.left = MAX_TOTAL

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise TokenizerError(f"chat template: took more than {MAX_SECONDS} s")

    def spend(self, amount: int) -> None:
        self.tick()
        self.left -= amount
        if amount > MAX_OUTPUT or self.left < 0:
            raise TokenizerError(f"chat template: makes more than {MAX_OUTPUT} characters")


_budget: ContextVar[_Budget] = ContextVar("template budget")


def _length(value: Any) -> int:
    """How long a value is written out, counted no further than the limit."""
    total, stack = 0, [value]
    while stack and total <= MAX_OUTPUT:
        item = stack.pop()
        total += ENTRY
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(chain.from_iterable(item.items()))
        elif isinstance(item, list | tuple | set | frozenset):
            total += len(item)
            stack.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
    return total


def _measured(value: Any) -> Any:
    """``value``, after its size has been charged."""
    _budget.get().spend(_length(value))
    return value


def _made(value: Any) -> Any:
    """``value``, just made by an operation: the outermost size alone is new."""
    if isinstance(value, int):
        if value.bit_length() > MAX_NUMBER_BITS:
            raise TokenizerError(f"chat template: makes a number of more than {MAX_NUMBER_BITS} bits")
    elif isinstance(value, str | bytes):
        _budget.get().spend(len(value))
    elif isinstance(value, list | tuple | dict | set):
        _budget.get().spend(len(value) * ENTRY)
    else:
        _budget.get().tick()
    return value


def _check_amplification(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse, before it runs, what would make something huge: ``args[0]`` is the value worked on."""
    value, values = args[0] if args else None, [*args[1:], *kwargs.values()]
    if name == "replace" and isinstance(value, str) and len(values) >= 2:
        old, new = str(values[0]), str(values[1])
        _budget.get().spend(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
    elif name == "join":
        # As a method the separator is the value, as a filter the sequence is.
        parts, separator = (
            (values[0] if values else (), value)
            if isinstance(value, str) and values
            else (value, values[0] if values else "")
        )
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            _budget.get().spend(len(parts) * len(str(separator)) + _length(parts))
    elif name in ("format", "strftime") and _WIDE_FORMAT.search(str(value)):
        raise TokenizerError("chat template: a format with a width of more than 3 digits")
    elif name in ("string", "tojson", "escape", "e", "format", "sum", "upper", "lower", "title"):
        _measured(value)
        if name == "format":
            _measured(values)
    elif name == "list" and isinstance(value, str):
        _budget.get().spend(len(value) * ENTRY)
    if name in ("indent", "tojson", "round") and any(type(v) is int and abs(v) > MAX_WIDTH for v in values):
        raise TokenizerError(f"chat template: a number of more than {MAX_WIDTH} given to {name}")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Filters may take the context or environment first; those are not values.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_amplification(name, args[skip:], kwargs)
        return _made(function(*args, **kwargs))

    return bounded


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    _budget.get().spend(sum(map(len, parts)))
    return "".join(parts)


def _join_operator(parts: Sequence[Any]) -> str:
    """Jinja's ``~``."""
    _measured(parts)
    return "".join([str(part) for part in parts])


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Hugging Face's ``tojson``: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise InvalidRequest(" ".join(str(message).split()), field="messages")


def _strftime_now(form: str) -> str:
    _check_amplification("strftime", [form], {})
    return datetime.now().strftime(form)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks an assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's template environment with limits."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,  # the optimiser would run constant expressions while compiling, outside any limit
            finalize=_finalize,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, f) for name, f in self.filters.items() if name not in _NO_FILTERS}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "__tick__": lambda: None}
        self.filters |= {"__join__": _join_operator, "__measured__": _measured}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            # Any call looks at the clock, so a call in the body is all a loop needs.
            tick = nodes.Call(nodes.Name("__tick__", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        for compare in template.find_all(nodes.Compare):
            compare.expr = _filtered(compare.expr, "__measured__")
            for operand in compare.ops:
                operand.expr = _filtered(operand.expr, "__measured__")
        _replace_concats(template)
        return template

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict | int):
            name = getattr(obj, "__name__", "")
            if name in _NO_METHODS:
                raise TokenizerError(f"chat template: the method {name} is not allowed")
            _check_amplification(name, [owner, *args], kwargs)
        elif getattr(obj, "__name__", "") == "format":
            # The sandbox has put a safe str.format in the place of the method.
            _check_amplification("format", [_format_source(obj), *args], kwargs)
        return _made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TokenizerError("chat template: ** is not allowed")
        if operator == "*":
            count = next((v for v in (left, right) if isinstance(v, int)), 1)
            other = right if count is left else left
            if isinstance(other, str | bytes | list | tuple):
                _budget.get().spend(len(other) * max(count, 0) * (1 if isinstance(other, str | bytes) else ENTRY))
        if operator == "%" and isinstance(left, str | bytes):
            _check_amplification("format", [left, right], {})
            _measured(right)
        return _made(super().call_binop(context, operator, left, right))

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        # Called once an element by map, select and their like.
        _budget.get().tick()
        return super().call_filter(*args, **kwargs)

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        return super().call_test(*args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)


def _format_source(method: Any) -> Any:
    """The string whose ``format`` the sandbox wraps."""
    return next((cell.cell_contents for cell in method.__closure__ or () if isinstance(cell.cell_contents, str)), "")


def _finalize(value: Any) -> Any:
    """``{{ value }}``: charge what is about to be turned into a string."""
    return value if isinstance(value, str) else _measured(value)


def _filtered(expression: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


def _replace_concats(node: nodes.Node) -> None:
    """Every ``a ~ b`` becomes a filter that counts."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_without_concat(item) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concats(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.Tuple(list(value.nodes), "load", lineno=value.lineno), "__join__")
    return value


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render within the limits.

    Raises:
        InvalidRequest: the template called ``raise_exception``.
        TokenizerError: a limit was passed or the template failed.
    """
    budget = _Budget()
    token = _budget.set(budget)
    chunks: list[str] = []
    size = 0
    try:
        for chunk in template.generate(**variables):
            size += len(chunk)
            if size > MAX_OUTPUT:
                raise TokenizerError(f"chat template: makes more than {MAX_OUTPUT} characters")
            budget.tick()
            chunks.append(chunk)
    except (TokenizerError, InvalidRequest):
        raise
    except jinja2.TemplateError as error:
        raise TokenizerError(f"chat template: {_one_line(error)}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
        raise TokenizerError(f"chat template: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        _budget.reset(token)
    return "".join(chunks)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
