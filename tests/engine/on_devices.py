"""Engines on one and on several devices; run as a module by test_tensor_parallel.py, test_expert_parallel.py and
test_ranks.py, since a process has one number of devices.

    python -m tests.engine.on_devices CASE…

A case is JSON: a model, numbers of devices, settings, among them ``launched`` where the process may be one of several
that a launcher has started. Prints for each what an engine on each number of them generates,
as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from llmjax import LLM, SamplingParams
from llmjax.launcher import launched

PROMPTS = [[1, 5, 9, 2, 7, 3, 8, 4, 6, 11, 1, 5, 9, 2, 7, 3, 8, 4], [3, 2, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=0.9,
    seed=5,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 2.0, 7: -3.0},
    min_tokens=3,
    max_tokens=6,
    logprobs=2,
    prompt_logprobs=2,
)


OPTIONS = {
    "dtype": "float32",
    "activations": "float",
    "skip_tokenizer_init": True,
    "page_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_steps": 1,
    "kv_cache_memory_bytes": 2**20,
    "compilation_cache_dir": "off",
}


def found_on_devices(cases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of a process for cases, by their names."""
    command = [sys.executable, "-m", "tests.engine.on_devices", *map(json.dumps, cases.values())]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def generated(model: str, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    options = {**OPTIONS, **settings, "tensor_parallel_size": devices}
    llm = LLM(model, **(launched(**options) if options.pop("launched", False) else options))
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    # The greedy ones once more: their prefixes are found in the cache.
    outputs = [llm.generate(prompts, params) for params in (GREEDY, EVERYTHING, GREEDY)]
    if "speculative_config" in settings:
        llm.engine.runner.programs.wait_all()  # there are no drafts before
        llm.engine._speculation._length = lambda found, rows, most: most
        outputs += [llm.generate(prompts, replace(params, max_tokens=40)) for params in (GREEDY, EVERYTHING)]
    if "kv_offloading_size" in settings:
        for pool in llm.engine.kv.pools:
            pool.release(pool.allocate(pool.available) or [])
        llm.engine.kv.tier.move(llm.engine.runner)
        outputs.append(llm.generate(prompts, GREEDY))
    found = {"tokens": [[list(output.outputs[0].token_ids) for output in of_one] for of_one in outputs]}
    answers = [output.outputs[0].logprobs or [] for output in outputs[1]]
    scores = [(output.prompt_logprobs or [])[1:] for output in outputs[1]]
    found["logprobs"] = [
        [(token, logprob.logprob) for position in sequence for token, logprob in sorted(position.items())]
        for sequence in (*answers, *scores)
    ]
    llm.engine.runner.programs.wait_all()  # a larger program takes the place of one that is not ready
    engine = llm.engine
    text = next(program for program in engine.runner.programs.ready if program.bucket.decode).executable.as_text()
    pages = jax.tree.leaves(engine.runner.executor.state.kv)[0].addressable_shards[0].data
    shape = ",".join(map(str, pages.shape))
    found["page_copies"] = len(re.findall(rf"\[{shape}\]\S* copy\(", text))
    found["host_hits"] = llm.stats.offload.host_hits
    found["draft_tokens"] = llm.stats.draft_tokens
    found["compiled"] = engine.compilations.count
    found["page_mentions"] = len(re.findall(rf"\[{shape}\]", text))
    llm.close()
    return found


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    cases = [json.loads(case) for case in sys.argv[1:]]
    if not any({"nnodes", "multi_process", "launched"} & case.get("settings", {}).keys() for case in cases):
        jax.config.update("jax_num_cpu_devices", 4)
    found = []
    for case in cases:
        found.append([generated(case["model"], count, case.get("settings", {})) for count in case["devices"]])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
