"""Mixes against what llama.cpp wrote for models of several shapes, and the user's own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ConfigError
from llmjax.models import model_config
from llmjax.quantization.mixes import MIXES, Choice, ModelShape, tensor_scheme

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "mixes.json").read_text())
HEAD = 32

NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.3.gate_proj",
    "ffn_up_exps": "mlp.experts.3.up_proj",
    "ffn_down_exps": "mlp.experts.3.down_proj",
}
DENSE = ModelShape(layers=32, heads=32, kv_heads=32)


def choice(mix: str, name: str, columns: int = 4096, model: ModelShape = DENSE, **options: Any) -> Choice:
    return tensor_scheme(mix, name=name, shape=(64, columns), model=model, **options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("case", GOLDEN)
def test_as_llama_cpp(case: str, mix: str) -> None:
    facts = GOLDEN[case]["model"]
    model = ModelShape(
        layers=facts["layers"],
        heads=facts["heads"],
        kv_heads=facts["kv_heads"],
        experts=facts["experts"],
        tied=facts["tied"],
        architecture="LlamaForCausalLM",
    )
    for stem, expected in GOLDEN[case]["types"][mix].items():
        columns = {"attn_output": facts["heads"] * HEAD, "ffn_down": facts["ff"], "ffn_down_exps": facts["ff"]}
        if stem in ("token_embd", "output"):
            names = [f"{NAMES[stem]}.weight"]
        else:
            names = [f"model.layers.{layer}.{NAMES[stem]}.weight" for layer in range(facts["layers"])]
        found = [choice(mix, name, columns.get(stem, facts["hidden"]), model).scheme or "f32" for name in names]
        assert found == expected or (len(expected) == 1 and found == expected * len(names)), stem


def test_one_scheme_for_everything() -> None:
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"):
        assert choice("q4k", f"{name}.weight").scheme == "q4_k"
        assert choice("Q2K", f"{name}.weight").scheme == "q2_k"
    assert choice("q2_k", "model.layers.0.mlp.down_proj.weight").scheme == "q3_k"


def test_rows_that_fill_no_blocks() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert choice("q4_k_m", name, 576) == Choice("q5_0", "q4_k")
    assert choice("q4_k_m", name, 576).fell_back
    assert choice("q4_k_m", name, 40) == Choice(None, "q4_k")
    assert choice("q8_0", name, 40) == Choice(None, "q8_0")
    assert not choice("q4_k_m", name).fell_back


def test_what_is_never_quantized() -> None:
    for name in ("model.norm.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert choice("q4_k_m", name, rule="q8_0") == Choice(None, None)
    vector = tensor_scheme("q4_k_m", name="model.layers.0.input_layernorm.weight", shape=(256,), model=DENSE)
    assert vector == Choice(None, None)


def test_a_rule_comes_first() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    assert choice("q4_k_m", name, rule="q8_0").scheme == "q8_0"
    assert choice("q4_k_m", name, 96, rule="q5_k") == Choice("q5_1", "q5_k")
    assert choice("q4_k_m", "lm_head.weight", rule="none") == Choice(None, None)


def test_model_shape() -> None:
    config = {"model_type": "qwen2", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    model = ModelShape.of(model_config(config))
    assert model == ModelShape(layers=80, heads=64, kv_heads=8, architecture="Qwen2ForCausalLM")
    assert model.is_70b
    hybrid = {"model_type": "qwen3_next", "num_hidden_layers": 8, "num_experts": 8, "num_experts_per_tok": 2}
    assert ModelShape.of(model_config(hybrid | {"tie_word_embeddings": True})) == ModelShape(
        layers=8, heads=16, kv_heads=2, experts=8, tied=True, architecture="Qwen3NextForCausalLM"
    )


def test_model_shape_of_a_config_that_leaves_out_what_its_family_assumes() -> None:
    model = ModelShape.of(model_config({"architectures": ["MistralForCausalLM"]}))
    assert model == ModelShape(layers=32, heads=32, kv_heads=8, architecture="MistralForCausalLM")
    assert model.shares_heads


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="quantization 'q4_k_x' is unknown; known are q4_0"):
        choice("q4_k_x", "lm_head.weight")
