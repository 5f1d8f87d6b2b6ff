"""One and two devices under masks; run as a module by test_structured.py, since a process has one number of devices.

Prints what both engines generate, as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from llmjax import LLM, SamplingParams, StructuredOutputsParams
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
FORCED = StructuredOutputsParams(regex="[a-z]{4}(this|that) one [0-9]{5}")
OBJECT = StructuredOutputsParams(json={"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]})
PARAMS = [
    SamplingParams(seed=3, max_tokens=30, structured_outputs=FORCED),
    SamplingParams(seed=4, max_tokens=20, structured_outputs=OBJECT, logprobs=1, repetition_penalty=1.2),
    SamplingParams(seed=2, max_tokens=12, ignore_eos=True),
]


def generated(devices: int, **settings: Any) -> list[Any]:
    """Texts and tokens of all."""
    llm = LLM(
        str(GOLDEN / "llama"),
        tokenizer=str(TESTS / "engine" / "golden" / "characters"),
        dtype="float32",
        activations="float",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir="off",
        tensor_parallel_size=devices,
        **settings,
    )
    outputs = llm.generate([[5, 6, 7, 8, 9]] * len(PARAMS), PARAMS, use_tqdm=False)
    llm.close()
    return [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps([generated(1), generated(2)]))
