"""The commands of the console script, and the way to one of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from llmjax.errors import ConfigError
from llmjax.settings import nearest


@dataclass(frozen=True)
class Command:
    """A command: the module whose ``main(argv)`` runs it, imported when it is asked for, and its line of help."""

    module: str
    help: str


@dataclass(frozen=True)
class Group:
    """Commands with a name in common.

    Attributes:
        kind: what they are.
        help: the group's line of help.
        commands: by name.
        about: what the program says of itself.
        first: what it says after its help to someone who gives no command.
        refused: why there are no commands of these names, which others have.
    """

    kind: str
    help: str
    commands: Mapping[str, Command | Group]
    about: str = ""
    first: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


SWEEPS = Group(
    "sweep",
    "measure with one combination of flags after another",
    MappingProxyType(
        {
            "serve": Command("llmjax.bench.sweep_serve", "a server, by a benchmark of it"),
            "serve_workload": Command(
                "llmjax.bench.sweep_serve_workload", "a server under loads from one request at a time to all at once"
            ),
            "startup": Command("llmjax.bench.sweep_startup", "starts of an engine"),
            "plot": Command("llmjax.bench.sweep_plot", "draw curves of the results"),
            "plot_pareto": Command(
                "llmjax.bench.sweep_plot_pareto", "draw what a user gets against what a device makes"
            ),
        }
    ),
)
BENCHMARKS = Group(
    "benchmark",
    "measure latency, throughput, starts or a server",
    MappingProxyType(
        {
            "latency": Command("llmjax.bench.latency", "time batches of equal requests, one batch after the other"),
            "throughput": Command("llmjax.bench.throughput", "time many prompts through the engine in this process"),
            "serve": Command("llmjax.bench.serve", "send requests to a server over HTTP and time the streams"),
            "vision": Command("llmjax.bench.vision", "time pictures: the encoder, the prompt and the answer"),
            "startup": Command("llmjax.bench.startup", "time starts of an engine, cold and warm"),
            "sweep": SWEEPS,
        }
    ),
    refused=MappingProxyType(
        dict.fromkeys(
            ("mm-processor", "mm_processor"),
            "llmjax bench vision times that, too",
        )
    ),
)
EVALUATIONS = Group(
    "evaluation",
    "measure how good a model is as it is served",
    MappingProxyType(
        {
            "perplexity": Command(
                "llmjax.cli.perplexity", "how well the model predicts a text, to compare weights and KV types"
            ),
            "plot": Command("llmjax.cli.eval_plot", "draw perplexities by scheme"),
        }
    ),
)
COMMANDS = Group(
    "command",
    "",
    MappingProxyType(
        {
            "serve": Command("llmjax.cli.serve", "serve a model over HTTP with OpenAI's API"),
            "generate": Command("llmjax.cli.generate", "continue prompts from arguments, a file or standard input"),
            "run-batch": Command("llmjax.cli.run_batch", "answer a file of requests, as OpenAI's batches, offline"),
            "chat": Command("llmjax.cli.chat", "talk to a model in the terminal"),
            "complete": Command("llmjax.cli.complete", "have a running server continue texts, in the terminal"),
            "bench": BENCHMARKS,
            "pull": Command("llmjax.cli.pull", "fetch a model before it is needed"),
            "list": Command("llmjax.cli.list_models", "list the models on this machine, with their sizes"),
            "show": Command("llmjax.cli.show", "show one of them: files, size, architecture, template, license"),
            "rm": Command("llmjax.cli.rm", "remove models from this machine"),
            "inspect": Command("llmjax.cli.inspect", "show what a model's files hold, without loading them"),
            "eval": EVALUATIONS,
            "quantize": Command("llmjax.cli.quantize", "write a model with quantized weights, as GGUF or safetensors"),
            "tune": Command("llmjax.cli.tune", "measure this machine for a model, and write settings for llmjax serve"),
            "doctor": Command("llmjax.cli.doctor", "show what this machine has and what llmjax would use of it"),
            "collect-env": Command("llmjax.cli.collect_env", "show the same, for a report of a bug"),
            "completion": Command("llmjax.cli.completion", "have a shell complete commands and flags"),
            "version": Command("llmjax.cli.version", "print the versions of llmjax and JAX"),
        }
    ),
    about="LLM inference and serving on JAX: CPUs, NVIDIA GPUs and any PJRT device.",
    first="""To begin:
  llmjax serve --config smollm2  serve a small model (98 MB, fetched at the first start), with a chat page at
                                 http://localhost:8000/
  llmjax serve Qwen/Qwen3-0.6B   serve a model of Hugging Face
  llmjax serve                   pick one of the models on this machine
  llmjax chat                    talk to the small model in the terminal
  llmjax tune                    measure this machine, and write settings for llmjax serve --config
  llmjax doctor                  see what this machine has, and what is missing""",
    refused=MappingProxyType(
        {
            "launch": "a server is not put together of parts; llmjax serve starts all of it",
            "preload": "llmjax pull fetches a model; llmjax serve does so when it first needs it, and keeps it",
            "snapshot": "llmjax serve keeps its compiled programs by itself (--compilation-cache-dir)",
        }
    ),
)


def dispatch(program: str, group: Group, argv: list[str]) -> int:
    """Runs the command that the first argument names, or prints the group's help.

    Args:
        program: how the group was reached: ``llmjax bench``.
        argv: what follows.

    Raises:
        ConfigError: there is no such command.
        LLMJaxError: as the command says.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage(program, group))
        if group.first and not argv:
            print(f"\n{group.first}")
        return 0 if argv else 1
    name, *rest = argv
    command = group.commands.get(name)
    if name in group.refused:
        raise ConfigError(f"there is no {program} {name}: {group.refused[name]}")
    if command is None:
        hint = nearest(name, group.commands)
        raise ConfigError(f"unknown {group.kind} {name!r}{hint} ({program} --help lists them)")
    if isinstance(command, Group):
        return dispatch(f"{program} {name}", command, rest)
    return importlib.import_module(command.module).main(rest) or 0


def usage(program: str, group: Group) -> str:
    """The text of ``--help``."""
    about = [group.about, ""] if group.about else []
    width = max(map(len, group.commands))
    lines = [f"  {name:<{width}} {command.help}" for name, command in group.commands.items()]
    kind = group.kind.upper()
    end = f"{program} {kind} --help describes the options of {'an' if kind[0] in 'AEIOU' else 'a'} {group.kind}."
    return "\n".join([f"usage: {program} {kind} [options]", "", *about, *lines, "", end])
