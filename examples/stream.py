"""An answer as it is written, from a server: `llmjax serve --config smollm2`."""

from __future__ import annotations

import argparse
import sys
import time

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: http://localhost:8000)")
    parser.add_argument("--api-key", default="none", help="a key of its --api-key")
    parser.add_argument("--question", default="Name three primary colors.", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=arguments.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    first = None
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.perf_counter() - started
            print(text, end="", flush=True)
        if chunk.usage is not None:
            print()
            seconds = time.perf_counter() - started
            tokens = chunk.usage.completion_tokens
            print(f"{tokens} tokens in {seconds:.2f} s, the first after {first or seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
