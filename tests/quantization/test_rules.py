"""Rules of users for single modules."""

from __future__ import annotations

import pytest

from llmjax.errors import ConfigError
from llmjax.quantization.rules import Rules
from llmjax.weights.ggml.reference import scheme_named


def test_the_first_match_decides() -> None:
    rules = Rules.parse({r"layers\.[01]\.": "Q8_0", "mlp": "q5k"}, scheme_named)
    assert rules.find("model.layers.1.mlp.up_proj.weight") == "q8_0"
    assert rules.find("model.layers.2.mlp.up_proj.weight") == "q5_k"
    assert rules.find("model.layers.2.self_attn.q_proj.weight") is None
    assert Rules().find("lm_head.weight") is None


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression"):
        Rules.parse({"(": "q8_0"}, scheme_named)
    with pytest.raises(ConfigError, match="scheme 'q9' is unknown"):
        Rules.parse({"mlp": "q9"}, scheme_named)
    with pytest.raises(ConfigError, match="must map regular expressions to scheme names"):
        Rules.parse({"mlp": 4}, scheme_named)  # type: ignore[dict-item]
