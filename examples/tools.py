"""A call of a tool and its result, with a server: `llmjax serve Qwen/Qwen3-8B`, or any other model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

WEATHER = {"Paris": "sunshine, 24 °C", "London": "rain, 14 °C"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": sorted(WEATHER)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: http://localhost:8000)")
    parser.add_argument("--api-key", default="none", help="a key of its --api-key")
    parser.add_argument("--question", default="What is the weather in Paris?", help="what to ask")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    # "required" has small models call, too; "auto" leaves it to the model.
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=128
    )
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r})")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    second = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=128
    )
    print(second.choices[0].message.content)


if __name__ == "__main__":
    main()
