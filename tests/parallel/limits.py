"""The tables of limits in docs/scaling.md, written from what `Division` and `Stage` say of models."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from llmjax.errors import ConfigError
from llmjax.models import ModelConfig, model_config
from llmjax.parallel.division import most_devices, undivided_parts
from llmjax.parallel.stages import Stage
from tests.checkpoints import GOLDEN
from tests.models.test_published import CHECKPOINTS, config_of

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- limits: written by python -m tests.pages -->\n", "<!-- end of limits -->\n"
TENSOR, STAGES = "`--tensor-parallel-size`", "`--pipeline-parallel-size`"


def page() -> str:
    """What docs/scaling.md is to hold."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return "".join([before, BEGIN, *refusals(), "\n", *most(), END, rest.split(END)[1]])


def refusals() -> Iterator[str]:
    """Why some of the tiny checkpoints are not divided at all, or not everywhere between layers."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in sorted(GOLDEN.iterdir()):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, architecture = model_config(config), config["architectures"][0]
        for part in undivided_parts(model):
            found[TENSOR, f"{part} cannot be divided yet"][architecture].append(folder.name)
        for reason in between_stages(model):
            found[STAGES, reason][architecture].append(folder.name)
    yield "| setting | refuses with | architectures (tiny checkpoints of the tests) |\n|---|---|---|\n"
    for (setting, reason), models in sorted(found.items()):
        named = ", ".join(f"`{name}` ({', '.join(checkpoints)})" for name, checkpoints in models.items())
        yield f"| {setting} | {reason} | {named} |\n"


def between_stages(model: ModelConfig) -> list[str]:
    """Why the model's layers are not divided into some numbers of stages, as the errors have it."""
    found: dict[str, None] = {}
    for count in range(2, model.num_layers + 1):
        for number in range(count):
            try:
                Stage.of(model, number=number, count=count)
            except ConfigError as error:
                found[str(error).partition(": ")[2]] = None
    return list(found)


def most() -> Iterator[str]:
    """How many devices may divide each layer of published models."""
    found: dict[int, dict[str, None]] = defaultdict(dict)
    for name in CHECKPOINTS:
        model = model_config(config_of(name))
        if not undivided_parts(model):
            found[most_devices(model)][name.removesuffix(" (first upload)")] = None
    yield f"| {TENSOR} at most | models |\n|---|---|\n"
    for count, names in sorted(found.items()):
        yield f"| {count} | {', '.join(sorted(names, key=str.lower))} |\n"
