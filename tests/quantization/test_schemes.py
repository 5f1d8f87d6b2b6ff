"""Names of schemes, and users' rules for single modules."""

from __future__ import annotations

import pytest

from llmjax.errors import ConfigError
from llmjax.quantization.schemes import SCHEMES, SchemeRules, scheme_key, scheme_named


def test_names() -> None:
    spellings = ("q4k", "Q4_K", "q2k", "q8_0", "Q80", "iq4_nl", "int8", "INT8G128", "int4_asym")
    assert [scheme_key(name, SCHEMES) for name in spellings] == [
        *("q4_k", "q4_k", "q2_k", "q8_0", "q8_0", "iq4_nl", "int8", "int8_g128", "int4_asym")
    ]
    assert all(scheme_named(name.replace("_", "").upper()) is scheme for name, scheme in SCHEMES.items())
    with pytest.raises(ConfigError, match="scheme 'q9' is unknown; known are q4_0, q4_1"):
        scheme_named("q9")


def test_the_first_match_decides() -> None:
    rules = SchemeRules.parse({r"layers\.[01]\.": "Q8_0", "mlp": "q5k"}, SCHEMES)
    assert rules.find("model.layers.1.mlp.up_proj.weight") == "q8_0"
    assert rules.find("model.layers.2.mlp.up_proj.weight") == "q5_k"
    assert rules.find("model.layers.2.self_attn.q_proj.weight") is None
    assert SchemeRules().find("lm_head.weight") is None


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        SchemeRules.parse({"(": "q8_0"}, SCHEMES)
    with pytest.raises(ConfigError, match="scheme 'q9' is unknown"):
        SchemeRules.parse({"mlp": "q9"}, SCHEMES)
    with pytest.raises(ConfigError, match="must map regular expressions to scheme names"):
        SchemeRules.parse({"mlp": 4}, SCHEMES)  # type: ignore[dict-item]
