"""Outputs as models of each family write them, and what they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"$ref": "#/$defs/Units"},
                    "hours": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                    "detail": {"type": "boolean"},
                },
                "$defs": {"Units": {"enum": ["C", "F"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = {"city": 'Köln "Süd"\n', "days": 3}
TRICKY = {"city": "a</tool_call>}]) b", "hours": [1, 2.5], "detail": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    tools: str | None = None
    reasoning: str | None = None
    text: str
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    ids: tuple[str, ...] = ()
    prompt: str = ""
    with_tools: bool = True

    def __str__(self) -> str:
        return f"{self.tools}-{self.reasoning}-{self.text[:24]!r}"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


W, T = dumps(WEATHER), dumps(TRICKY)
BOTH = (("get_weather", WEATHER), ("get_weather", TRICKY))
ONE = (("get_weather", WEATHER),)
NOW = (("now", {}),)


def named(arguments: str, *, name: str = "get_weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


TWO = f"{named(W)}, {named(T)}"
PYTHON = (
    'get_weather(city=\'Köln "Süd"\\n\', days=3), get_weather(city="a</tool_call>}]) b", hours=[1, 2.5], detail=True)'
)
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

CASES = [
    # What a forced call is written as, where a family does not write JSON
    Case(tools="json_list", text=f"[{TWO.replace('arguments', 'parameters')}]", calls=BOTH),
    # Hermes, Qwen2.5, Qwen3
    Case(
        tools="hermes",
        text=f"I look.\n<tool_call>\n{named(W)}\n</tool_call>\n<tool_call>\n{named(T)}\n</tool_call>",
        content="I look.",
        calls=BOTH,
    ),
    Case(tools="hermes", text=f"<tool_call>{named(W)}}}</tool_call>", calls=ONE),  # a brace too many
    Case(tools="hermes", text=f"<tool_call>{named(W)[:-1]}</tool_call>", calls=ONE),  # one too few
    Case(tools="hermes", text=f"<tool_call>{named(W)}", calls=ONE),  # no end
    Case(tools="hermes", text=f'<tool_call>{{"arguments": {W}, "name": "get_weather"}}</tool_call>', calls=ONE),
    Case(tools="hermes", text=f"<tool_call>{named(dumps(W))}</tool_call>", calls=ONE),  # JSON in a string
    Case(tools="hermes", text='<tool_call>{"name": "now"}</tool_call>', calls=NOW),
    Case(
        tools="hermes",
        text=f'<tool_call>{{"type": "function", "function": {named(W)}}}</tool_call> Done.\n',
        content="Done.",
        calls=ONE,
    ),
    Case(tools="hermes", text="<tool_call> is a tag. ", content="<tool_call> is a tag. "),
    Case(tools="hermes", text='<tool_call>{"a": 1}</tool_call>', content='<tool_call>{"a": 1}</tool_call>'),
    Case(tools="hermes", text="a <tool_c", content="a <tool_c"),
    Case(tools="hermes", text="1 < 2\n\n", content="1 < 2\n\n"),
    Case(tools="hermes", text="  \n", content="  \n"),
    Case(
        tools="hermes",
        reasoning="think",
        text=f"<think>\nI could <tool_call>.\n</think>\n\n<tool_call>\n{named(W)}\n</tool_call>",
        thought="I could <tool_call>.",
        calls=ONE,
    ),
    Case(
        tools="hermes",
        reasoning="think",
        prompt="<|im_start|>assistant\n<think>\n",
        text=f"Hm.\n</think>\n\nSo:\n<tool_call>{named(W)}</tool_call>",
        thought="Hm.",
        content="So:",
        calls=ONE,
    ),
    Case(reasoning="think", text="Say <think>?", content="Say <think>?"),
    Case(reasoning="think", text="\n<think>\n\n</think>\n\nHi ", content="Hi "),
    Case(reasoning="think", text="<think>cut", thought="cut"),
    Case(reasoning="think", prompt="<think>\n\n</think>\n\n", text="Hi", content="Hi"),
    Case(reasoning="deepseek_r1", text="So\n</think>\nHi", thought="So", content="Hi"),
    Case(reasoning="deepseek_r1", prompt="</think>\n", text="Hi", content="Hi"),
    Case(reasoning="mistral", text="[THINK]So[/THINK]Hi", thought="So", content="Hi"),
    Case(
        reasoning="granite",
        text="Here is my thought process: a, b. Here is my response: c",
        thought="a, b.",
        content="c",
    ),
    Case(reasoning="gemma4", text="<|channel>thought\nSo<channel|>Hi", thought="So", content="Hi"),
    # Qwen3-Coder
    Case(
        tools="qwen3_coder",
        text='Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "Süd"\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\na</tool_call>}]) b\n</parameter>\n<parameter=hours>\n[1, 2.5]\n</parameter>\n"
        "<parameter=detail>\nTrue\n</parameter>\n</function>\n</tool_call>",
        content="Well.",
        calls=BOTH,
    ),
    Case(tools="qwen3_coder", text="<function=now>\n</function>\n</tool_call>", calls=NOW),
    Case(
        tools="qwen3_coder",
        text="<tool_call><function=get_weather><parameter=units>\nC\n</parameter><parameter=hours>\nnull\n</parameter>"
        "<parameter=x>\n{'a': (1,)}\n</parameter></function></tool_call>",
        calls=(("get_weather", {"units": "C", "hours": None, "x": {"a": [1]}}),),
    ),
    Case(tools="qwen3_coder", text="<tool_call> is a tag.", content="<tool_call> is a tag."),
    # Llama 3
    Case(tools="llama3_json", text=f"{named(W, key='parameters')}; {named(T, key='parameters')}", calls=BOTH),
    Case(tools="llama3_json", text=f"<|python_tag|>{named(W)}", calls=ONE),
    Case(tools="llama3_json", text='{"name": "Ada", "born": 1815}', content='{"name": "Ada", "born": 1815}'),
    Case(tools="llama3_json", text=" {x}", content=" {x}"),
    Case(tools="llama3_json", text=f'{named(W)} {{"a": 1}} end', content='{"a": 1} end', calls=ONE),
    # Llama 4, and others that write Python
    Case(tools="llama4_pythonic", text=f"<|python_start|>[{PYTHON}]<|python_end|>", calls=BOTH),
    Case(tools="pythonic", text=f" [{PYTHON}]", calls=BOTH),
    Case(tools="pythonic", text="[now()] then", content="then", calls=NOW),
    Case(tools="pythonic", text="[1] see below(a)", content="[1] see below(a)"),
    Case(tools="pythonic", text="[other(a=1)]", content="[other(a=1)]"),
    Case(
        tools="pythonic",
        text="[get_weather('x', days=1+1, hours=None)]",
        calls=(("get_weather", {"city": "x", "days": "1+1", "hours": None}),),
    ),
    Case(tools="lfm2", text=f"a<|tool_call_start|>[{PYTHON}]<|tool_call_end|>b", content="ab", calls=BOTH),
    Case(tools="olmo3", text="<function_calls>\nnow()\nnow()\n</function_calls>", calls=2 * NOW),
    Case(tools="gemma3", text="```tool_code\nnow()\n```", calls=NOW),
    # Mistral
    Case(tools="mistral", text=f"[TOOL_CALLS][{TWO}]", calls=BOTH),
    Case(tools="mistral", text=f"[TOOL_CALLS] [ {TWO} ]", calls=BOTH),
    Case(
        tools="mistral", text=f"Ok[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]get_weather{T}", content="Ok", calls=BOTH
    ),
    Case(tools="mistral", text=f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{W}", calls=ONE, ids=("abcdefghi",)),
    # DeepSeek
    Case(
        tools="deepseek_v3",
        text=f"{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{W}\n```{DS[3]}\n{DS[1]}function{DS[2]}get_weather\n"
        f"```json\n{T}\n```{DS[3]}{DS[4]}",
        calls=BOTH,
    ),
    Case(
        tools="deepseek_v31",
        reasoning="think",
        prompt="<｜Assistant｜><think>",
        text=f"a</think>b{DS[0]}{DS[1]}get_weather{DS[2]}{W}{DS[3]}{DS[1]}get_weather{DS[2]}{T}{DS[3]}{DS[4]}",
        thought="a",
        content="b",
        calls=BOTH,
    ),
    Case(
        tools="deepseek_v32",
        text='x\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln "Süd"\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        content="x",
        calls=ONE + NOW,
    ),
    # GLM
    Case(
        tools="glm45",
        reasoning="think",
        text='<think>a</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln "Süd"\n</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        thought="a",
        calls=ONE + NOW,
    ),
    Case(tools="glm4", text=f"get_weather\n{W}", calls=ONE),
    Case(tools="glm4", text="get_weather is a tool", content="get_weather is a tool"),
    Case(tools="glm4", text="get on\n{}", content="get on\n{}"),
    # Others with JSON between markers
    Case(
        tools="internlm",
        text=f"a<|action_start|><|plugin|>\n{named(W, key='parameters')}<|action_end|>\n",
        content="a",
        calls=ONE,
    ),
    Case(tools="phi4", text=f"functools[{TWO}]", calls=BOTH),
    Case(tools="phi4", text=f"<|tool_call|>[{TWO}]<|/tool_call|>", calls=BOTH),
    Case(tools="granite", text=f"<|tool_call|>[{TWO}]", calls=BOTH),
    Case(tools="granite", text=f"<function_call> {named(W)} <function_call> {named(T)}", calls=BOTH),
    Case(tools="minimax", text=f"<tool_calls>\n{named(W)}\n{named(T)}\n</tool_calls>", calls=BOTH),
    Case(tools="longcat", text=f"<longcat_tool_call>{named(W)}</longcat_tool_call>", calls=ONE),
    Case(tools="nemotron", text=f"<TOOLCALL>[{TWO}]</TOOLCALL>", calls=BOTH),
    Case(
        reasoning="cohere",
        text="<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
        thought="a",
        content="b",
    ),
    Case(reasoning="granite33", text="<think>a</think>\n<response>b</response>", thought="a", content="b"),
    Case(reasoning="hunyuan", text="<think>\na\n</think>\n<answer>\nb\n</answer>", thought="a", content="b\n"),
    Case(
        reasoning="apriel",
        prompt="Here are my reasoning steps:\n",
        text="a\n[BEGIN FINAL RESPONSE]\nb",
        thought="a",
        content="b",
    ),
    Case(
        tools="apertus",
        text=f'<|tools_prefix|>[{{"get_weather": {W}}}, {{"get_weather": {T}}}]<|tools_suffix|>',
        calls=BOTH,
    ),
    Case(
        tools="gigachat3",
        text=f"a<|message_sep|>\n\nfunction call<|role_sep|>\n{named(W)}<|message_sep|>\n\n",
        content="a",
        calls=ONE,
    ),
    Case(
        tools="deepseek_v4",
        text='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        calls=NOW,
    ),
    Case(
        tools="cohere",
        reasoning="cohere",
        text='<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", '
        f'"parameters": {W}}}]<|END_ACTION|>',
        thought="a",
        calls=ONE,
    ),
    Case(tools="xlam", text=f"[{TWO}]", calls=BOTH),
    Case(tools="xlam", text=f"```json\n[{TWO}]\n```", calls=BOTH),
    Case(tools="xlam", text='[{"a": 1}]', content='[{"a": 1}]'),
    # MiniMax, Seed
    Case(
        tools="minimax_m2",
        reasoning="think",
        prompt="]~b]ai\n<think>\n",
        text='a\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln "Süd"\n'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        thought="a",
        calls=ONE + NOW,
    ),
    Case(
        tools="seed_oss",
        reasoning="seed_oss",
        text='<seed:think>a</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln "Süd"\n'
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        thought="a",
        calls=ONE,
    ),
    # Kimi
    Case(
        tools="kimi_k2",
        reasoning="kimi_k2",
        prompt="<|im_middle|><think>",
        text=f"a <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{W}"
        f"<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{T}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        thought="a",
        calls=BOTH,
        ids=("functions.get_weather:0", "functions.get_weather:1"),
    ),
    # Functionary
    Case(
        tools="functionary",
        text=f"a<function=get_weather>{W}</function><function=get_weather>{T}</function>",
        content="a",
        calls=BOTH,
    ),
    Case(tools="functionary_v3", text=f"all\nHi\n>>>get_weather\n{W}", content="Hi", calls=ONE),
    Case(tools="functionary_v3", text=f"get_weather\n{W}\n>>>get_weather\n{T}", calls=BOTH),
    Case(tools="functionary_v3", with_tools=False, text="all\nHi", content="Hi"),
    Case(tools="functionary_v3", with_tools=False, text="Hi", content="Hi"),
    # Values are whole where the template writes no newlines around them
    Case(
        tools="seed_oss",
        text="<seed:tool_call>\n<function=get_weather>\n<parameter=city>\n\nx\n\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        calls=(("get_weather", {"city": "\n\nx\n\n"}),),
    ),
    Case(
        tools="dots",
        text='<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Köln "Süd"\n</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</dots_function_call>',
        calls=ONE,
    ),
    Case(
        tools="step3",
        reasoning="think",
        text="<think>a</think><｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke "
        'name="get_weather"><steptml:parameter name="city">Köln "Süd"\n</steptml:parameter><steptml:parameter '
        'name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function'
        '<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>b',
        thought="a",
        content="b",
        calls=ONE + NOW,
    ),
    Case(
        tools="hy_v3",
        text="<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        '<arg_value>Köln "Süd"\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n'
        "<tool_call>now<tool_sep></tool_call>\n</tool_calls>",
        calls=ONE + NOW,
    ),
    Case(
        tools="k2_horizon",
        reasoning="k2_horizon",
        prompt="<ifm|think>",
        text="a</ifm|think><ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>"
        'Köln "Süd"\n</ifm|arg_value><ifm|arg_key>days</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>'
        "<ifm|arg_value>3</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
        thought="a",
        calls=ONE,
    ),
    Case(
        tools="minicpm5",
        reasoning="think",
        text='<think>a</think>b<function name="get_weather"><param name="city"><![CDATA[Köln "Süd"\n]]></param>'
        '<param name="days">3</param></function>\n<function name="now"></function>',
        thought="a",
        content="b",
        calls=ONE + NOW,
    ),
    Case(
        tools="deepseek_v41",
        text='<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">'
        'Köln "Süd"\n</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        calls=ONE,
    ),
    Case(
        tools="gigachat35",
        text='<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n<｜GCML｜parameter name="city" string="true">'
        'Köln "Süd"\n</｜GCML｜parameter>\n<｜GCML｜parameter name="days" string="false">3</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
        calls=ONE,
    ),
    Case(
        tools="minimax_m3",
        reasoning="minimax_m3",
        prompt="<mm:think>",
        text='a</mm:think>b\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">\n'
        "]<]minimax[>[<city>a</tool_call>}]) b]<]minimax[>[</city>\n"
        "]<]minimax[>[<hours>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>2.5]<]minimax[>[</item>"
        "]<]minimax[>[</hours>]<]minimax[>[<detail>true]<]minimax[>[</detail>\n"
        "]<]minimax[>[<more>]<]minimax[>[<a>x]<]minimax[>[</a>]<]minimax[>[<a>y]<]minimax[>[</a>]<]minimax[>[<b>"
        "]<]minimax[>[</b>]<]minimax[>[</more>\n"
        ']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        thought="a",
        content="b",
        calls=(("get_weather", {**TRICKY, "more": {"a": ["x", "y"], "b": ""}}), *NOW),
    ),
    Case(
        tools="kimi_k3",
        reasoning="kimi_k3",
        prompt='<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        text="a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Köln "Süd"\n'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>'
        f"{T}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        thought="a",
        content="b",
        calls=BOTH,
    ),
    Case(
        tools="kimi_k3",
        reasoning="kimi_k3",
        with_tools=False,
        prompt="<|open|>response<|sep|>",
        text="Hi<|close|>response<|sep|><|close|>message<|sep|>",
        content="Hi",
    ),
    Case(
        tools="plamo3",
        reasoning="plamo3",
        prompt="<|plamo:begin_think:plamo|>",
        text="a<|plamo:end_think:plamo|>b<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        f"<|plamo:constrain|>json<|plamo:msg|>{W}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        "<|plamo:end_tool_requests:plamo|>",
        thought="a",
        content="b",
        calls=ONE,
    ),
    # Command R, GigaChat
    Case(
        tools="command_r",
        text=f'Action: ```json\n[\n {{\n "tool_name": "get_weather",\n "parameters": {W}\n }}\n]```',
        calls=ONE,
    ),
    Case(tools="command_r", text="Action: none.", content="Action: none."),
    Case(tools="gigachat3", text=f"a<|function_call|>{named(W)}", content="a", calls=ONE),
    Case(tools="gigachat3", text="a<|message_sep|>\n\n", content="a"),
    Case(tools="gigachat3", with_tools=False, text="a<|message_sep|>\n\n", content="a"),
    Case(
        reasoning="cohere",
        prompt="<|START_THINKING|>",
        text="a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>",
        thought="a",
        content="b",
    ),
    # Gemma
    Case(reasoning="gemma4", prompt="<|channel>thought\n<channel|>", text="<channel|>Hi", content="Hi"),
    Case(
        reasoning="gemma4",
        text="So<|channel>thought\na<channel|>it is.",
        thought="a",
        content="Soit is.",
    ),
    Case(
        tools="functiongemma",
        text='<start_function_call>call:get_weather{city:<escape>Köln "Süd"\n<escape>,days:3}<end_function_call>'
        "<start_function_call>call:now{}<end_function_call>",
        calls=ONE + NOW,
    ),
    Case(
        tools="gemma4",
        text='<|tool_call>call:get_weather{city:<|"|>a</tool_call>}]) b<|"|>,hours:[1, 2.5],detail:true}<tool_call|>',
        calls=(("get_weather", TRICKY),),
    ),
    # gpt-oss
    Case(
        tools="harmony",
        reasoning="harmony",
        text="<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{W}<|call|>",
        thought="I think.",
        content="I look.",
        calls=ONE,
    ),
    Case(
        tools="harmony",
        reasoning="harmony",
        text=f" to=functions.get_weather<|channel|>commentary json<|message|>{W}",
        calls=ONE,
    ),
    Case(
        reasoning="harmony",
        text="<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>c\n<|return|>",
        thought="a\nb",
        content="c\n",
    ),
    Case(reasoning="harmony", text="plain", content="plain"),
    Case(
        tools="harmony",
        reasoning="harmony",
        text="<|channel|>commentary to=assistant<|message|>Hi",
        content="Hi",
    ),
    Case(
        tools="harmony",
        reasoning="harmony",
        text="<|channel|>final<|message|>Hi<|end|><|start|>functions.now to=assistant<|channel|>commentary<|message|>"
        "12<|end|><|start|>assistant<|channel|>final<|message|>Ho",
        content="Hi\nHo",
        thought="12",
    ),
    Case(reasoning="harmony", text="<|channel|>ana", content=""),
]
