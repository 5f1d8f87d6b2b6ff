"""What `benchmarks.card --vllm` runs in another interpreter: vLLM's decodes and prompts with random weights.

Prints one JSON object a line: name, seconds, tokens.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import vllm

NEW = 32  # tokens of a decode measurement


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder with config.json")
    parser.add_argument("--context", type=int, nargs="+", default=[])
    parser.add_argument("--streams", type=int, nargs="+", default=[])
    parser.add_argument("--prefill", type=int, nargs="+", default=[])
    options = parser.parse_args()
    llm = vllm.LLM(
        options.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(*options.context, *options.prefill) + 64,
    )
    print(json.dumps({"said": f"vLLM {vllm.__version__}, torch {torch.__version__}"}), flush=True)
    cases = [(1, length) for length in options.context] + [(n, options.context[0]) for n in options.streams]
    for streams, context in cases:
        one, more = (fastest(llm, streams, context - NEW, new) for new in (1, 1 + NEW))
        show(f"decode, {streams} x {context}", (more - one) / NEW, streams)
    for length in options.prefill:
        show(f"prefill of {length}", fastest(llm, 1, length, 1), length)


def fastest(llm: vllm.LLM, streams: int, length: int, new: int) -> float:
    """Seconds to make ``new`` tokens."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    best = float("inf")
    for _ in range(3):
        prompts = torch.randint(1, 512, (streams, length)).tolist()
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        best = min(best, time.perf_counter() - start)
    return best


def show(name: str, seconds: float, tokens: int) -> None:
    print(json.dumps({"name": name, "seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
