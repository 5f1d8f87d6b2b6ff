"""docs/flags.md, written from the tables: ``python -m llmjax.migration.page > docs/flags.md``."""

from __future__ import annotations

from collections.abc import Mapping

from llmjax.config import Alias, EngineConfig, ServerConfig
from llmjax.migration import vllm_bench
from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.tables import PROGRAMS
from llmjax.settings import Setting, settings_of

HEAD = """# Flags of other programs

A command line for vLLM, candle-vLLM or llama-server starts `llmjax serve` too, or is told in one line what differs.
Arguments of vLLM's `LLM(…)` and keys of its YAML files are the flags without dashes in front, with the same answers.
This page is written from the tables in `llmjax/migration/` by `python -m llmjax.migration.page`.

Flags may have underscores for dashes and `=` before their value; a switch `--x` also has `--no-x`; `--x.key value` sets
one key of a flag that takes JSON, and empty values (`none`, `{}`, `[]`) are what is not given. *Noted* flags are
accepted, and a line on stderr says why nothing comes of them; *refused* ones end the start with that sentence.
"""


BENCHMARKS = {
    "vllm bench serve": vllm_bench.SERVE,
    "vllm bench latency and throughput": vllm_bench.OFFLINE,
}
BENCH = """
`llmjax bench` has the other flags of vLLM's benchmarks under the same names (`llmjax bench serve --help`), and results
have the same fields. Without `--base-url`, `--host` or `--port` it starts a server for the run, and defaults are
smaller: 100 prompts of 128 tokens.
"""


def page() -> str:
    """The page as Markdown."""
    settings = {**settings_of(EngineConfig), **settings_of(ServerConfig)}
    parts = [HEAD]
    for program, flags in PROGRAMS.items():
        rows = [f"| {_names(flag)} | {answer(flag, settings)} |" for flag in flags]
        parts.append("\n".join([f"\n## {program}\n", "| flag | here |", "|---|---|", *rows, ""]))
    for command, flags in BENCHMARKS.items():
        rows = [f"| {_names(flag)} | {answer(flag, settings)} |" for flag in flags]
        about = BENCH if flags is vllm_bench.SERVE else ""
        parts.append("\n".join([f"\n## {command}\n{about}", "| flag | here |", "|---|---|", *rows, ""]))
    return "".join(parts)


def answer(flag: ForeignFlag, settings: Mapping[str, Setting]) -> str:
    """What becomes of a flag, as a cell of the table."""
    neutral = ", ".join(f"`{word}`" for word in sorted(flag.neutral) if word != "false" or len(flag.neutral) > 1)
    if flag.setting is not None:
        return _meaning(flag, settings[flag.setting], neutral)
    if flag.ours:
        return _ours(flag.spellings[0], settings)
    if flag.refusal:
        rest = "others are" if neutral else "is"
        return (f"{neutral} {'change' if ',' in neutral else 'changes'} nothing; " if neutral else "") + (
            f"{rest} refused: {flag.refusal}"
        )
    if not flag.note:
        return "accepted: it is always so, or has nothing to change"
    return (f"{neutral} silently; " if neutral else "") + f"noted: {flag.note}"


def _meaning(flag: ForeignFlag, setting: Setting, neutral: str) -> str:
    words = {word: value for word, value in flag.words.items() if word != "false"}
    if flag.takes in (Takes.SWITCH, Takes.NOTHING):
        return f"`{setting.flag} {words['true']}`".replace(" True`", "`")
    key = f", its key `{flag.key}`" if flag.key else ""
    said = "".join(f"; `{word}` is `{value}`" for word, value in flag.words.items())
    return f"`{setting.flag}`{key}{said}" + (f"; {neutral} changes nothing" if neutral else "")


def _ours(name: str, settings: Mapping[str, Setting]) -> str:
    if name == "--config":
        return "the same: a YAML file"
    for setting in settings.values():
        for alias in (Alias(setting.flag), *setting.aliases):
            if alias.flag == name and name == setting.flag:
                return "the same"
            if alias.flag == name:
                value = "" if alias.value is None else f" {alias.value}"
                unit = f" (in units of {alias.unit})" if alias.unit != 1 else ""
                return f"`{setting.flag}{value}`{unit}"
    for flags in PROGRAMS.values():
        for flag in flags:
            if name in flag.spellings and not flag.ours:
                return answer(flag, settings)
    raise KeyError(name)


def _names(flag: ForeignFlag) -> str:
    return ", ".join(f"`{name}`" for name in flag.spellings)


if __name__ == "__main__":
    print(page(), end="")
