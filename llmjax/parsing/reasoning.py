"""How families write what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningFamily:
    """Reasoning between two markers.

    Args:
        start: opens it; where the template writes it, the prompt ends with it.
        end: closes it.
        again: it may also begin after content.
        open: the output begins inside, whether the prompt shows ``start`` or not, unless it shows ``end``.
        dropped: markers around the answer, which do not belong to it.
    """

    start: str
    end: str
    again: bool = False
    open: bool = False
    dropped: tuple[str, ...] = ()


REASONING: dict[str, ReasoningFamily] = {
    "think": ReasoningFamily(start="<think>", end="</think>"),
    "deepseek_r1": ReasoningFamily(start="<think>", end="</think>", open=True),
    "kimi_k2": ReasoningFamily(start="<think>", end="</think>"),
    "mistral": ReasoningFamily(start="[THINK]", end="[/THINK]"),
    "granite33": ReasoningFamily(start="<think>", end="</think>", dropped=("<response>", "</response>")),
    "hunyuan": ReasoningFamily(start="<think>", end="</think>", dropped=("<answer>", "</answer>")),
    "apriel": ReasoningFamily(start="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
    "granite": ReasoningFamily(start="Here is my thought process:", end="Here is my response:"),
    "seed_oss": ReasoningFamily(start="<seed:think>", end="</seed:think>"),
    "cohere": ReasoningFamily(
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "gemma4": ReasoningFamily(start="<|channel>thought", end="<channel|>", again=True, dropped=("<channel|>",)),
    "minimax_m3": ReasoningFamily(start="<mm:think>", end="</mm:think>"),
    "kimi_k3": ReasoningFamily(
        start="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "plamo3": ReasoningFamily(start="<|plamo:begin_think:plamo|>", end="<|plamo:end_think:plamo|>"),
    "k2_horizon": ReasoningFamily(start="<ifm|think>", end="</ifm|think>"),
    "kimi_vl": ReasoningFamily(start="◁think▷", end="◁/think▷"),
    "exaone": ReasoningFamily(start="<thought>", end="</thought>"),
    "apertus": ReasoningFamily(start="<|inner_prefix|>", end="<|inner_suffix|>"),
}
