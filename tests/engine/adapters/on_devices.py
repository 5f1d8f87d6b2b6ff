"""Engines with adapters on several devices; run as a module by test_divided.py, since a process has one number of them.

    python -m tests.engine.adapters.on_devices CASE…

A case is JSON: golden adapters, a number of devices, settings. Prints for each how far the log-probabilities of the
adapters' own tokens are from PEFT's, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from llmjax import LLM
from tests.checkpoints import ADAPTERS, GOLDEN
from tests.engine.adapters.asking import Asking, adaptation, golden


def farthest(names: list[str], devices: int, settings: dict[str, Any]) -> float:
    """The largest difference of a log-probability, with all adapters in one batch."""
    llm = LLM(
        str(GOLDEN / (ADAPTERS / names[0] / "base.txt").read_text()),
        dtype="float32",
        skip_tokenizer_init=True,
        page_size=4,
        max_num_seqs=len(names),
        max_num_batched_tokens=64,
        decode_steps=1,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir="off",
        enable_lora=True,
        max_loras=len(names),
        max_lora_rank=32,
        tensor_parallel_size=devices,
        **settings,
    )
    found = Asking(llm).ask([(golden(name)[0], adaptation(name)) for name in names], tokens=2, scored=True)
    llm.close()
    return max(float(np.abs(said.logprobs - golden(name)[1]).max()) for name, said in zip(names, found, strict=True))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    cases = [json.loads(case) for case in sys.argv[1:]]
    print(json.dumps([farthest(case["names"], case["devices"], case.get("settings", {})) for case in cases]))


if __name__ == "__main__":
    main()
