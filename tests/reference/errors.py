"""docs/reference/errors.md, written from the table of codes and from the places that raise."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getdoc

from llmjax import errors
from llmjax.serve.error_codes import ERROR_CODES
from tests.import_graph import modules
from tests.reference.markdown import cell

HEAD = """# Errors

```console
$ curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hi", "temperatur": 0}'
```

A request that fails gets `{"error": {"message": …, "type": …, "param": …, "code": …}}`: `code` is one of those
below, `param` the field at fault, and `message` says in a line what is wrong with it. At `/v1/messages` errors
have Anthropic's form. A stream that fails ends with such an object as its last event. Where trying again makes
sense, the header `Retry-After` says when. Every answer has `X-Request-Id`, which the server's log has too.
"""
DEFAULTS = {"ApiError": "400", "retry_later": "503", "unsupported": "400", "_error": "none: in the batch"}
REST = {
    "400": "a field contradicts another, or has a value that the message says",
    "404": "there is no such path; the message names a near one where there is one",
    "405": "the path is there, the method is not",
    "408": "an upload did not come whole in time",
    "415": "`Content-Type` is not what the route takes: `application/json`, or `multipart/form-data` for files",
    "500": "a failure of another kind, which the message names",
    "504": "a response in the background took longer than `--request-timeout`",
}
COMMANDS = """## Of commands and of Python

`llmjax` ends with status 1 and one line, `llmjax: error: …`, that says what is wrong and what to do; `--debug`
shows where it was raised. In Python these are exceptions, in `llmjax.errors`:
"""
CLASSES = {  # the class: what to do
    "ConfigError": "correct the setting that the message names: [settings](settings.md)",
    "CheckpointError": "see `llmjax inspect MODEL`; the message names the file, key or tensor: [models](../models.md), "
    "[formats](../formats.md)",
    "TokenizerError": "name another tokenizer or template: `--tokenizer`, `--chat-template`",
    "ChatTemplateError": "correct the template, or leave it to the model's",
    "CompileError": "`llmjax doctor --check-device`; report it with the message",
    "InvalidRequest": "correct the field that `error.field` names",
    "UnknownAdapter": "name an adapter that is loaded",
    "PromptTooLong": "shorten the prompt, or raise `max_model_len`",
    "QueueFull": "wait `error.retry_after` seconds, or raise `max_num_queued_reqs`",
    "Asleep": "call `wake_up`",
    "ModelUnavailable": "wait `retry_after` seconds and ask again; the log says why",
    "GenerationFailed": "send the request again; the log has the reason",
    "EngineDead": "make a new engine; the log has the reason",
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place where an error is made: its code, status and message, with … for what is known at run time alone."""

    code: str | None
    status: str
    message: str


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *_codes(), *_rest(), COMMANDS, *_classes()])


def sites() -> list[Site]:
    """All places in the server that make an error of the API."""
    return [
        site
        for name, path in modules().items()
        if name.startswith("llmjax.serve")
        for site in _sites(ast.parse(path.read_text()))
    ]


def _sites(tree: ast.Module) -> Iterator[Site]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in DEFAULTS:
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        message = _text(call.args[0]) if call.args and call.func.id != "unsupported" else ""
        codes: list[str | None] = [None]
        if "code" in given:
            codes = [node.value for node in ast.walk(given["code"]) if isinstance(node, ast.Constant)]
        elif call.func.id == "unsupported":
            codes = ["unsupported_parameter"]
        status = DEFAULTS[call.func.id]
        if "status" in given:
            numbers = [node.value for node in ast.walk(given["status"]) if isinstance(node, ast.Constant)]
            status = str(numbers[0]) if numbers else ""
        for code in codes:
            yield Site(code=code, status=status, message=message)


def _text(node: ast.expr) -> str:
    """The message that an expression makes; "" where it is not written there."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def _codes() -> Iterator[str]:
    found: dict[str | None, list[Site]] = defaultdict(list)
    for site in sites():
        found[site.code].append(site)
    yield "## By `error.code`\n"
    for code, known in sorted(ERROR_CODES.items()):
        statuses = sorted({site.status for site in found[code] if site.status}) or ["500, 507"]
        yield f"### `{code}`\n"
        yield f"**{', '.join(statuses)}**: {known.cause}.\n"
        yield f"*What to do*: {known.cure}.\n"
        messages = sorted({site.message for site in found[code] if site.message.strip("…`: ")})
        if messages:
            yield "Messages: " + " · ".join(f"“{cell(message)}”" for message in messages) + "\n"


def _rest() -> Iterator[str]:
    yield "## Without a code, by status\n\n| status | cause |\n|---|---|"
    yield from (f"| {status} | {cause} |" for status, cause in REST.items())
    yield ""


def _classes() -> Iterator[str]:
    yield "| exception | cause | what to do |\n|---|---|---|"
    for name, cure in CLASSES.items():
        cause = (getdoc(getattr(errors, name)) or "").partition("\n\n")[0]
        yield f"| `{name}` | {cell(cause)} | {cure} |"
    yield ""
