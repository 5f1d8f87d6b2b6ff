"""The tools that a tool server lists: all pages of them, and whether a model can be offered those that are allowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from llmjax.errors import ConfigError
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.tools import checked_tools

MAX_PAGES = 100
MAX_SHOWN = 20  # names in a message
MAX_MESSAGE = 200  # characters of the validator's


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool as its server describes it.

    Args:
        schema: the JSON schema of its arguments.
        annotations: hints such as ``readOnlyHint``; None: there are none.
    """

    name: str
    description: str | None
    schema: dict[str, Any]
    annotations: dict[str, Any] | None

    @property
    def read_only(self) -> bool:
        """Whether its server says that it changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))

    def listed(self) -> dict[str, Any]:
        """The tool as ``mcp_list_tools`` items have it."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": self.schema,
            "annotations": self.annotations,
        }


async def listed_tools(client: Any) -> list[Tool]:
    """All tools of a server.

    Args:
        client: the SDK's.

    Raises:
        ConnectionError: the list does not end.
    """
    found: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [_read(tool) for tool in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return found
    raise ConnectionError(f"its list of tools has more than {MAX_PAGES} pages")


def _read(tool: Any) -> Tool:
    notes = tool.annotations
    annotations = None if notes is None else notes.model_dump(mode="json", by_alias=True, exclude_none=True)
    return Tool(name=tool.name, description=tool.description, schema=tool.input_schema, annotations=annotations)


def chosen_tools(tools: Sequence[Tool], allowed: Collection[str], *, where: str) -> tuple[Tool, ...]:
    """The tools that may be called, in the order of their names in the configuration.

    Args:
        tools: all that the server has.
        allowed: names of the configuration.
        where: which server it is, for errors.

    Raises:
        ConfigError: one is not there, is there twice, or is described in a way that no model can be told.
    """
    names = [tool.name for tool in tools]
    if missing := [name for name in allowed if name not in names]:
        has = ", ".join(sorted(names)[:MAX_SHOWN]) or "none"
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        raise ConfigError(f"{where} has no tool {missing[0]!r}; it has {has}{more}")
    if twice := [name for name in allowed if names.count(name) > 1]:
        raise ConfigError(f"{where} has two tools called {twice[0]!r}")
    by_name = {tool.name: tool for tool in tools}
    chosen = tuple(by_name[name] for name in dict.fromkeys(allowed))
    for tool in chosen:
        if problem := _problem(tool):
            raise ConfigError(f"{where}: its tool {tool.name!r} cannot be offered to a model: {problem}")
    return chosen


def _problem(tool: Tool) -> str:
    """What is wrong with a tool's description; empty: nothing."""
    from jsonschema.exceptions import SchemaError  # the SDK has it
    from jsonschema.validators import validator_for

    function = {"name": tool.name, "parameters": tool.schema}
    try:
        orjson.dumps(tool.listed())
        checked_tools([{"type": "function", "function": function}])
        validator_for(tool.schema).check_schema(tool.schema)
    except TypeError as error:  # such as half of a character
        return str(error)
    except ApiError as error:
        return error.message.replace("`tools.0.function", "`tool")
    except SchemaError as error:
        return f"its schema is not valid at {error.json_path}: {error.message[:MAX_MESSAGE]}"
    return ""
