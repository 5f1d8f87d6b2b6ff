"""Models as functions: names, merging, one trace per kind of layer."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import RaggedBatch
from llmjax.models import ModelConfig, abstract_model, init_random, merge, model_config
from llmjax.models.layers.state import make_stacks
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.jax_api

CONFIG = model_config(
    {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 30,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "sliding_window": 8,
    }
)


def lower(tokens: int, config: ModelConfig = CONFIG) -> Any:
    graph, shapes = abstract_model(config, dtype=jnp.float32, activation_dtype=jnp.float32)
    pages = dict.fromkeys(config.spans, 8)
    make = partial(make_stacks, config.states, num_pages=pages, page_size=4, dtype=jnp.dtype("float32"))

    def step(params: Any, kv: Any, tokens: Any, batches: Any) -> Any:
        model = merge(graph, params)
        out = model(tokens, tokens, kv, batches)
        return model.logits(out.hidden), out.kv

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    batch = RaggedBatch(query_start=ints(3), kv_len=ints(2), page_table=ints(2, 4), kv_index=ints(tokens))
    return jax.jit(step, donate_argnums=1).lower(
        shapes, jax.eval_shape(make), ints(tokens), (batch,) * len(config.spans)
    )


def test_thirty_layers_of_two_kinds_are_two_functions() -> None:
    text = lower(16).as_text()
    assert text.count("func.func private @decoder_layer") == 2
    assert text.count("call @decoder_layer") == 30


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3-next", 3), ("kimi-linear", 3))),
        *(("mamba", 1), ("granite4", 2), ("deepseek-v2", 2)),
    ],
)
def test_hybrids_of_many_layers_are_as_many_functions_as_kinds(name: str, kinds: int) -> None:
    """However many layers a model has, those that are equal are compiled once."""
    config = model_config(json.loads((GOLDEN / name / "config.json").read_text()))
    layers = tuple(config.layers[i % config.num_layers] for i in range(32))
    text = lower(16, dataclasses.replace(config, layers=layers)).as_text()
    assert len(set(layers)) == kinds
    assert text.count("func.func private @decoder_layer") == kinds
    assert text.count("call @decoder_layer") == 32


def test_merge_puts_every_tensor_where_its_name_says() -> None:
    graph, shapes = abstract_model(CONFIG, dtype=jnp.bfloat16, activation_dtype=jnp.float32)
    assert len(shapes) == 2 + 30 * 13
    assert shapes["model.layers.11.mlp.down_proj.weight"] == jax.ShapeDtypeStruct((32, 48), jnp.bfloat16)
    assert shapes["model.layers.29.self_attn.q_norm.weight"] == jax.ShapeDtypeStruct((8,), jnp.float32)
    model = merge(graph, {name: (name, like) for name, like in shapes.items()})
    assert model.model.layers[11].mlp.down_proj.weight.get_value()[0] == "model.layers.11.mlp.down_proj.weight"
    assert model.model.layers[2].self_attn.k_norm.weight.get_value()[0] == "model.layers.2.self_attn.k_norm.weight"
    assert model.lm_head is None


@pytest.mark.parametrize("change", [{"drop": "model.norm.weight"}, {"add": "x.y"}])
def test_merge_refuses_other_names(change: dict[str, str]) -> None:
    graph, shapes = abstract_model(CONFIG, dtype=jnp.float32, activation_dtype=jnp.float32)
    params: dict[str, Any] = dict(shapes)
    params.pop(change.get("drop", ""), None)
    if "add" in change:
        params[change["add"]] = 0
    with pytest.raises(ValueError, match=f"missing or unknown: {next(iter(change.values()))}"):
        merge(graph, params)


def test_equal_configs_give_equal_graphs() -> None:
    graphs = [abstract_model(CONFIG, dtype=jnp.float32, activation_dtype=jnp.float32)[0] for _ in range(2)]
    assert graphs[0] == graphs[1] and hash(graphs[0]) == hash(graphs[1])


@pytest.mark.parametrize(
    "family", ["llama", "opt-350m", "gemma2", "phi", pytest.param("qwen3-next", marks=pytest.mark.slow), "gpt2"]
)
def test_logits_need_nothing_of_the_layers(family: str) -> None:
    config = model_config(json.loads((GOLDEN / family / "config.json").read_text()))
    graph, shapes = abstract_model(config, dtype=jnp.float32, activation_dtype=jnp.float32)
    params = init_random(config, jax.random.key(1), dtype=jnp.float32)
    few = graph.without_layers
    assert set(few.names) == {name for name in shapes if ".layers." not in name}
    hidden = jax.random.normal(jax.random.key(2), (3, config.hidden_size))
    found = merge(few, {name: params[name] for name in few.names}).logits(hidden)
    np.testing.assert_array_equal(found, merge(graph, params).logits(hidden))


def test_init_random() -> None:
    small = dataclasses.replace(CONFIG, layers=CONFIG.layers[:1])
    params = init_random(small, jax.random.key(3), dtype=jnp.bfloat16)
    _, shapes = abstract_model(small, dtype=jnp.bfloat16, activation_dtype=jnp.float32)
    assert {n: (p.shape, p.dtype) for n, p in params.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    again = init_random(small, jax.random.key(3), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(params["model.embed_tokens.weight"], again["model.embed_tokens.weight"])
    q, k = (np.asarray(params[f"model.layers.0.self_attn.{name}.weight"], np.float32) for name in ("q_proj", "k_proj"))
    assert q.std() == pytest.approx(32**-0.5, rel=0.1)
    assert not np.array_equal(q[:16], k)
