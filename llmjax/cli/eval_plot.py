"""``llmjax eval plot``: perplexities of several results, with their errors and the bytes of the weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmjax.bench.pictures import Intervals, Panel, Points, draw, read_result
from llmjax.bench.pyplot import check_plot
from llmjax.cli.parser import Parser
from llmjax.errors import ConfigError

SAME = ("text", "text_tokens", "convention")  # figures of other texts or windows cannot be compared


def main(argv: list[str]) -> int:
    """Draws the results.

    Raises:
        ConfigError: a file cannot be read or written, or the results cannot be compared.
    """
    parser = Parser(
        prog="llmjax eval plot",
        description="Draw perplexities that llmjax eval perplexity --output-json has written, one for each scheme; the "
        "names of the files are the names in the picture.",
    )
    parser.add_argument("results", nargs="+", metavar="FILE", help="results of one text, such as bf16.json int8.json")
    parser.add_argument(
        "--plot", metavar="FILE", default="perplexity", help="where: FILE.png and FILE.svg (default: perplexity)"
    )
    values = parser.parse(argv)
    check_plot(values.plot)
    results = {Path(path).stem: _read(path) for path in values.results}
    first_name, first = next(iter(results.items()))
    for name, result in results.items():
        for key in SAME:
            if result[key] != first[key]:
                raise ConfigError(
                    f"{name} and {first_name} differ in {key}: {result[key]} and {first[key]}",
                    hint="score the same text with the same windows",
                )
    errors = {name: (_at(result, -1), _at(result, 0), _at(result, 1)) for name, result in results.items()}
    points = {name: [(result["weight_bytes"] / 2**20, result["perplexity"])] for name, result in results.items()}
    panels: list[Panel] = [
        Intervals("perplexity", errors),
        Points("perplexity over size", "weights, MiB", "perplexity", points),
    ]
    for path in draw(panels, title=f"{first['text']}: {first['convention']}", stem=values.plot):
        print(f"picture: {path}", file=sys.stderr)
    return 0


def _read(path: str) -> dict[str, Any]:
    result = read_result(path)
    missing = [key for key in (*SAME, "perplexity", "standard_error", "weight_bytes") if key not in result]
    if missing:
        raise ConfigError(f"{path} has no {missing[0]}: it is not a result of llmjax eval perplexity --output-json")
    return result


def _at(result: Mapping[str, Any], errors: float) -> float:
    """The perplexity plus this number of standard errors."""
    return float(result["perplexity"] + errors * result["standard_error"])
