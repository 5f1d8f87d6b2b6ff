"""What `benchmarks.gpu --compare` runs in another interpreter: transformers with torch.compile and CUDA graphs.

Prints one JSON object a line: name, seconds, tokens.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NEW = 32  # tokens of a decode measurement


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", help="config.json's content")
    parser.add_argument("--context", type=int, nargs="+", default=[])
    parser.add_argument("--streams", type=int, nargs="+", default=[])
    parser.add_argument("--prefill", type=int, nargs="+", default=[])
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**json.loads(options.config))).eval()
    cases = [(1, length) for length in options.context] + [(n, options.context[0]) for n in options.streams]
    for streams, context in cases:
        one, more = (fastest(model, streams, context - NEW, new) for new in (1, 1 + NEW))
        show(f"decode, {streams} x {context}", (more - one) / NEW, streams)
    for length in options.prefill:
        show(f"prefill of {length}", fastest(model, 1, length, 1), length)


@torch.inference_mode()
def fastest(model: LlamaForCausalLM, streams: int, length: int, new: int) -> float:
    """Seconds to make ``new`` tokens; a static cache makes transformers compile the step, with CUDA graphs."""
    tokens = torch.randint(1, model.config.vocab_size, (streams, length), device=model.device)
    best = float("inf")
    for _ in range(4):  # the first ones compile
        start = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def show(name: str, seconds: float, tokens: int) -> None:
    print(json.dumps({"name": name, "seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
