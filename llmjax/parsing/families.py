"""How families of models write tool calls. A family is data: where text stops being content, and what follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from llmjax.parsing.grammar import Grammar, Role, State

CONTENT = State(role=Role.CONTENT)
JSON_LIST = "json_list"  # how calls are written that a grammar forces, where a family does not write JSON


def _content(edges: Mapping[str, str], *, kept: Mapping[str, str] | None = None) -> dict[str, State]:
    return {"content": State(role=Role.CONTENT, edges=edges, kept=kept or {})}


def _json(opening: tuple[str, ...], closing: tuple[str, ...] = ()) -> Grammar:
    """Markers around JSON objects that hold name and arguments."""
    edges = dict.fromkeys(opening, "calls")
    return Grammar(
        states={
            **_content(edges),
            "calls": State(role=Role.CALLS, then="after"),
            "after": State(role=Role.BETWEEN, edges={**dict.fromkeys(closing, "content"), **edges}),
        }
    )


def _xml(
    *,
    section: tuple[str, str],
    call: tuple[str, str, str],
    parameter: tuple[str, Mapping[str, str], str],
    wrapped: bool = False,
    bare_calls: bool = False,
) -> Grammar:
    """Elements: a section of calls, in each a name and parameters.

    Args:
        section: its beginning and end.
        call: markers before the name, after it, and at the end.
        parameter: markers before the key, after it (with the state of the value), and at the end.
        bare_calls: calls of the tools that there are may also stand outside of a section.
    """
    edges = {section[0]: "section"} | ({call[0]: "bare name"} if bare_calls else {})
    return Grammar(
        states={
            **_content(edges),
            "section": State(role=Role.BETWEEN, edges={call[0]: "name", section[1]: "content", section[0]: "section"}),
            "name": State(role=Role.NAME, edges={call[1]: "parameters"}),
            "bare name": State(role=Role.NAME, edges={call[1]: "parameters"}, known=True),
            "parameters": State(
                role=Role.PARAMETERS, edges={parameter[0]: "key", call[2]: "section", section[1]: "content"}
            ),
            "key": State(role=Role.KEY, edges=parameter[1]),
            "value": State(role=Role.VALUE, edges={parameter[2]: "parameters"}),
            "string": State(role=Role.VALUE, edges={parameter[2]: "parameters"}, string=True),
        },
        wrapped=wrapped,
    )


def _dsml(section: str, *, space: str = "", name: str = "DSML") -> Grammar:
    """DeepSeek's elements, whose parameters say whether they are strings; ``space`` stands before their names."""
    opening, closing = f"<｜{name}｜{space}", f"</｜{name}｜{space}"
    return _xml(
        section=(f"{opening}{section}>", f"{closing}{section}>"),
        call=(f'{opening}invoke name="', '">', f"{closing}invoke>"),
        parameter=(
            f'{opening}parameter name="',
            {'" string="true">': "string", '" string="false">': "value", '">': "value"},
            f"{closing}parameter>",
        ),
    )


def _pairs(prefix: str = "", *, section: tuple[str, str] | None = None, after_name: str = "") -> Grammar:
    """Elements of a name, and of keys and values in pairs.

    Args:
        prefix: prefix of their names.
        section: markers around the calls.
        after_name: a marker that ends the name, which the first pair ends as well.
    """

    def tag(name: str) -> tuple[str, str]:
        return f"<{prefix}{name}>", f"</{prefix}{name}>"

    call, key, value = tag("tool_call"), tag("arg_key"), tag("arg_value")
    within = {key[0]: "key", call[1]: "after"}
    opening = {call[0]: "name"} if section is None else {section[0]: "after"}
    closing = {} if section is None else {section[1]: "content"}
    return Grammar(
        states={
            **_content(opening),
            "name": State(role=Role.NAME, edges=within | ({after_name: "parameters"} if after_name else {})),
            "key": State(role=Role.KEY, edges={key[1]: "between"}),
            "between": State(role=Role.PARAMETERS, edges={value[0]: "value"}),
            "value": State(role=Role.VALUE, edges={value[1]: "parameters"}),
            "parameters": State(role=Role.PARAMETERS, edges=within),
            "after": State(role=Role.BETWEEN, edges={call[0]: "name", **closing}),
        }
    )


def _python(opening: tuple[str, ...], closing: tuple[str, ...]) -> Grammar:
    """Markers around Python's calls."""
    edges = dict.fromkeys(opening, "calls")
    return Grammar(
        states={
            **_content(edges),
            "calls": State(role=Role.PYTHON, then="after"),
            "after": State(role=Role.BETWEEN, edges={**dict.fromkeys(closing, "content"), **edges}),
        }
    )


def _gemma(opening: str, closing: str, *, quotes: str) -> Grammar:
    return Grammar(
        states={
            **_content({opening: "call"}),
            "call": State(role=Role.BETWEEN, edges={"call:": "name"}),
            "name": State(role=Role.NAME, kept={"{": "arguments"}),
            "arguments": State(role=Role.BARE, then="after"),
            "after": State(role=Role.BETWEEN, edges={closing: "content", opening: "call"}),
        },
        quotes=quotes,
    )


def _unmarked(start: Mapping[str, str], *, kept: Mapping[str, str], role: Role, closing: tuple[str, ...]) -> Grammar:
    """Calls that may be the whole answer, without a marker."""
    return Grammar(
        states={
            **_content(start),
            "start": State(role=Role.START, edges=start, kept=kept),
            "calls": State(role=role, then="after"),
            "after": State(role=Role.BETWEEN, edges={**dict.fromkeys(closing, "content"), **start}),
        },
        initial="start",
        known_tools=True,
    )


_HARMONY_ENDS = {
    "<|end|>": "next",
    "<|return|>": "next",
    "<|call|>": "next",
    "<|start|>": "author",
    "<|channel|>": "header",
}
_MINIMAX = "]<]minimax[>["
_GIGACHAT_CALLS = {"function call<|role_sep|>": "calls", "<|function_call|>": "calls"}


def _plamo(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


def _invoke(section: str) -> Grammar:
    """Elements with names in quotes."""
    return _xml(
        section=(f"<{section}>", f"</{section}>"),
        call=('<invoke name="', '">', "</invoke>"),
        parameter=('<parameter name="', {'">': "value"}, "</parameter>"),
    )


TOOLS: dict[str, Grammar] = {
    "hermes": _json(("<tool_call>",), ("</tool_call>",)),
    "llama3_json": _unmarked(
        {"<|python_tag|>": "calls"}, kept={"{": "calls", "[{": "calls"}, role=Role.CALLS, closing=("<|eom_id|>",)
    ),
    "xlam": _unmarked(
        {"```json": "calls", "[TOOL_CALLS]": "calls", "<tool_call>": "calls"},
        kept={"[": "calls", "{": "calls"},
        role=Role.CALLS,
        closing=("</tool_call>",),
    ),
    JSON_LIST: Grammar(
        states={
            "content": CONTENT,
            "start": State(role=Role.START, kept={"[": "calls"}),
            "calls": State(role=Role.CALLS, then="after"),
            "after": State(role=Role.BETWEEN, kept={"[": "calls"}),
        },
        initial="start",
    ),
    "pythonic": _unmarked({}, kept={"[": "calls"}, role=Role.PYTHON, closing=()),
    "llama4_pythonic": _unmarked(
        {"<|python_start|>": "calls"}, kept={"[": "calls"}, role=Role.PYTHON, closing=("<|python_end|>",)
    ),
    "lfm2": _python(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "olmo3": _python(("<function_calls>",), ("</function_calls>",)),
    "gemma3": _python(("```tool_code",), ()),
    "mistral": Grammar(
        states={
            **_content({"[TOOL_CALLS]": "call"}),
            "call": State(role=Role.BETWEEN, kept={"[": "calls", "{": "calls"}, then="name"),
            "calls": State(role=Role.CALLS, then="after"),
            "name": State(role=Role.NAME, edges={"[ARGS]": "arguments", "[CALL_ID]": "id"}, kept={"{": "arguments"}),
            "id": State(role=Role.ID, edges={"[ARGS]": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(role=Role.BETWEEN, edges={"[TOOL_CALLS]": "call"}),
        },
        short_ids=True,
    ),
    "deepseek_v3": Grammar(
        states={
            **_content({"<｜tool▁calls▁begin｜>": "section"}),
            "section": State(
                role=Role.BETWEEN, edges={"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": "content"}
            ),
            "kind": State(role=Role.PARAMETERS, edges={"<｜tool▁sep｜>": "name"}),
            "name": State(role=Role.NAME, edges={"```json": "arguments"}, kept={"{": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(
                role=Role.BETWEEN, edges={"<｜tool▁call▁end｜>": "section", "<｜tool▁calls▁end｜>": "content"}
            ),
        }
    ),
    "deepseek_v31": Grammar(
        states={
            **_content({"<｜tool▁calls▁begin｜>": "section"}),
            "section": State(
                role=Role.BETWEEN, edges={"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}
            ),
            "name": State(role=Role.NAME, edges={"<｜tool▁sep｜>": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(
                role=Role.BETWEEN, edges={"<｜tool▁call▁end｜>": "section", "<｜tool▁calls▁end｜>": "content"}
            ),
        }
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", space=" "),
    "qwen3_coder": _xml(
        section=("<tool_call>", "</tool_call>"),
        call=("<function=", ">", "</function>"),
        parameter=("<parameter=", {">": "value"}, "</parameter>"),
        wrapped=True,
        bare_calls=True,
    ),
    "seed_oss": _xml(
        section=("<seed:tool_call>", "</seed:tool_call>"),
        call=("<function=", ">", "</function>"),
        parameter=("<parameter=", {">": "value"}, "</parameter>"),
    ),
    "minimax_m2": _invoke("minimax:tool_call"),
    "dots": _invoke("dots_function_call"),
    "minimax_m3": Grammar(
        states={
            **_content({f"{_MINIMAX}<tool_call>": "section"}),
            "section": State(
                role=Role.BETWEEN,
                edges={f'{_MINIMAX}<invoke name="': "name", f"{_MINIMAX}</tool_call>": "content"},
            ),
            "name": State(role=Role.NAME, edges={'">': "elements"}),
            "elements": State(role=Role.ELEMENTS, edges={f"{_MINIMAX}</invoke>": "section"}),
        },
        before_tags=_MINIMAX,
    ),
    "minicpm5": Grammar(
        states={
            **_content({'<function name="': "name"}),
            "name": State(role=Role.NAME, edges={'">': "parameters"}, known=True),
            "parameters": State(role=Role.PARAMETERS, edges={'<param name="': "key", "</function>": "after"}),
            "key": State(role=Role.KEY, edges={'">': "value", '"><![CDATA[': "quoted"}),
            "value": State(role=Role.VALUE, edges={"</param>": "parameters"}),
            "quoted": State(role=Role.VALUE, edges={"]]></param>": "parameters"}),
            "after": State(role=Role.BETWEEN, edges={'<function name="': "name"}),
        }
    ),
    "step3": Grammar(
        states={
            **_content({"<｜tool_calls_begin｜>": "section"}),
            "section": State(
                role=Role.BETWEEN,
                edges={
                    "<｜tool_call_begin｜>": "kind",
                    "<｜tool_call_end｜>": "section",
                    "<｜tool_calls_end｜>": "content",
                },
            ),
            "kind": State(role=Role.PARAMETERS, edges={'<steptml:invoke name="': "name"}),
            "name": State(role=Role.NAME, edges={'">': "parameters"}),
            "parameters": State(
                role=Role.PARAMETERS, edges={'<steptml:parameter name="': "key", "</steptml:invoke>": "section"}
            ),
            "key": State(role=Role.KEY, edges={'">': "value"}),
            "value": State(role=Role.VALUE, edges={"</steptml:parameter>": "parameters"}),
        }
    ),
    "glm45": _pairs(),
    "hy_v3": _pairs(section=("<tool_calls>", "</tool_calls>"), after_name="<tool_sep>"),
    "k2_horizon": _pairs("ifm|", section=("<ifm|tool_calls>", "</ifm|tool_calls>")),
    "glm4": Grammar(
        states={
            "content": CONTENT,
            "start": State(role=Role.START, then="name"),
            "name": State(role=Role.NAME, edges={"\n": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS),
        },
        initial="start",
        known_tools=True,
    ),
    "kimi_k2": Grammar(
        states={
            **_content({"<|tool_calls_section_begin|>": "section"}),
            "section": State(
                role=Role.BETWEEN, edges={"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"}
            ),
            "name": State(role=Role.NAME, edges={"<|tool_call_argument_begin|>": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(
                role=Role.BETWEEN, edges={"<|tool_call_end|>": "section", "<|tool_calls_section_end|>": "content"}
            ),
        },
        name=re.compile(r"(?P<id>(?:functions\.)?(?P<name>.+?)(?::\d+)?)"),
        own_ids=True,
    ),
    "kimi_k3": Grammar(
        states={
            **_content({"<|open|>tools<|sep|>": "section"}),
            "section": State(
                role=Role.BETWEEN, edges={'<|open|>call tool="': "name", "<|close|>tools<|sep|>": "content"}
            ),
            "name": State(role=Role.NAME, edges={'"<|sep|>': "parameters", '" index="': "index"}),
            "index": State(role=Role.ID, edges={'"<|sep|>': "parameters"}, silent=True),
            "parameters": State(
                role=Role.PARAMETERS,
                edges={
                    '<|open|>argument key="': "key",
                    '<|open|>json type="object"<|sep|>': "arguments",
                    "<|close|>json<|sep|>": "parameters",
                    "<|close|>call<|sep|>": "section",
                },
            ),
            "arguments": State(role=Role.ARGUMENTS, then="parameters"),
            "key": State(
                role=Role.KEY,
                edges={'" type="string"<|sep|>': "string", '"<|sep|>': "value"}
                | {f'" type="{kind}"<|sep|>': "value" for kind in ("number", "boolean", "null", "object", "array")},
            ),
            "value": State(role=Role.VALUE, edges={"<|close|>argument<|sep|>": "parameters"}),
            "string": State(role=Role.VALUE, edges={"<|close|>argument<|sep|>": "parameters"}, string=True),
        }
    ),
    "plamo3": Grammar(
        states={
            **_content({_plamo("begin_tool_requests"): "section"}),
            "section": State(
                role=Role.BETWEEN,
                edges={
                    _plamo("begin_tool_request"): "section",
                    _plamo("begin_tool_name"): "name",
                    _plamo("end_tool_request"): "section",
                    _plamo("end_tool_requests"): "content",
                },
            ),
            "name": State(role=Role.NAME, edges={_plamo("end_tool_name"): "behind"}),
            "behind": State(
                role=Role.PARAMETERS,
                edges={
                    f"{_plamo('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>": "arguments",
                    _plamo("end_tool_request"): "section",
                },
            ),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(
                role=Role.BETWEEN,
                edges={_plamo("end_tool_arguments"): "section", _plamo("end_tool_request"): "section"},
            ),
        }
    ),
    "internlm": Grammar(
        states={
            **_content({"<|action_start|>": "plugin"}),
            "plugin": State(role=Role.BETWEEN, edges={"<|plugin|>": "calls"}),
            "calls": State(role=Role.CALLS, then="after"),
            "after": State(role=Role.BETWEEN, edges={"<|action_end|>": "content"}),
        }
    ),
    "phi4": _json(("functools[", "<|tool_call|>"), ("<|/tool_call|>",)),
    "granite": _json(("<|tool_call|>", "<tool_call>", "<function_call>"), ("</tool_call>",)),
    "minimax": _json(("<tool_calls>",), ("</tool_calls>",)),
    "longcat": _json(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
    "nemotron": _json(("<TOOLCALL>",), ("</TOOLCALL>",)),
    "gigachat3": Grammar(
        states={
            **_content({**_GIGACHAT_CALLS, "<|message_sep|>": "next"}),
            "calls": State(role=Role.CALLS, then="next"),
            "next": State(role=Role.BETWEEN, edges={**_GIGACHAT_CALLS, "<|message_sep|>": "next"}, silent=True),
        }
    ),
    "gigachat35": _dsml("tool_calls", name="GCML"),
    "command_r": Grammar(
        states={
            **_content({"Action:": "fence"}),
            "fence": State(role=Role.START, edges={"```json": "calls", "```": "calls"}, kept={"[": "calls"}),
            "calls": State(role=Role.CALLS, then="after"),
            "after": State(role=Role.BETWEEN),
        },
        known_tools=True,
    ),
    "apertus": replace(_json(("<|tools_prefix|>",), ("<|tools_suffix|>",)), keyed=True),
    "cohere": _json(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    "functionary": Grammar(
        states={
            **_content({"<function=": "name"}),
            "name": State(role=Role.NAME, edges={">": "arguments"}, known=True),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(role=Role.BETWEEN, edges={"</function>": "after", "<function=": "name"}),
        }
    ),
    "functionary_v3": Grammar(
        states={
            **_content({">>>": "recipient"}),
            "recipient": State(role=Role.START, edges={"all\n": "content", ">>>": "recipient"}, then="name"),
            "name": State(role=Role.NAME, edges={"\n": "arguments"}),
            "arguments": State(role=Role.ARGUMENTS, then="after"),
            "after": State(role=Role.BETWEEN, edges={">>>": "recipient"}),
        },
        initial="recipient",
        known_tools=True,
    ),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", quotes="<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", quotes='<|"|>'),
    "harmony": Grammar(
        states={
            "author": State(role=Role.START, edges={"assistant": "message"}, then="header"),
            "message": State(
                role=Role.START, edges={"<|channel|>": "header", "<|message|>": "content"}, kept={"to=": "header"}
            ),
            "header": State(
                role=Role.HEADER,
                edges={"<|message|>": ""},
                routes=(
                    (r"^\s*functions\.", "reasoning"),  # what the model thinks that a tool would say
                    (r"to=functions\.(?P<name>[\w.\-]+)", "arguments"),
                    (r"^\s*analysis|to=(?!assistant\b)", "reasoning"),
                ),
            ),
            **_content(_HARMONY_ENDS),
            "reasoning": State(role=Role.REASONING, edges=_HARMONY_ENDS),
            "arguments": State(role=Role.ARGUMENTS, then="next"),
            "next": State(role=Role.BETWEEN, edges=_HARMONY_ENDS, silent=True),
        },
        initial="message",
    ),
}

# What a family writes around content even where there are no calls; it is left out.
FRAMES: dict[str, Grammar] = {
    "functionary_v3": Grammar(
        states={"content": CONTENT, "recipient": State(role=Role.START, edges={"all\n": "content"})},
        initial="recipient",
    ),
    "gigachat3": Grammar(
        states={
            **_content({"<|message_sep|>": "next"}),
            "next": State(role=Role.BETWEEN, silent=True),
        }
    ),
}
