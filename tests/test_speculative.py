"""The setting ``speculative_config``."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.speculative import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (2, 4)),
        ({"prompt_lookup_max": None, "disable_by_batch_size": 2}, (5, 5)),
    ],
)
def test_bounds_that_are_left_out(given: dict[str, Any], window: tuple[int, int]) -> None:
    found = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3, **given})
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == window
    assert found.num_speculative_tokens == 3
    assert found.disable_by_batch_size == given.get("disable_by_batch_size", 4)


def test_the_method_as_older_versions_of_vllm_have_it() -> None:
    assert SpeculativeConfig.of({"model": "[ngram]", "num_speculative_tokens": 3}).num_speculative_tokens == 3


@pytest.mark.parametrize("method", [{}, {"method": "draft_model"}])
def test_a_model_that_makes_drafts(method: dict[str, Any]) -> None:
    found = SpeculativeConfig.of({"model": "a/b", "num_speculative_tokens": 4, "quantization": "q8_0", **method})
    assert (found.model, found.quantization, found.num_speculative_tokens) == ("a/b", "q8_0", 4)
    assert SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 4}).model is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, 'speculative_config needs a method, which may be "ngram", or the model'),
        ({"method": "eagle", "num_speculative_tokens": 3}, "does not know the method 'eagle'"),
        ({"method": "ngram", "model": "x", "num_speculative_tokens": 3}, "method ngram has no model, but 'x' is given"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "the method draft_model needs a model"),
        ({"model": 5, "num_speculative_tokens": 3}, "model must be a text, not 5"),
        ({"model": "x"}, "speculative_config needs num_speculative_tokens"),
        ({"model": "x", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, "prompt_lookup_max has no meaning with"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "quantization": "q8_0"},
            "quantization has no meaning",
        ),
        ({"method": ["ngram"], "num_speculative_tokens": 3}, "does not know the method"),
        ({"method": "ngram"}, "speculative_config needs num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "must be an integer of at least 1, not '4'"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "must be at most 32, not 33"),
        ({"method": "ngram", "num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean num_spec"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            r"prompt_lookup_min \(3\) must not exceed prompt_lookup_max \(2\)",
        ),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=values)
