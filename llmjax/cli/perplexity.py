"""``llmjax eval perplexity``: how good a model is as it is served."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.errors import ConfigError
from llmjax.progress import progress_bar
from llmjax.settings import settings_of
from llmjax.step_sizes import LEAST, MOST
from llmjax.text_file import read_text

if TYPE_CHECKING:
    from llmjax import LLM
    from llmjax.evaluation.perplexity import Perplexity, Windowing


def main(argv: list[str]) -> int:
    """Scores a text and prints its perplexity.

    Raises:
        LLMJaxError: a setting is wrong, the model or text cannot be read, or the text is too short.
    """
    from llmjax.evaluation.perplexity import Windowing

    parser = Parser(
        prog="llmjax eval perplexity",
        description="Perplexity of a text under a model as it is served: the engine's own kernels, weights and KV "
        "cache. Only figures of the same text, windows and tokenizer can be compared.",
    )
    add_model(parser)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to score (required)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output-json", metavar="FILE", help="file for the result as JSON")
    windowing_settings = settings_of(Windowing)
    add_settings(parser, windowing_settings.values(), section="windows")
    add_config_flags(parser)
    values = parser.parse(argv)
    check_writable(values.output_json)
    if values.text is None:
        raise ConfigError("--text names the file to score and is required")
    windowing = Windowing(**{name: getattr(values, name) for name in windowing_settings if hasattr(values, name)})
    config = configs_of(values, model=values.positional_model).engine
    if config.skip_tokenizer_init and config.tokenizer is None:
        raise ConfigError("a text cannot be scored without a tokenizer: leave out --skip-tokenizer-init")
    text = read_text(Path(values.text), name=f"--text {values.text}")
    from llmjax import LLM

    # The step finds the top tokens of every position too, here of no use; and more requests than fill a step gain
    # nothing.
    tokens = config.with_sizes(MOST).max_num_batched_tokens
    requests = min(config.with_sizes(LEAST).max_num_seqs, 1 + tokens // windowing.context)
    llm = LLM.from_config(config.replace(max_logprobs=0, max_num_seqs=requests, skip_tokenizer_init=False))
    try:
        _report(llm, text, windowing, values)
    finally:
        llm.close()
    return 0


def _report(llm: LLM, text: str, windowing: Windowing, values: argparse.Namespace) -> None:
    from llmjax.evaluation.perplexity import text_tokens

    assert llm.tokenizer is not None
    token_ids, bos = text_tokens(llm.tokenizer, text)
    started = time.perf_counter()
    result = _score(llm, token_ids, bos, windowing)
    seconds = time.perf_counter() - started
    fields = {
        "model": llm.model_name,
        "text": values.text,
        "text_tokens": min(len(token_ids), windowing.max_tokens or len(token_ids)),
        "bos": bos,
        **asdict(windowing),
        "convention": windowing.describe(),
        "perplexity": result.value,
        "standard_error": result.standard_error,
        "mean_nll": result.mean_nll,
        "scored_tokens": result.num_tokens,
        "windows": result.num_windows,
        "dtype": llm.info.dtype,
        "activations": llm.info.activations,
        "kv_cache_dtype": llm.config.kv_cache_dtype,
        "weight_bytes": llm.info.weight_bytes,
        "seconds": round(seconds, 3),
    }
    if values.output_json is not None:
        write_json(Path(values.output_json), fields)
    if values.json:
        print(json.dumps(fields, indent=2, ensure_ascii=False))
    else:
        _print(fields)


def _score(llm: LLM, token_ids: list[int], bos: int | None, windowing: Windowing) -> Perplexity:
    from llmjax.evaluation.perplexity import Perplexity, score_windows

    windows = windowing.cut(token_ids, bos=bos)
    result = Perplexity()
    with progress_bar("Scoring") as bar:
        task = bar.add_task("", total=len(windows), note="")
        for logprobs in score_windows(llm.client, windows):
            result.add(logprobs)
            bar.update(task, advance=1, note=f"perplexity {result.value:.4f}")
    return result


def _print(fields: Mapping[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{fields['model']}, {fields['dtype']}, KV cache {fields['kv_cache_dtype']}")
    if fields["activations"]:
        table.add_row("activations", fields["activations"])
    begin = "each begins with BOS" if fields["stride"] is None else "the text begins with BOS"
    table.add_row("windows", fields["convention"] + (f", {begin}" if fields["bos"] is not None else ", no BOS"))
    table.add_row("text", f"{fields['text']}: {fields['text_tokens']:,} tokens")
    table.add_row("scored", f"{fields['scored_tokens']:,} tokens in {fields['windows']:,} windows")
    table.add_row("weights", f"{fields['weight_bytes'] / 2**20:.1f} MiB in memory")
    table.add_row("seconds", f"{fields['seconds']:.1f}")
    table.add_row("perplexity", f"{fields['perplexity']:.4f} ± {fields['standard_error']:.4f}")
    # Wide enough for a file: lines are not cut where no terminal says how long they may be.
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False, markup=False)
