"""Two adapters beside one model, in this process: each prompt names its own."""

from __future__ import annotations

import argparse

from llmjax import LLM, LoRARequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="the model that they are for")
    parser.add_argument("adapters", nargs="+", metavar="NAME=PATH", help="PEFT folders or GGUF files")
    parser.add_argument("--prompt", default="The capital of France is", help="what to continue")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="longest answer (default: 16)")
    arguments = parser.parse_args()

    asked: list[LoRARequest | None] = [None]
    for number, text in enumerate(arguments.adapters, 1):
        name, _, path = text.partition("=")
        asked.append(LoRARequest(name, number, path))
    llm = LLM(model=arguments.model, enable_lora=True, max_loras=len(arguments.adapters), max_lora_rank=64)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    outputs = llm.generate([arguments.prompt] * len(asked), params, lora_request=asked)
    for one, output in zip(asked, outputs, strict=True):
        print(f"{one.lora_name if one else 'no adapter'}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
