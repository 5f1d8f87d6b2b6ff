"""SmolLM2 held to many schemas: whatever it would rather write, what it finishes is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputsParams
from tests.engine.schemas import grown
from tests.levels import at_levels

SEEDS, MAX_TOKENS = 1, 96
# The checker of dates is Python's, which knows no year 0 and no leap second; RFC 3339 does.
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "email"])


@pytest.mark.parametrize("count", at_levels([25, 200], slow=[25]))
def test_many_schemas(count: int, smollm2_path: Path, compile_cache_dir: str) -> None:
    schemas = grown(200)[:: 200 // count]
    assert len(schemas) == count == len({json.dumps(schema) for schema in schemas})
    llm = LLM(str(smollm2_path), max_model_len=256, max_num_seqs=16, compilation_cache_dir=compile_cache_dir)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema, lenient="oneOf" in json.dumps(schema)),
        )
        for schema in schemas
        for seed in range(SEEDS)
    ]
    prompts = [f"Some JSON, example {i}:\n" for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    done, wrong = 0, []
    for i, output in enumerate(outputs):
        assert output.error is None
        (choice,) = output.outputs
        if choice.finish_reason == "stop":
            done += 1
            validator = jsonschema.Draft202012Validator(schemas[i // SEEDS], format_checker=FORMATS)
            wrong += [(schemas[i // SEEDS], choice.text)] * (not validator.is_valid(json.loads(choice.text)))
        else:
            assert choice.finish_reason == "length" and len(choice.token_ids) == MAX_TOKENS
    assert wrong == []
    assert done > len(outputs) // (2 if count == 200 else 4)  # others grow until they are cut
