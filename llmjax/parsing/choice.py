"""Which parsers a model's output needs: by the text of its chat template, or by name."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from llmjax.errors import ConfigError
from llmjax.parsing.families import CONTENT, FRAMES, TOOLS
from llmjax.parsing.grammar import Grammar, Role, State
from llmjax.parsing.reasoning import REASONING, ReasoningFamily
from llmjax.settings import nearest

AUTO, NONE = "auto", "none"
DESCRIBED = "hermes"  # how a model is asked to write calls if its template knows no tools
HARMONY = "harmony"  # gpt-oss writes both in one language

# What a template must hold, all of it, to be of a family; the first family that fits is taken.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("plamo3", ("plamo:begin_tool_request",)),
    ("deepseek_v41", ("DSML｜ calls",)),
    ("deepseek_v32", ("DSML", "function_calls")),
    ("deepseek_v4", ("DSML",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("dots", ("<dots_function_call>",)),
    ("step3", ("<｜tool_call_begin｜>",)),
    ("k2_horizon", ("<ifm|tool_call>",)),
    ("hy_v3", ("<arg_key>", "<tool_calls>")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("functionary_v3", (">>>all",)),
    ("functionary", ("<function=",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("internlm", ("<|action_start|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gigachat35", ("｜GCML｜",)),
    ("gigachat3", ("function call", "<|role_sep|>")),
    ("gigachat3", ("<|function_call|>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("command_r", ("Action:", "tool_name", "```json")),
    ("nemotron", ("<TOOLCALL>",)),
    ("minimax", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
    ("phi4", ("functools",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<function_call>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("func_name1(",)),
    ("xlam", ("func_name1", "arguments")),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "tools")),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("glm4", ("<|observation|>",)),
    ("gemma3", ("```tool_code",)),
)
_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("minimax_m3", ("</mm:think>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("plamo3", ("plamo:end_think",)),
    ("k2_horizon", ("</ifm|think>",)),
    ("mistral", ("[/THINK]",)),
    ("seed_oss", ("</seed:think>",)),
    ("cohere", ("<|END_THINKING|>",)),
    ("gemma4", ("<|channel>",)),
    ("kimi_vl", ("◁/think▷",)),
    ("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    ("think", ("</think>", "<minimax:tool_call>")),  # whose results of tools are responses
    ("granite33", ("</think>", "</response>")),
    ("hunyuan", ("</think>", "</answer>")),
    ("think", ("</think>",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)),
    ("granite", ("Here is my response:",)),
    ("exaone", ("</thought>",)),
    ("apertus", ("<|inner_suffix|>",)),
)

# Names that vLLM and SGLang have for the same.
TOOL_ALIASES = {
    "openai": HARMONY,
    "gpt_oss": HARMONY,
    "gpt-oss": HARMONY,
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "ernie45": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "hy_v4": "hy_v3",
    "granite-20b-fc": "granite",
    "phi4_mini_json": "phi4",
    "jamba": "minimax",
    "hunyuan_a13b": "minimax",
    "minimax-m2": "minimax_m2",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "gemma": "gemma3",
    "nemotron_json": "nemotron",
}
REASONING_ALIASES = {
    "openai_gptoss": HARMONY,
    "gpt-oss": HARMONY,
    "gpt_oss": HARMONY,
    "deepseek-r1": "deepseek_r1",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "hunyuan_a13b": "hunyuan",
    "ernie45": "granite33",  # whose answer stands between the same markers
    **dict.fromkeys(
        (
            "qwen3",
            "qwq",
            "deepseek_v3",
            "deepseek-v3",
            "deepseek_v31",
            "deepseek_v32",
            "glm45",
            "glm47",
            "step3",
            "step3p5",
            "minimax_m2",
            "minimax_m2_append_think",
            "nemotron_v3",
            "nano_v3",
            "olmo3",
            "holo2",
            "deepseek_v4",
            "deepseek_v41",
            "granite_thinking_parser",
            "hy_v3",
            "hy_v4",
            "ling3",
            "minicpmv",
            "poolside_v1",
            "step5",
            "mimo",
        ),
        "think",
    ),
}

# Names that vLLM has for what is not read here, with what is nearest to it.
UNREAD = {
    "hf": (AUTO, "reads what a checkpoint's response_template says"),
    "beam": (AUTO, "reads what a checkpoint's response_template says"),
    "muse": (HARMONY, "reads messages to recipients"),
    "muse_glimmer": (HARMONY, "reads messages to recipients"),
    "musespark1x": (HARMONY, "reads messages to recipients"),
    "inkling": (HARMONY, "reads messages in typed blocks"),
}


def check_tool_parser(name: str) -> str:
    """The parser's own name, ``auto`` or ``none``. Raises ``ConfigError``: there is no such parser."""
    return _checked(name, known={*TOOLS}, aliases=TOOL_ALIASES, setting="tool_call_parser")


def check_reasoning_parser(name: str) -> str:
    """The reasoning parser's own name, ``auto`` or ``none``. Raises ``ConfigError``: there is no such parser."""
    return _checked(name, known={*REASONING, HARMONY}, aliases=REASONING_ALIASES, setting="reasoning_parser")


def _checked(name: str, *, known: set[str], aliases: dict[str, str], setting: str) -> str:
    name = aliases.get(name, name)
    if name in UNREAD:
        near, does = UNREAD[name]
        raise ConfigError(
            f"{setting} {name!r}: vLLM's parser of that name {does}, which is not supported; the nearest "
            f"here is {near!r}"
        )
    if name not in known and name not in (AUTO, NONE):
        names = ", ".join(sorted(known | aliases.keys()))
        raise ConfigError(f"{setting} {name[:80]!r} is not known{nearest(name, known | aliases.keys())} ({names})")
    return name


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """The families of a model's output.

    Args:
        tools: how it writes calls; None: it is not known.
        reasoning: how it writes what it thinks; None: it does not.
    """

    tools: str | None
    reasoning: str | None

    @staticmethod
    def of(template: str, *, tools: str = AUTO, reasoning: str = AUTO) -> Parsers:
        """The parsers for a chat template.

        Args:
            template: its source.
            tools: a parser's checked name, ``auto`` or ``none``.
            reasoning: likewise.
        """
        if tools == AUTO:
            tools = _by_signs(template, _TOOL_SIGNS) if tools_variable(template) else DESCRIBED
        if reasoning == AUTO:
            reasoning = _by_signs(template, _REASONING_SIGNS)
        return Parsers(tools=None if tools == NONE else tools, reasoning=None if reasoning == NONE else reasoning)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """What opens reasoning, and what closes it so that the answer follows; None: the model does not reason."""
        if self.reasoning == HARMONY:
            return "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
        family = REASONING.get(self.reasoning or "")
        return None if family is None else (family.start, family.end)

    @property
    def reasoning_end(self) -> str | None:
        """What reasoning ends with, whatever follows; None: the model does not reason."""
        if self.reasoning == HARMONY:
            return "<|end|>"
        family = REASONING.get(self.reasoning or "")
        return None if family is None else family.end

    def grammar(self, *, with_tools: bool, prompt: str) -> Grammar | None:
        """The language of an answer; None: all of it is content.

        Args:
            with_tools: whether the answer may hold calls.
            prompt: the text that it follows.
        """
        if self.reasoning is None and (self.tools is None or (not with_tools and self.tools not in FRAMES)):
            return None
        grammar = _grammar(self.tools, self.reasoning, with_tools)
        family = REASONING.get(self.reasoning or "")
        if family is None:
            return grammar
        end = prompt[-256:].rstrip()
        inside = end.endswith(family.start) or (family.open and not end.endswith(family.end))
        return replace(grammar, initial="reasoning") if inside else grammar


def reads(template: str, variable: str) -> bool:
    """Whether a template knows a variable."""
    return re.search(rf"\b{variable}\b", template) is not None


def switches_of_thinking(template: str) -> list[str]:
    """The variable by which a template is told whether the model is to think, if there is one."""
    if reads(template, "enable_thinking"):
        return ["enable_thinking"]
    return ["thinking"] if "thinking is defined" in template else []


def tools_variable(template: str) -> str | None:
    """The variable in which a template wants tools; None: it knows none."""
    return next((name for name in ("tools", "xml_tools") if reads(template, name)), None)


def _by_signs(template: str, signs: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return next((name for name, marks in signs if all(mark in template for mark in marks)), NONE)


@functools.cache
def _grammar(tools: str | None, reasoning: str | None, with_tools: bool) -> Grammar:
    calls = tools is not None and with_tools
    if reasoning == HARMONY and (tools == HARMONY or not calls):
        return TOOLS[HARMONY] if calls else _without_calls(TOOLS[HARMONY])
    if tools is not None and calls:
        grammar = TOOLS[tools]
    else:
        grammar = FRAMES.get(tools or "", Grammar(states={"content": CONTENT}))
    return grammar if reasoning not in REASONING else _reasoning_before(grammar, REASONING[reasoning], calls=calls)


def _reasoning_before(grammar: Grammar, family: ReasoningFamily, *, calls: bool) -> Grammar:
    content = grammar.states["content"]
    again = {family.start: "reasoning"} if family.again else {}
    states = {
        **grammar.states,
        "content": replace(content, edges={**content.edges, **dict.fromkeys(family.dropped, "content"), **again}),
        "opening": State(role=Role.START, edges={family.start: "reasoning"}, then=grammar.initial),
        "reasoning": State(role=Role.REASONING, edges={family.end: grammar.initial}),
    }
    return replace(grammar, states=states, initial="opening", thoughts=_in_thoughts(grammar) if calls else None)


def _in_thoughts(grammar: Grammar) -> Grammar:
    """How calls are found within other text; those that have no marker begin a line."""
    content, start = grammar.states["content"], grammar.states[grammar.initial]
    if not grammar.known_tools or start.role is not Role.START or "content" in start.edges.values():
        return grammar.beginning("content")
    lines = replace(content, edges={**content.edges, "\n": grammar.initial})
    return replace(grammar, states={**grammar.states, "content": lines})


def _without_calls(harmony: Grammar) -> Grammar:
    header = harmony.states["header"]
    routes = tuple((pattern, state) for pattern, state in header.routes if state != "arguments")
    return replace(harmony, states={**harmony.states, "header": replace(header, routes=routes)})
