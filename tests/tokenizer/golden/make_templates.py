"""Golden prompts by transformers' own template engine. Run: python make_templates.py (needs transformers, jinja2)."""

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


def parts(messages: list[dict]) -> list[dict]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def main() -> None:
    cases = []
    for name, source in TEMPLATES.items():
        messages, tools = (TOOLS_CHAT, [TOOL]) if name == "tools" else (CHAT, None)
        seen = parts(messages) if name == "parts" else messages
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        for prompt in (True, False):
            [text], _ = render_jinja_template(
                [seen], tools=tools, chat_template=source, add_generation_prompt=prompt, **variables
            )
            case = {"name": name, "template": source, "messages": messages, "tools": tools, "prompt": prompt}
            cases.append({**case, "variables": variables, "text": text})
    Path(__file__).with_name("templates.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
