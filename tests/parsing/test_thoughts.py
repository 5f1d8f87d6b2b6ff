"""Calls inside of reasoning that is never closed, over all pairs of families; and what only looks like a call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.parsing.choice import HARMONY, Parsers
from llmjax.parsing.events import Content, Message, Reasoning
from llmjax.parsing.families import JSON_LIST, TOOLS
from llmjax.parsing.parser import OutputParser
from llmjax.parsing.reasoning import REASONING
from llmjax.parsing.schemas import ToolSchemas

SCHEMAS = ToolSchemas(
    [
        {"function": {"name": "ping"}},
        {
            "function": {
                "name": "write",
                "parameters": {"properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
            }
        },
    ]
)
_JSON = '{"name": "ping", "arguments": {}}'
_PARAMETERS = '{"name": "ping", "parameters": {}}'
_DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
# A whole call of ping, as models of each family write it.
PING = {
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "llama3_json": _PARAMETERS,
    "xlam": f"[{_JSON}]",
    "pythonic": "[ping()]",
    "llama4_pythonic": "<|python_start|>[ping()]<|python_end|>",
    "lfm2": "<|tool_call_start|>[ping()]<|tool_call_end|>",
    "olmo3": "<function_calls>ping()</function_calls>",
    "gemma3": "```tool_code\nping()\n```",
    "mistral": "[TOOL_CALLS]ping[ARGS]{}",
    "deepseek_v3": _DS + "function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": _DS + "ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="ping"></｜DSML｜invoke></｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "qwen3_coder": "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>ping</tool_call>",
    "glm4": "ping\n{}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "internlm": f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>",
    "phi4": f"functools[{_JSON}]",
    "granite": f"<|tool_call|>[{_JSON}]",
    "minimax": f"<tool_calls>\n{_JSON}\n</tool_calls>",
    "longcat": f"<longcat_tool_call>{_JSON}</longcat_tool_call>",
    "nemotron": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "gigachat3": f"function call<|role_sep|>\n{_JSON}",
    "apertus": '<|tools_prefix|>[{"ping": {}}]<|tools_suffix|>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "ping", "parameters": {}}]<|END_ACTION|>',
    "functionary": "<function=ping>{}</function>",
    "functionary_v3": ">>>ping\n{}",
    "functiongemma": "<start_function_call>call:ping{}<end_function_call>",
    "gemma4": "<|tool_call>call:ping{}<tool_call|>",
    "deepseek_v41": '<｜DSML｜ calls><｜DSML｜ invoke name="ping"></｜DSML｜ invoke></｜DSML｜ calls>',
    "gigachat35": '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="ping">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
    "hy_v3": "<tool_calls><tool_call>ping<tool_sep></tool_call></tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>ping</ifm|tool_call></ifm|tool_calls>",
    "dots": '<dots_function_call>\n<invoke name="ping">\n</invoke>\n</dots_function_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="ping">]<]minimax[>[</invoke>\n'
    "]<]minimax[>[</tool_call>",
    "minicpm5": '<function name="ping"></function>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="ping">'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="ping" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>ping"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
    "command_r": 'Action: ```json\n[{"tool_name": "ping", "parameters": {}}]```',
}


def parsed(
    text: str, *, tools: str | None, reasoning: str | None = None, prompt: str = "", size: int = 0, whole: bool = False
) -> Message:
    grammar = Parsers(tools=tools, reasoning=reasoning).grammar(with_tools=tools is not None, prompt=prompt)
    assert grammar is not None
    parser = OutputParser(grammar, SCHEMAS)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    events = [event for piece in pieces for event in parser.feed(piece)]
    return Message.of([*events, *parser.finish(whole=whole)])


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.calls]


def test_every_family_has_a_call() -> None:
    assert {*PING} == {*TOOLS} - {HARMONY, JSON_LIST}


@pytest.mark.parametrize("tools", PING)
def test_a_call_in_thoughts_that_are_never_closed_ends_them(tools: str) -> None:
    for reasoning, family in REASONING.items():
        for size in (0, 1, 3):
            found = parsed(
                f"I should ping.\n{PING[tools]}",
                tools=tools,
                reasoning=reasoning,
                prompt=f"{family.start}\n",
                size=size,
            )
            assert (calls(found), found.reasoning, found.content) == ([("ping", "{}")], "I should ping.", "")


@pytest.mark.parametrize("tools", PING)
def test_what_thoughts_that_are_closed_say_of_calls_stays_reasoning(tools: str) -> None:
    first = PING[tools][: len(PING[tools]) // 2]
    for reasoning, family in REASONING.items():
        for named in (first, PING[tools]):
            thought = f"I could say\n{named}\nhere, or not."
            for size in (0, 1):
                found = parsed(
                    f"{thought}\n{family.end}\n\nNo.",
                    tools=tools,
                    reasoning=reasoning,
                    prompt=f"{family.start}\n",
                    size=size,
                )
                assert (calls(found), found.reasoning, found.content) == ([], thought, "No.")


@pytest.mark.parametrize("reasoning", REASONING)
def test_without_tools_all_of_it_is_reasoning(reasoning: str) -> None:
    text = f"I should ping.\n{PING['hermes']}"
    found = parsed(text, tools=None, reasoning=reasoning, prompt=REASONING[reasoning].start)
    assert (found.reasoning, found.content, found.calls) == (text, "", [])


def test_what_follows_a_call_in_thoughts_is_content() -> None:
    found = parsed(f"Hm.\n{PING['hermes']} Wait.", tools="hermes", reasoning="think", prompt="<think>")
    assert (found.reasoning, found.content, calls(found)) == ("Hm.", "Wait.", [("ping", "{}")])


def test_a_call_in_thoughts_that_was_cut() -> None:
    text = 'Hm.\n<tool_call>{"name": "write", "arguments": {"path": "a'
    found = parsed(text, tools="hermes", reasoning="think", prompt="<think>")
    assert (found.reasoning, calls(found)) == ("Hm.", [("write", '{"path": "a')])


def test_reasoning_is_held_back_only_while_it_may_be_a_call() -> None:
    grammar = Parsers(tools="hermes", reasoning="think").grammar(with_tools=True, prompt="<think>")
    assert grammar is not None
    parser = OutputParser(grammar, SCHEMAS)
    assert parser.feed("I use ") == [Reasoning("I use")]
    assert parser.feed("<tool_call>") == []
    assert parser.position == len("I use")
    assert parser.feed(" for") == [Reasoning(" <tool_call> for")]
    assert parser.feed(' it: <tool_call>{"name": "ping", ') == [Reasoning(" it:")]
    assert parser.feed('"arguments": {}}</tool_call>') == []  # a call, if the reasoning is not closed
    assert parser.feed("</think>Yes") == [
        Reasoning(' <tool_call>{"name": "ping", "arguments": {}}</tool_call>'),
        Content("Yes"),
    ]


WORDS = ["ping", "foo", " and ", "\n", "{}", '{"name": "ping", ', '"arguments": {}}', "I", ">", "("]


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("tools", PING)
def test_any_thoughts_in_any_pieces(tools: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from(sorted(REASONING)))
    family = REASONING[reasoning]
    words = st.sampled_from([*WORDS, PING[tools], *sorted(set(TOOLS[tools].markers)), family.start, family.end])
    text = "".join(data.draw(st.lists(words, max_size=16)))
    prompt = data.draw(st.sampled_from(["", family.start]))
    whole = parsed(text, tools=tools, reasoning=reasoning, prompt=prompt)
    assert parsed(text, tools=tools, reasoning=reasoning, prompt=prompt, size=1) == whole
    assert parsed(text, tools=tools, reasoning=reasoning, prompt=prompt, size=data.draw(st.integers(2, 9))) == whole


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "I considered using <function=foo> but decided against it. The answer is 42."),
        ("qwen3_coder", "I considered using <function=foo></function>. The answer is 42."),
        ("qwen3_coder", "Use <function=ping> like so: ... The answer is 42."),
        ("qwen3_coder", "Use <tool_call><function=ping> like so: ... The answer is 42."),
        ("qwen3_coder", "Use <function=write><parameter=a b\nc> like so. The answer is 42."),
        ("qwen3_coder", "An empty <tool_call></tool_call> says nothing."),
        ("functionary", "I considered <function=foo> but no. The answer is 42."),
        ("functionary", "I considered <function=ping> but no. The answer is 42."),
        ("functionary", 'I considered <function=foo>{"a": 1}</function>. The answer is 42.'),
        ("glm45", "Use <tool_call>ping<arg_key>a</arg_key> like so. The answer is 42."),
        ("minimax_m2", 'Use <minimax:tool_call><invoke name="ping"> like so. The answer is 42.'),
        ("hermes", 'Use <tool_call>{"name": "ping", "arguments": ...}</tool_call>. The answer is 42.'),
        ("hermes", 'Use <tool_call>{"name": "ping", and so on. The answer is 42.'),
        ("hermes", '<tool_call>{"name": "pi'),
        ("mistral", "[TOOL_CALLS]ping[CALL_ID] is an id. The answer is 42."),
        ("mistral", "[TOOL_CALLS]ping[ARGS] are arguments. The answer is 42."),
        ("deepseek_v31", _DS + "ping<｜tool▁sep｜>?"),
    ],
)
def test_what_only_looks_like_a_call_is_content(tools: str, text: str) -> None:
    for size in (0, 1, 3):
        found = parsed(text, tools=tools, size=size)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "content"),
    [
        ("qwen3_coder", "<function=write><parameter=path>a</parameter> It is 42.", '{"path": "a"}', "It is 42."),
        ("glm45", "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value> So 42.", '{"path": "a"}', "So 42."),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"} and 42.', '{"path": "a"}', "and 42."),
        ("functionary", '<function=write>{"path": "a"} and 42.', '{"path": "a"}', "and 42."),
    ],
)
def test_text_behind_a_call_does_not_vanish(tools: str, text: str, arguments: str, content: str) -> None:
    for size in (0, 1, 3):
        found = parsed(text, tools=tools, size=size)
        assert (calls(found), found.content) == ([("write", arguments)], content)


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "whole"),
    [
        ("lfm2", "<|tool_call_start|>[write(", "", "{}"),
        ("cohere", '<|START_ACTION|>[{"tool_name": "write"', "", "{}"),
        ("cohere", '<|START_ACTION|>[{"tool_name": "write", "param', "", "{}"),
        ("hermes", '<tool_call>{"name": "write", "arguments": ', "", "{}"),
        ("hermes", '<tool_call>{"name": "write", "arguments": "{\\"pa', '{"pa', '{"pa'),
        ("mistral", "[TOOL_CALLS]write[ARGS]", "", "{}"),
        ("mistral", "[TOOL_CALLS]write[CALL_ID]abc", "", "{}"),
        ("qwen3_coder", "<tool_call><function=write>\n<para", "", "{}"),
        ("qwen3_coder", "<tool_call><function=write>\n<parameter=pa", "", "{}"),
        ("qwen3_coder", "<tool_call><function=write>\n<parameter=path>\na.t", '{"path": "a.t', '{"path": "a.t'),
        ("qwen3_coder", "<tool_call><function=write>\n<parameter=lines>\n12", '{"lines": 12', '{"lines": 12'),
        ("qwen3_coder", "<function=write><parameter=path>\na\n</param", '{"path": "a', '{"path": "a'),
        ("qwen3_coder", "<function=write><parameter=path>\na\n</parameter>\n</fun", '{"path": "a"', '{"path": "a"}'),
        ("qwen3_coder", "<function=write><parameter=path>\na\n</parameter>", '{"path": "a"', '{"path": "a"}'),
        (
            "kimi_k2",
            PING["kimi_k2"].replace("ping", "write")[: -len("{}<|tool_call_end|><|tool_calls_section_end|>")],
            "",
            "{}",
        ),
    ],
)
def test_a_call_that_was_cut_has_what_came_of_its_arguments(tools: str, text: str, arguments: str, whole: str) -> None:
    for size in (0, 1, 3):
        assert calls(parsed(text, tools=tools, size=size)) == [("write", arguments)]
        assert calls(parsed(text, tools=tools, size=size, whole=True)) == [("write", whole)]  # the model has ended it


def test_arguments_of_calls_are_json_where_the_model_has_ended() -> None:
    for tools, text in PING.items():
        for call in parsed(text, tools=tools, whole=True).calls:
            assert json.loads(call.arguments) == {}
