"""docs/flags.md, written from the tables by ``python -m tests.pages``."""

from __future__ import annotations

from collections.abc import Mapping

from llmjax.config import Alias, EngineConfig, ServerConfig
from llmjax.migration import candle_vllm, vllm_bench
from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.tables import PROGRAMS
from llmjax.settings import Setting, settings_of

HEAD = """# Flags of other programs

A command line for vLLM, candle-vLLM or llama-server starts `llmjax serve` too, or is told in one line what differs.
`python -m vllm.entrypoints.openai.api_server` is `python -m serve`, with the same flags, `--model` among them.
Arguments of vLLM's `LLM(…)` and keys of its YAML files are the flags without dashes in front, with the same answers.
This page is written from the tables in `llmjax/migration/` by `python -m tests.pages`.

Flags may have underscores for dashes and `=` before their value; a switch `--x` also has `--no-x`; `--x.key value` sets
one key of a flag that takes JSON, and empty values (`none`, `{}`, `[]`) are what is not given. *Noted* flags are
accepted, and a line on stderr says why nothing comes of them; *refused* ones end the start with that sentence.
"""


ABOUT = {
    "candle-vLLM": """
A command line that names its model by one of {flags} starts a server that takes requests by any model name and cuts
`max_tokens` to what fits, as candle-vLLM's does, and says so; `--served-model-name` and `--no-cut-max-tokens` have it
otherwise.
"""
}
BENCHMARKS = {
    "vllm bench serve": vllm_bench.SERVE,
    "vllm bench latency, throughput and startup": vllm_bench.OFFLINE,
}
BENCH = """
`llmjax bench` has the other flags of vLLM's benchmarks under the same names (`llmjax bench serve --help`), and results
have the same fields. Without `--base-url`, `--host` or `--port` it starts a server for the run, and defaults are
smaller: 100 prompts of 128 tokens. Without `--api-key` or a header `Authorization` the key is that of the environment,
`OPENAI_API_KEY`.

`llmjax bench startup` times cold and warm starts; its result has no time of compilation, for that goes on while an
engine serves: instead `programs` is the time until all programs are there. `llmjax bench sweep serve` and `sweep
startup` run commands with one combination of flags after another, with vLLM's files and flags; a server of llmjax gets
a key for the sweep, without which it would not forget its cached prefixes between runs. `sweep plot` and `plot_pareto`
draw the results with vLLM's flags and need matplotlib alone; beside a curve of means they shade what lies between the
least and the greatest, and files are named by what is drawn unless `--fig-name` says otherwise. `sweep serve_workload`
measures one request at a time, all at once, and loads between the two. There is no `mm-processor`: pictures are
prepared in processes of a server. `llmjax complete` and `collect-env` are vLLM's, and `llmjax chat` has its `--quick`,
`--model-name` and `--system-prompt`; without `--url` it talks to an engine of its own. A line after each answer says
how long it is and how fast it came: with `--quick` only with `--stats`, else not with `--no-stats`.
"""


def page() -> str:
    """The page as Markdown."""
    settings = {**settings_of(EngineConfig), **settings_of(ServerConfig)}
    parts = [HEAD]
    for program, flags in PROGRAMS.items():
        rows = [f"| {_names(flag)} | {answer(flag, settings)} |" for flag in flags]
        about = ABOUT.get(program, "").format(flags=", ".join(f"`{flag}`" for flag in sorted(candle_vllm.MODEL_FLAGS)))
        parts.append("\n".join([f"\n## {program}\n{about}", "| flag | here |", "|---|---|", *rows, ""]))
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
    if "true" in flag.neutral:  # of a switch
        return f"changes nothing; its `--no-` form is `{setting.flag} {flag.words['false']}`"
    if flag.takes in (Takes.SWITCH, Takes.NOTHING):
        return f"`{setting.flag} {words['true']}`".replace(" True`", "`")
    key = f", its key `{flag.key}`" if flag.key else ""
    meanings = "".join(f"; `{word}` is `{value}`" for word, value in flag.words.items())
    nothing = f"noted: {flag.note}" if flag.note else "changes nothing"
    return f"`{setting.flag}`{key}{meanings}" + (f"; {neutral} {nothing}" if neutral else "")


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
