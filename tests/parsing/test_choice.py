"""Parsers by the marks in chat templates, and by name."""

from __future__ import annotations

import pytest

from llmjax.errors import ConfigError
from llmjax.parsing.choice import (
    DESCRIBED,
    HARMONY,
    REASONING_ALIASES,
    TOOL_ALIASES,
    Parsers,
    check_reasoning_parser,
    check_tool_parser,
    reads,
    tools_variable,
)
from llmjax.parsing.families import TOOLS
from llmjax.parsing.reasoning import REASONING

# What published templates of these families hold.
TEMPLATES = [
    ("{{ tools }}<tool_call>\n{}\n</tool_call>", "hermes", None),
    ("{{ tools }}<tool_call></tool_call><think>\n\n</think>", "hermes", "think"),
    ("{{ tools }}<tool_call><function=f><parameter=a></tool_call>", "qwen3_coder", None),
    ("{{ tools }}<tool_call>{{ '<arg_key>' }}</think>", "glm45", "think"),
    ("{{ tools }}<|python_tag|><|start_header_id|>", "llama3_json", None),
    ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    ("{{ tools }}[TOOL_CALLS][THINK][/THINK]", "mistral", "mistral"),
    ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜>```json</think>", "deepseek_v3", "think"),
    ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜></think>", "deepseek_v31", "think"),
    ("{{ tools }}｜DSML｜ function_calls</think>", "deepseek_v32", "think"),
    ("{{ tools }}<|channel|>analysis<|message|>", HARMONY, HARMONY),
    ("{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|><think></think>", "kimi_k2", "kimi_k2"),
    ("{{ tools }}<minimax:tool_call></think>", "minimax_m2", "think"),
    ("{{ tools }}<|tool_call|>", "granite", None),
    ("{{ tools }}<|tool|><|/tool|>", "phi4", None),
    ("{{ tools }}<|tool_list_start|>", "lfm2", None),
    ("{{ tools }}<|tool_call><tool_call|><|channel>thought<channel|>", "gemma4", "gemma4"),
    ("{{ tools }}>>>all", "functionary_v3", None),
    ("{{ xml_tools }}<tool_call>", "hermes", None),
    ("{{ tools }}", None, None),
    ("{{ messages }}", DESCRIBED, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES, ids=lambda value: str(value)[:30])
def test_by_template(template: str, tools: str | None, reasoning: str | None) -> None:
    assert Parsers.of(template) == Parsers(tools=tools, reasoning=reasoning)


def test_by_name() -> None:
    assert all(check_tool_parser(name) == name for name in (*TOOLS, "auto", "none"))
    assert {check_tool_parser(name) for name in TOOL_ALIASES} <= {*TOOLS}
    assert {check_reasoning_parser(name) for name in (*REASONING, *REASONING_ALIASES)} <= {*REASONING, HARMONY}
    with pytest.raises(ConfigError, match="did you mean mistral"):
        check_tool_parser("mistrall")


def test_variables() -> None:
    assert reads("{% if tools %}", "tools") and not reads("{% if xml_tools %}", "tools")
    assert [tools_variable(text) for text in ("{{ tools }}", "{{ xml_tools }}", "")] == ["tools", "xml_tools", None]


def test_no_grammar_is_needed_for_plain_text() -> None:
    parsers = Parsers(tools="hermes", reasoning=None)
    assert parsers.grammar(with_tools=False, prompt="") is None
    made = parsers.grammar(with_tools=True, prompt="")
    assert made is not None and set(made.markers) >= {"<tool_call>", "</tool_call>"}


def test_every_way_leads_to_a_state() -> None:
    for reasoning in (None, "think", "kimi_k2", HARMONY):
        for tools in TOOLS:
            grammar = Parsers(tools=tools, reasoning=reasoning).grammar(with_tools=True, prompt="")
            assert grammar is not None
            for name, state in grammar.states.items():
                ways = [*state.kept.values(), state.then, *(target for _, target in state.routes)]
                ways += [] if state.routes else [*state.edges.values()]
                assert {*ways} <= {*grammar.states}, (tools, name)
