"""Expert parallelism: mixtures whose experts are divided among devices give the tokens that they give on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmjax import LLM
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN
from tests.engine.on_devices import found_on_devices
from tests.levels import at_levels

WHOLE = {"enable_expert_parallel": True}
OF_ONE_LAYER = {"hf_overrides": {"num_hidden_layers": 1}}
CASES: dict[str, dict[str, Any]] = {
    "quantized, some in the host's memory": {
        "model": "qwen3-moe",
        "devices": [1, 3],
        "settings": WHOLE | OF_ONE_LAYER | {"quantization": "int8", "num_experts_offload_per_rank": 1},
    },
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "shared experts, latent attention": {"model": "deepseek-v3", "devices": [1, 2], "settings": WHOLE},
    "four experts on three devices": {
        "model": "mixtral",
        "devices": [1, 3],
        "settings": WHOLE | OF_ONE_LAYER,
    },
    "biases": {"model": "gpt-oss", "devices": [1, 3], "settings": WHOLE},
    "parts of some in the host's memory": {
        "model": "mixtral",
        "devices": [1, 2],
        "settings": OF_ONE_LAYER | {"num_experts_offload_per_rank": 2},
    },
}


def check(cases: dict[str, dict[str, Any]]) -> None:
    """Checks for the same tokens and log-probabilities on all numbers of devices, and that no page is copied."""
    placed = {name: {**case, "model": str(GOLDEN / case["model"])} for name, case in cases.items()}
    for name, (one, *several) in found_on_devices(placed).items():
        for found in several:
            assert found["tokens"] == one["tokens"], name
            for values, wanted in zip(found["logprobs"], one["logprobs"], strict=True):
                assert [token for token, _ in values] == [token for token, _ in wanted], name
                np.testing.assert_allclose([x for _, x in values], [x for _, x in wanted], atol=2e-3, err_msg=name)
            assert found["page_mentions"] and not found["page_copies"], name


@pytest.mark.slow
def test_devices_with_whole_experts() -> None:
    check(CASES)


@pytest.mark.parametrize("case", at_levels(MORE_CASES, slow=("shared experts, latent attention",)))
def test_more_devices_with_whole_experts(case: str) -> None:
    check({case: MORE_CASES[case]})


def test_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel: the model has no experts$"):
        LLM(str(GOLDEN / "llama"), skip_tokenizer_init=True, enable_expert_parallel=True)
