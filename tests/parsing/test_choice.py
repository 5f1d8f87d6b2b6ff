"""Parsers by the marks in chat templates, and by name."""

from __future__ import annotations

import pytest

from llmjax.errors import ConfigError
from llmjax.parsing.choice import (
    DESCRIBED,
    HARMONY,
    REASONING_ALIASES,
    TOOL_ALIASES,
    UNREAD,
    Parsers,
    check_reasoning_parser,
    check_tool_parser,
    reads,
    tools_variable,
)
from llmjax.parsing.families import TOOLS
from llmjax.parsing.reasoning import REASONING

pytestmark = pytest.mark.smoke

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
    ("{{ tools }}<minimax:tool_call></think><response></response>", "minimax_m2", "think"),  # its tools respond
    ("{{ tools }}]<]minimax[>[ <tool_call> <mm:think></mm:think><response></response>", "minimax_m3", "minimax_m3"),
    ("{{ tools }}<think></think><response></response>", None, "granite33"),
    ("{{ tools }}'<|open|>' + tag '<|close|>' '<|sep|>' open_tag('tools')", "kimi_k3", "kimi_k3"),
    ('{{ tools }}<tool_call><function name="f"><param name="a"></param></think>', "minicpm5", "think"),
    ("{{ tools }}<|START_ACTION|><|END_THINKING|><|START_TEXT|>", "cohere", "cohere"),
    ("{{ tools }}function call <|role_sep|> <|message_sep|>", "gigachat3", None),
    ("{{ tools }}<|function_call|>", "gigachat3", None),
    ("{{ tools }}function call <|role_sep|> <｜GCML｜tool_calls> </think>", "gigachat35", "think"),
    ('{{ tools }}Action: ```json [{ "tool_name": title, "parameters": {} }]```', "command_r", None),
    ("{{ tools }}>>>all <|start_header_id|> <function=", "functionary_v3", None),
    ("{{ tools }}<function=example>{}</function><|python_tag|>", "functionary", None),
    ("{{ tools }}<seed:tool_call><function=f><parameter=a></seed:think>", "seed_oss", "seed_oss"),
    ("{{ tools }}<|plamo:begin_tool_requests:plamo|><|plamo:end_think:plamo|>", "plamo3", "plamo3"),
    ("{{ tools }}<dots_function_call><invoke name=", "dots", None),
    ("{{ tools }}<｜tool_calls_begin｜><｜tool_call_begin｜>", "step3", None),
    ("{{ tools }}<ifm|tool_call></ifm|think>", "k2_horizon", "k2_horizon"),
    ("{{ tools }}<tool_calls><tool_call><tool_sep><arg_key></think>", "hy_v3", "think"),
    ("{{ tools }}<｜DSML｜ calls><｜DSML｜ invoke</think>", "deepseek_v41", "think"),
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


# Those that vLLM 0.33 registers.
VLLM_TOOLS = """
apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41
dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b
hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json
llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai
phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam
"""
VLLM_REASONING = """
beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45
glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2 kimi_k3
ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse muse_glimmer musespark1x
nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5 step5
"""


def test_names_of_vllm_are_known() -> None:
    assert (len(VLLM_TOOLS.split()), len(VLLM_REASONING.split())) == (58, 42)
    for names, check, own in (
        (VLLM_TOOLS.split(), check_tool_parser, {*TOOLS}),
        (VLLM_REASONING.split(), check_reasoning_parser, {*REASONING, HARMONY}),
    ):
        for name in names:
            if name in UNREAD:
                with pytest.raises(ConfigError, match=f"nearest here is '{UNREAD[name][0]}'"):
                    check(name)
            else:
                assert check(name) in own


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
