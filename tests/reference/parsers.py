"""docs/reference/parsers.md, written from the families of tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmjax.parsing.choice import HARMONY, REASONING_ALIASES, TOOL_ALIASES, UNREAD
from llmjax.parsing.families import JSON_LIST, TOOLS
from llmjax.parsing.reasoning import REASONING

HEAD = """# Parsers

```console
$ llmjax serve Qwen/Qwen3-8B --tool-call-parser hermes --reasoning-parser think
```

How a model writes calls of tools and reasoning is told from its chat template (`auto`, the default). Where that
is wrong, a name says it; `none` leaves the text as it is. [Tools and reasoning](../tools.md) says what becomes of
it.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *_tools(), *_reasoning(), *_unread()])


def _others(name: str, aliases: Mapping[str, str]) -> str:
    return ", ".join(f"`{other}`" for other, known in aliases.items() if known == name)


def _tools() -> Iterator[str]:
    yield "## `--tool-call-parser`\n\n| name | also | a call begins with |\n|---|---|---|"
    for name, grammar in sorted(TOOLS.items()):
        if name != JSON_LIST:
            edges = {} if "content" not in grammar.states else grammar.states["content"].edges
            first = (
                " ".join(_marker(marker) for marker in edges)
                if name != HARMONY
                else _marker("<|channel|>commentary to=functions.")
            )
            yield f"| `{name}` | {_others(name, TOOL_ALIASES)} | {first} |"
    yield ""


def _reasoning() -> Iterator[str]:
    yield "## `--reasoning-parser`\n\n| name | also | reasoning stands between |\n|---|---|---|"
    marks = {name: (family.start, family.end) for name, family in REASONING.items()}
    marks[HARMONY] = ("<|channel|>analysis<|message|>", "<|end|>")
    for name, (start, end) in sorted(marks.items()):
        yield f"| `{name}` | {_others(name, REASONING_ALIASES)} | {_marker(start)} {_marker(end)} |"
    yield ""


def _unread() -> Iterator[str]:
    yield "## Names of vLLM's that are refused\n\n| name | vLLM's parser | nearest |\n|---|---|---|"
    yield from (f"| `{name}` | {does} | `{near}` |" for name, (near, does) in sorted(UNREAD.items()))
    yield ""


def _marker(text: str) -> str:
    """A marker as it may stand in a table."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|").replace("\n", "⏎")
