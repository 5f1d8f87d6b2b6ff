"""An answer that is a Pydantic object: the model can write nothing else."""

from __future__ import annotations

import argparse

from pydantic import BaseModel, ConfigDict, Field

from llmjax import LLM, SamplingParams, StructuredOutputsParams
from llmjax.config import DEFAULT_MODEL


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the model may add no fields of its own

    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    inhabitants: int = Field(ge=1_000, le=50_000_000)
    has_harbor: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what llmjax serve takes (default: a small one)")
    parser.add_argument("--city", default="Paris", help="what it is asked about (default: Paris)")
    arguments = parser.parse_args()

    llm = LLM(model=arguments.model, max_model_len=1024)
    form = StructuredOutputsParams(json=City.model_json_schema())
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=form)
    question = {"role": "user", "content": f"Describe the city {arguments.city} in JSON."}
    answer = llm.chat([question], params)[0].outputs[0]
    if answer.finish_reason != "stop":
        raise SystemExit(f"the answer was cut ({answer.finish_reason}): {answer.text}")
    print(City.model_validate_json(answer.text))


if __name__ == "__main__":
    main()
