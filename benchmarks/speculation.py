"""What drafts bring: texts that copy from their prompts, decoded plainly and with ``speculative_config``.

    python -m benchmarks.speculation [--model …] [--draft-model …] [--drafts 4 8] [--rounds 5]

One stream, greedy; engines take turns, round after round, so that whatever else the machine does meets all of them. The
table has medians over rounds of tokens a second and of CPU seconds (of the whole process) for a thousand tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmjax import LLM, SamplingParams
from llmjax.config import DEFAULT_MODEL

ROOT = Path(__file__).parents[1]
CODE = (ROOT / "llmjax" / "engine" / "core" / "pace.py").read_text(encoding="utf-8")
TEXT = "\n".join((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()[:24])
TASKS = {
    "code editing": f"Rename the class Pace to Tempo in this file and write it out again:\n```python\n{CODE}```",
    "summarizing": f"Summarize this text in its own words, quoting its most important sentences:\n\n{TEXT}",
    "free text": "Tell a long story about a lighthouse keeper and the sea.",
}


@dataclass
class Runs:
    """The figures of one engine with one task."""

    rates: list[float] = field(default_factory=list)  # tokens a second after the first
    cpu: list[float] = field(default_factory=list)  # seconds for a thousand tokens
    accepted: float = 0.0  # share of the drafts


def measure(llm: LLM, task: str, tokens: int, runs: Runs) -> None:
    """One generation, its prompt found in the cache from the second on."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    drafts, accepted = llm.stats.draft_tokens, llm.stats.accepted_tokens
    cpu = time.process_time()
    (output,) = llm.chat([[{"role": "user", "content": task}]], params, use_tqdm=False)
    runs.cpu.append((time.process_time() - cpu) / tokens * 1000)
    times: Any = output.metrics
    runs.rates.append((tokens - 1) / (times.last_token_time - times.first_token_time))
    if llm.stats.draft_tokens > drafts:
        runs.accepted = (llm.stats.accepted_tokens - accepted) / (llm.stats.draft_tokens - drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft-model", help="a smaller model that makes the drafts, instead of prompt lookup")
    parser.add_argument("--drafts", type=int, nargs="+", default=[8, 16], help="num_speculative_tokens of each engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    runs_of: dict[tuple[str, int], Runs] = {}
    engines = {drafts: make(options.model, drafts, options.draft_model) for drafts in (0, *options.drafts)}
    for round_ in range(options.rounds + 1):
        for task, text in TASKS.items():
            for drafts, llm in engines.items():
                runs = runs_of.setdefault((task, drafts), Runs())
                measure(llm, text, options.tokens, runs if round_ else Runs())  # the first one warms up
    print("| task | drafts | tok/s | to plain | CPU s for 1,000 tokens | to plain | accepted |")
    print("|---|---|---|---|---|---|---|")
    for (task, drafts), runs in runs_of.items():
        plain = runs_of[task, 0]
        rate, cpu = statistics.median(runs.rates), statistics.median(runs.cpu)
        faster = rate / statistics.median(plain.rates)
        less = statistics.median(plain.cpu) / cpu
        print(f"| {task} | {drafts} | {rate:.0f} | {faster:.2f} | {cpu:.2f} | {less:.2f} | {runs.accepted:.0%} |")


def make(model: str, drafts: int, draft_model: str | None) -> LLM:
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    config = {"model": draft_model} if draft_model else lookup
    config |= {"num_speculative_tokens": drafts, "disable_by_batch_size": 1}
    settings: dict[str, Any] = {"speculative_config": config} if drafts else {"auto_speculation": False}
    llm = LLM(model, max_num_seqs=1, max_model_len=2048, **settings)
    llm.warm_up()
    return llm


if __name__ == "__main__":
    main()
