"""Short ways to write the rows of a table."""

from __future__ import annotations

from typing import Any

from llmjax.migration.answers import ForeignFlag, Takes

KERNELS = "llmjax picks its own kernels; llmjax doctor says which"
PARALLEL = "not supported yet; --tensor-parallel-size N divides every layer over N devices"
CHUNKS = "prompts are computed in chunks of --max-num-batched-tokens, which gives the same answers"
MEDIA = "images are prepared as the model's own processor says, and there are no other media"
DRAFT_MODEL = "a draft model has the device, the length and the pages of the model"
VERIFICATION = "drafts are verified exactly, whatever the request asks for"


def ours(names: str) -> list[ForeignFlag]:
    """Flags that are ours too, by the same name."""
    return [ForeignFlag(spellings=(name,)) for name in names.split()]


def alias(names: str, setting: str, *, neutral: str = "", takes: Takes = Takes.VALUE, **more: Any) -> list[ForeignFlag]:
    """A flag with another name here."""
    return [_row(names, neutral=neutral, setting=setting, takes=takes, **more)]


def means(names: str, setting: str, on: Any, *, off: Any = None) -> list[ForeignFlag]:
    """A switch that stands for a value of a setting; turned off it means ``off``, or nothing."""
    words = {"true": on} if off is None else {"true": on, "false": off}
    return [_row(names, neutral="" if off is not None else "false", setting=setting, takes=Takes.SWITCH, words=words)]


def accepted(names: str, note: str = "", *, neutral: str = "", takes: Takes = Takes.VALUE) -> list[ForeignFlag]:
    """Flags, separated by ``|``, that have nothing to do here; values that are not neutral are noted."""
    return [_row(flag, neutral=neutral, note=note, takes=takes) for flag in names.split("|")]


def refused(names: str, refusal: str, *, neutral: str = "", takes: Takes = Takes.VALUE) -> list[ForeignFlag]:
    """Flags, separated by ``|``, that cannot be had; values that are neutral change nothing."""
    return [_row(flag, neutral=neutral, refusal=refusal, takes=takes) for flag in names.split("|")]


def _row(names: str, *, neutral: str, takes: Takes, **more: Any) -> ForeignFlag:
    words = frozenset(neutral.split())
    if takes in (Takes.SWITCH, Takes.NOTHING) and "setting" not in more and not words:
        words = frozenset({"false"})
    return ForeignFlag(spellings=tuple(names.split()), neutral=words, takes=takes, **more)
