"""Engines on jaxlib's CPU and on a plug-in's devices; run as a module by test_plugin.py (see tests/stand_in_plugin.py).

    python -m tests.engine.on_plugin CASE…

A case is JSON: a model, settings, and ``runs`` with a device and the number of devices. Prints what each run makes:
with ``greedy`` (lists of tokens) what it generates after each list by itself, with ``texts`` their vectors.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llmjax import LLM
from tests.engine import on_devices, structured_on_devices

STRUCTURED = "structured"  # in place of a model


def result(case: dict[str, Any], run: dict[str, Any]) -> Any:
    settings = {**case.get("settings", {}), "device": run["device"], **run.get("settings", {})}
    if case["model"] == STRUCTURED:
        return structured_on_devices.generated(run["devices"], **settings)
    if "texts" not in case and "greedy" not in case:
        return {**on_devices.generated(case["model"], run["devices"], settings), "settings": settings}
    options: dict[str, Any] = {**on_devices.OPTIONS, **settings, "tensor_parallel_size": run["devices"]}
    llm = LLM(case["model"], **options)
    try:
        if "texts" in case:
            return [output.outputs.data.tolist() for output in llm.encode(case["texts"], use_tqdm=False)]
        outputs = llm.generate(case["greedy"], on_devices.GREEDY, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"tokens": tokens, "platform": llm.info.platform, "dequantized_from": llm.info.dequantized_from}
    finally:
        llm.close()


def main() -> None:
    cases = [json.loads(argument) for argument in sys.argv[1:]]
    print(json.dumps([[result(case, run) for run in case["runs"]] for case in cases]))


if __name__ == "__main__":
    main()
