"""Many prompts at once, in this process: results as JSON lines on standard output, the speed on standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from llmjax import LLM, SamplingParams
from llmjax.config import DEFAULT_MODEL

PROMPTS = [f"The most interesting fact about the number {number} is" for number in range(2, 18)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what llmjax serve takes (default: a small one)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: some of its own)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="longest answer (default: 32)")
    arguments = parser.parse_args()
    prompts = PROMPTS if arguments.prompts is None else arguments.prompts.read_text(encoding="utf-8").splitlines()

    llm = LLM(model=arguments.model, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started

    for output in outputs:
        answer = output.outputs[0]
        print(json.dumps({"prompt": output.prompt, "text": answer.text, "finish_reason": answer.finish_reason}))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} answers, {tokens} tokens, {tokens / seconds:.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
