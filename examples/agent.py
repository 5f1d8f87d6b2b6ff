"""A loop in which a model calls tools until it answers, with Responses of a server: `llmjax serve Qwen/Qwen3-8B`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI


def list_files(folder: str) -> str:
    """Names of the files in a folder."""
    return "\n".join(sorted(path.name for path in Path(folder).iterdir()))


def read_file(path: str) -> str:
    """The beginning of a text file."""
    return Path(path).read_text(encoding="utf-8", errors="replace")[:4000]


TOOLS: dict[str, Callable[[str], str]] = {"list_files": list_files, "read_file": read_file}
ARGUMENT = {"list_files": "folder", "read_file": "path"}


def described() -> list[Any]:
    """The tools as the model is told of them."""
    return [
        {
            "type": "function",
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {ARGUMENT[name]: {"type": "string"}},
                "required": [ARGUMENT[name]],
                "additionalProperties": False,
            },
            "strict": True,
        }
        for name, function in TOOLS.items()
    ]


def called(name: str, arguments: str) -> str:
    """What a tool returns; what goes wrong is told to the model, too."""
    try:
        return TOOLS[name](json.loads(arguments)[ARGUMENT[name]])
    except (KeyError, OSError, ValueError) as error:
        return f"error: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: http://localhost:8000)")
    parser.add_argument("--api-key", default="none", help="a key of its --api-key")
    parser.add_argument("--task", default="Which files are in the folder '.'?", help="what to do")
    parser.add_argument("--max-turns", type=int, default=8, metavar="N", help="calls at most (default: 8)")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
    model = client.models.list().data[0].id
    items: list[Any] = [{"role": "user", "content": arguments.task}]
    for _ in range(arguments.max_turns):
        response = client.responses.create(model=model, input=items, tools=described(), max_output_tokens=512)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            print(response.output_text)
            return
        items += response.output
        for call in calls:
            result = called(call.name, call.arguments)
            print(f"{call.name}({call.arguments}): {len(result)} characters")
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise SystemExit(f"no answer after {arguments.max_turns} turns")


if __name__ == "__main__":
    main()
