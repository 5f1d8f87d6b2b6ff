"""What is measured at once, under a name such as decode16, prefill512, ttft16x512 or load."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmjax.errors import ConfigError

DECODE_PROMPT = 32  # tokens of a prompt where the name does not say
LOAD_PROMPT = 8
PATTERNS = {
    "decode": r"decode(?P<streams>\d+)(x(?P<prompt>\d+))?",
    "prefill": r"prefill(?P<prompt>\d+)",
    "ttft": r"ttft(?P<streams>\d+)x(?P<prompt>\d+)",
    "load": r"load",
}
DEFAULT = "decode1,decode16,decode32,prefill512,ttft16x512,load"


@dataclass(frozen=True)
class Point:
    """One measurement.

    ``decode``: a step of all streams, as the time for 1 + n tokens less the time for 1, over n. ``prefill``: one
    prompt to its first token. ``ttft``: several prompts given at once until the last of them has its first token.
    ``load``: the start of a process to its first token.

    Args:
        kind: a key of ``PATTERNS``.
        streams: prompts at once.
        prompt: tokens of each.
    """

    kind: str
    streams: int = 1
    prompt: int = LOAD_PROMPT

    @property
    def name(self) -> str:
        parts = {
            "decode": f"decode, {self.streams} stream{'s' * (self.streams > 1)} after {self.prompt}",
            "prefill": f"prefill of {self.prompt}",
            "ttft": f"first token, {self.streams} × {self.prompt}",
            "load": "start to first token",
        }
        return parts[self.kind]

    @property
    def key(self) -> str:
        """What `parse_point` takes for it."""
        keys = {
            "decode": f"decode{self.streams}x{self.prompt}",
            "prefill": f"prefill{self.prompt}",
            "ttft": f"ttft{self.streams}x{self.prompt}",
            "load": "load",
        }
        return keys[self.kind]

    @property
    def tokens(self) -> int | None:
        """Tokens that the measured time is for; None: a speed would say nothing."""
        return {"decode": self.streams, "prefill": self.prompt, "ttft": self.streams * self.prompt}.get(self.kind)


def parse_points(text: str) -> list[Point]:
    """The points of a list such as ``decode1,decode16x1024,prefill512,ttft16x512,load``.

    Raises:
        ConfigError: a name is none of these.
    """
    return [parse_point(name.strip()) for name in text.split(",")]


def parse_point(name: str) -> Point:
    """One of `parse_points`."""
    for kind, pattern in PATTERNS.items():
        match = re.fullmatch(pattern, name, re.ASCII)
        if match is None:
            continue
        numbers = {key: int(value) for key, value in match.groupdict().items() if value is not None}
        if kind == "decode":
            numbers.setdefault("prompt", DECODE_PROMPT)
        if 0 in numbers.values():
            break
        return Point(kind, **numbers)
    raise ConfigError(
        f"--points: {name!r} is none of decodeN, decodeNxLENGTH, prefillLENGTH, ttftNxLENGTH (from 1 up) and load"
    )
