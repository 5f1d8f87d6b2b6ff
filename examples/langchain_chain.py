"""A chain of LangChain with a server: `pip install langchain-openai`, `llmjax serve --config smollm2`."""

from __future__ import annotations

import argparse

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: http://localhost:8000)")
    parser.add_argument("--api-key", default="none", help="a key of its --api-key")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name of `/v1/models`")
    parser.add_argument("--topic", default="the sea", help="what the poem is about (default: the sea)")
    arguments = parser.parse_args()

    model = ChatOpenAI(
        model=arguments.model, base_url=f"{arguments.url}/v1", api_key=arguments.api_key, temperature=0, max_tokens=64
    )
    prompt = ChatPromptTemplate.from_messages([("system", "You write short poems."), ("user", "Write about {topic}.")])
    chain = prompt | model | StrOutputParser()
    for text in chain.stream({"topic": arguments.topic}):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
