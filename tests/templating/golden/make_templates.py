# ruff: noqa: E501 (templates as their authors write them)
"""Golden prompts by transformers' own template engine. Run: python make_templates.py (needs transformers, jinja2).

The templates were written for this test. Those in FAMILIES treat content, tool calls and tool results as published
ones of the families named there do. A case has the messages as a client of the API sends them, arguments as a string
of JSON; transformers got them in the form that the template takes.
"""

import copy
import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather at a place, <now> & é",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "n": 1}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi <b>&'\" \n"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Weather?"},
]
TOOLS_CHAT = [
    *CHAT,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12°", "tool_call_id": "c1"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nDefault<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "tools": """{{ bos_token }}{%- if tools is not none %}
{{- "# Tools\\n" }}
{%- for tool in tools %}{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2) }}
{{ tool.function.name | tojson(separators=(",", ":")) }}
{%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {%- for call in m.tool_calls %}
            {%- for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}
            {{- call.function.arguments | tojson(sort_keys=true) }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}
    {%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' ~ loop.index0 }}{% endif %}
    {%- if m.role == 'tool' %}{{ m.content | replace('°', ' degrees') | upper }}{% break %}{% endif %}
{%- endfor %}""",
    "namespaces": """{% set ns = namespace(n=0, out='') %}
{% macro show(m) -%}[{{ m.role|capitalize }}:{{ m.content.strip()[:5] }}]{%- endmacro %}
{% for m in messages | rejectattr('role', 'equalto', 'system') %}
{% set ns.n = ns.n + 1 %}
{% set ns.out = ns.out ~ show(m) %}
{% endfor %}
{{ ns.n * 2 }} {{ ns.out }} {{ messages|map(attribute='role')|join(',') }} {{ messages[-1].content.split('e') }}
{% filter upper %}done {{ '%s-%03d' % ('a', 7) }}{% endfilter %}
{%- for m in messages[1:] recursive %}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}""",
    "parts": """{% for message in messages %}<{{ message.role }}>
{%- for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}
{% endfor %}""",
}


FAMILIES = {
    # Mistral-Small-3.2, Devstral, Ministral: strings or blocks, ids of nine characters, results as text.
    "mistral": """{{- bos_token }}
{%- set first = messages[0] %}
{%- if first.role == 'system' %}
    {{- '[SYS]' }}{% if first.content is string %}{{ first.content }}{% else %}{{ first.content[0].text }}{% endif %}{{ '[/SYS]' }}
    {%- set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- if tools %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if m.content is string %}{{ '[INST]' + m.content + '[/INST]' }}
        {%- else %}{{ '[INST]' }}{% for block in m.content %}
            {%- if block.type == 'text' %}{{ block.text }}{% else %}{{ '[IMG]' }}{% endif %}
        {%- endfor %}{{ '[/INST]' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {%- if m.content is string %}{{ m.content }}
        {%- elif m.content is iterable %}{% for block in m.content %}{{ block.text }}{% endfor %}{% endif %}
        {%- if m.tool_calls %}{% for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
            {{- '[CALL]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}{% endif %}{{ eos_token }}
    {%- elif m.role == 'tool' %}{{ '[RESULT]' + m.tool_call_id + '|' + (m.content | string) + '[/RESULT]' }}
    {%- else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}
{%- endfor %}""",
    # GLM-4.6, GLM-4.7, MiniMax-M2: a macro that shows content of any form, results as text or a list of outputs.
    "glm": """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools {% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif %}
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{ item.text }}
            {%- elif item is string -%}{{ item }}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = visible(m.content) %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{%- if m.reasoning_content is string %}
<think>{{ m.reasoning_content.strip() }}</think>{% endif %}
{%- if content.strip() %}
{{ content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{% endfor -%}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- else -%}<|observation|>{% for result in m.content %}
<tool_response>
{{ result.output if result.output is defined else result }}
</tool_response>{% endfor %}{% endif -%}
{%- elif m.role == 'system' -%}<|system|>
{{ visible(m.content) }}
{%- endif -%}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    # Kimi-K2: a macro that takes the message.
    "kimi": """{%- macro shown(m) -%}
    {%- set c = m.get('content') -%}
    {%- if c is string -%}{{ c }}
    {%- elif c is not none -%}{% for part in c -%}
        {% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}
    {%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tools<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
<|im_{{ m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>
    {%- if m.role == 'assistant' and m.get('tool_calls') -%}
        {{ shown(m) }}<|calls|>{% for call in m.tool_calls -%}
            <|call|>{{ call.id }}<|args|>
            {%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif -%}
        {%- endfor -%}
    {%- elif m.role == 'tool' -%}## Return of {{ m.tool_call_id }}
{{ shown(m) }}
    {%- elif m.content is not none -%}{{ shown(m) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
    # Gemma 4: the system's text must be a string, others' need not; a call takes in the results after it.
    "gemma": """{{ bos_token }}
{%- set ns = namespace(after_tool=false) %}
{%- if messages[0].role == 'system' or tools %}<|turn>system
{% if messages[0].role == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}
{%- for tool in tools or [] %}<|tool>{{ tool.function.name }}{ {{- tool.function.parameters.properties | dictsort | map('first') | join(',') -}} }<tool|>{% endfor %}<turn|>
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' or m.role == 'system' and loop.first %}{% continue %}{% endif %}
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- for call in m['tool_calls'] or [] %}<|call>{{ call.function.name }}{
        {%- if call.function.arguments is mapping %}{% for key, value in call.function.arguments | dictsort %}
            {{- key }}:{{ '"' ~ value ~ '"' if value is string else value }}{{ '' if loop.last else ',' }}
        {%- endfor %}{% else %}{{ call.function.arguments }}{% endif %}}<call|>
        {%- for answer in messages if answer.role == 'tool' and answer.tool_call_id == call.id %}<|answer>
            {%- if answer.content is string %}{{ answer.content }}
            {%- else %}{% for part in answer.content %}{{ part.text }}{% endfor %}{% endif %}<answer|>
        {%- endfor %}
    {%- endfor %}
    {%- if m['content'] is string %}{{ m['content'] | trim }}
    {%- elif m['content'] is sequence %}{% for item in m['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}""",
    # DeepSeek R1: null content means tool calls, whose arguments are text.
    "deepseek": """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}{{ '<|Assistant|>' }}{% for call in m.tool_calls %}
{{- '<|call|>' + call.type + '<|sep|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}""",
    # Qwen 3: content is looked into, so that null fails.
    "qwen": """{%- if tools %}<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # SmolVLM and other models for images: parts and nothing else.
    "images": """{% for m in messages %}{{ m.role | capitalize }}:
{%- for part in m['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}{% else %}<image>{% endif %}{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}""",
}


def call(place: str, id: str) -> dict:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": {"place": place, "days": 1}}}


def result(text: str, id: str) -> dict:
    return {"role": "tool", "name": "weather", "tool_call_id": id, "content": text}


AGENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Weather <now>?"},
    {"role": "assistant", "content": None, "tool_calls": [call("Köln", "abcdefghi"), call("Rome", "123456789")]},
    result("12°, rain", "abcdefghi"),
    result('{"sky": "clear"}', "123456789"),
    {"role": "assistant", "content": "Rain, sun.", "reasoning_content": "Two places."},
    {"role": "user", "content": "Thanks"},
]


def parts(messages: list[dict]) -> list[dict]:
    return [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]


def text_arguments(messages: list[dict]) -> list[dict]:
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def family_cases() -> list[dict]:
    two = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there "}]
    cases = []
    for name, source in FAMILIES.items():
        joined = [{"role": "user", "content": two if name not in ("deepseek", "qwen") else "Hi\nthere "}]
        seen = {
            "plain": (CHAT, parts(CHAT) if name == "images" else CHAT, None),
            "parts": ([{"role": "user", "content": two}], joined, None),
        }
        if name != "images":
            agent = text_arguments(AGENT) if name == "deepseek" else copy.deepcopy(AGENT)
            if name == "qwen":
                agent[2]["content"] = ""
            seen["agent"] = (text_arguments(AGENT), agent, [TOOL])
        for kind, (messages, given, tools) in seen.items():
            cases += rendered(f"{name} {kind}", source, messages, given, tools)
    return cases


def rendered(name: str, source: str, messages: list[dict], given: list[dict], tools: list[dict] | None) -> list[dict]:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    cases = []
    for prompt in (True, False):
        [text], _ = render_jinja_template(
            [given], tools=tools, chat_template=source, add_generation_prompt=prompt, **variables
        )
        case = {"name": name, "template": source, "messages": messages, "tools": tools, "prompt": prompt}
        cases.append({**case, "variables": variables, "text": text})
    return cases


def main() -> None:
    cases = []
    for name, source in TEMPLATES.items():
        messages, tools = (TOOLS_CHAT, [TOOL]) if name == "tools" else (CHAT, None)
        cases += rendered(name, source, messages, parts(messages) if name == "parts" else messages, tools)
    cases += family_cases()
    Path(__file__).with_name("templates.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
