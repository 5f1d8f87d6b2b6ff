"""How often a narrower KV cache changes what a model says.

    python -m benchmarks.kv_quality MODEL ... --text FILE [--prompts 20] [--new-tokens 200] [--types int8 fp8_e4m3 ...]

Prompts are pieces of the text, evenly spread. The model continues each greedily with a KV cache of --reference; its
tokens are what the others are compared with:

* same next token: share of positions of that continuation at which the other cache, given everything before, would
  have said the same token;
* same from the start: tokens until the first difference when each goes on from its own tokens, where one difference
  makes all that follows incomparable. Mean, and how many continuations are the same to their end.

The reference is compared with itself too: scoring takes many tokens a step and decoding one, which rounds differently,
so this row is what no cache can be better than. --settings are the engine's, for all caches.
Standard output is Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.machine import this_machine
from benchmarks.quality import engine_settings
from llmjax import LLM, SamplingParams
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.evaluation.perplexity import text_tokens
from llmjax.version import __version__

TYPES = ("int8", "fp8_e4m3", "fp8_e5m2")
Tokens = list[list[int]]  # of each prompt


@dataclass(frozen=True)
class Agreement:
    """How well one KV type agrees with the reference.

    Attributes:
        next_token: share of positions with the same next token after the same text.
        prefix: tokens until the first difference of each continuation.
        length: tokens of a continuation.
    """

    next_token: float
    prefix: tuple[int, ...]
    length: int

    def row(self, name: str) -> str:
        """A line of the table."""
        same = sum(count == self.length for count in self.prefix)
        return (
            f"| {name} | {100 * self.next_token:.2f} % | {np.mean(self.prefix):.0f} of {self.length} "
            f"| {same} of {len(self.prefix)} |"
        )


def cut_prompts(token_ids: Sequence[int], *, bos: int | None, count: int, length: int) -> Tokens:
    """Pieces of a text, evenly spread, each after BOS where there is one.

    Raises:
        ConfigError: the text is too short.
    """
    if len(token_ids) < count * length:
        raise ConfigError(f"the text has {len(token_ids)} tokens, {count} prompts of {length} need {count * length}")
    starts = np.linspace(0, len(token_ids) - length, count).astype(int)
    head = [] if bos is None else [bos]
    return [[*head, *token_ids[start : start + length]] for start in starts]


def continuations(llm: LLM, prompts: Tokens, count: int) -> Tokens:
    """Greedy tokens after each prompt, past ends of sequence."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def same_next_tokens(llm: LLM, prompts: Tokens, said: Tokens) -> float:
    """Share of the tokens said that are the model's first choice after all before them."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, said, strict=True)]
    ranks = []
    for text, prompt, output in zip(texts, prompts, llm.generate(texts, params, use_tqdm=False), strict=True):
        entries = (output.prompt_logprobs or [])[len(prompt) :]
        ranks += [entry[token].rank for token, entry in zip(text[len(prompt) :], entries, strict=True) if entry]
    return float(np.mean(np.array(ranks) == 1))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def _engine(model: str, kv_cache_dtype: str, *, length: int, settings: Mapping[str, Any]) -> LLM:
    shape = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": length, "max_logprobs": 0}
    # Without a prefix cache: scoring must not find the pages that decoding wrote.
    return LLM(model, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, **{**shape, **settings})


def compare(model: str, text: str, arguments: argparse.Namespace) -> None:
    """Prints the table of one model."""
    length = arguments.prompt_tokens + arguments.new_tokens + 2  # BOS, and the token that scoring ends with
    settings = engine_settings(arguments.settings)
    reference_tokens: Tokens = []
    for kind in (arguments.reference, *arguments.types):
        llm = _engine(model, kind, length=length, settings=settings)
        try:
            assert llm.tokenizer is not None
            ids, bos = text_tokens(llm.tokenizer, text)
            prompts = cut_prompts(ids, bos=bos, count=arguments.prompts, length=arguments.prompt_tokens)
            tokens = continuations(llm, prompts, arguments.new_tokens)
            reference_tokens = reference_tokens or tokens
            agreement = Agreement(
                next_token=same_next_tokens(llm, prompts, reference_tokens),
                prefix=tuple(map(common_prefix, reference_tokens, tokens)),
                length=arguments.new_tokens,
            )
        finally:
            llm.close()
        if kind == arguments.reference:
            print(f"{Path(model).name}: {arguments.prompts} prompts of {arguments.prompt_tokens} tokens of ", end="")
            print(f"{arguments.text.name}, {arguments.new_tokens} new tokens each, against {arguments.reference}\n")
            print("| KV cache | same next token | same from the start, mean | same to the end |\n|---|---|---|---|")
        print(agreement.row(kind), flush=True)
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one table a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to cut prompts from")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--reference", default="bfloat16", metavar="TYPE")
    parser.add_argument("--types", nargs="+", default=TYPES, metavar="TYPE")
    parser.add_argument("--settings", nargs="+", default=(), metavar="SETTING=VALUE")
    arguments = parser.parse_args(argv)
    try:
        text = arguments.text.read_text(encoding="utf-8")
        print(f"{this_machine()}; llmjax {__version__}, JAX {jax.__version__}; {datetime.now(UTC):%Y-%m-%d}\n")
        for model in arguments.models:
            compare(model, text, arguments)
    except (LLMJaxError, OSError) as error:
        print(f"kv_quality: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
