"""Logits against Hugging Face's on tiny random checkpoints, whatever way the tokens are cut into steps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu.library import library
from llmjax.models import abstract_model, model_config
from tests.divergence import divergence
from tests.levels import at_levels

CHECKPOINTS = [
    "llama",
    "llama-bias",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-next",
    "deepseek-v2",
    "deepseek-v2-lite",
]
# One way to cut the tokens of each of these is enough most of the time, and for most of them one JAX.
MORE = [
    "starcoder2",
    "starcoder2-plain",
    "phi",
    "phi-norm",
    "phi3",
    "phi4-mini",
    "stablelm-3b",
    "stablelm-2",
    "stablelm-2-12b",
    "gpt-neox",
    "gpt-neox-in-turn",
    "gptj",
    "gpt2",
    "gpt2-scaled",
    "gpt-bigcode",
    "gpt-bigcode-heads",
    "opt",
    "opt-no-bias",
    "opt-350m",
    "falcon-7b",
    "falcon-40b",
    "falcon-11b",
    "falcon-rw",
    "bloom",
    "mpt",
    "gemma",
    "gemma2",
    "smollm3",
    "granite",
    "granite-moe",
    "olmo2",
    "olmoe",
    "glm4",
    "cohere",
    "cohere2",
    "exaone4",
    "baichuan-13b",
    "hunyuan",
    "deepseek-v3",
    "deepseek-moe",
    "glm4-moe",
    "ernie4_5-moe",
    "minimax-m2",
    "gpt-oss",
    "lfm2",
    "lfm2-moe",
    "mamba",
    "mamba2",
    "granite4",
    "bamba",
    "falcon-h1",
    "nemotron-h",
    "qwen3_5",
    "phimoe",
    "dbrx",
    "llama4",
]
# The same of these, by slow tests: what they are made of is in those above.
VARIANTS = [
    "bloom-normed",
    "granite-moe-shared",
    "granite4-dense",
    "falcon-h1-odd",
    "olmo3",
    "glm",
    "chatglm",
    "seed-oss",
    "ernie4_5",
    "exaone",
    "internlm2",
    "internlm3",
    "baichuan",
    "minicpm",
    "yi",
    "dots1",
    "hunyuan-moe",
    "minicpm3",
    "qwen3_5-moe",
    "nemotron-h-moe",
    "minimax",
    "gemma4",
    "deepseek-v32",
    "deepseek-v32-sparse",
    "qwen3-odd",
    "mixtral-odd",
    "deepseek-v3-odd",
    "lfm2-odd",
    "qwen3_5-odd",
    "gemma3n",
    "gemma3n-odd",
    "gemma4-odd",
    "gemma4-plain",
    "gemma4-experts",
    "llama4-long",
    "arcee",
    "olmo",
    "nemotron",
    "ministral3",
    "glm4-moe-lite",
    "glm-moe-dsa",
    "glm-moe-dsa-shared",
    "apertus",
    "falcon-mamba",
    "jamba",
    "kimi-linear",
    "bitnet",
]
# Of MORE, those that differ from others of the same architecture, or whose parts are all in others: slow tests.
COVERED = [
    *("starcoder2-plain", "phi-norm", "phi4-mini", "stablelm-3b", "stablelm-2", "gpt-neox-in-turn", "gpt2-scaled"),
    *("gpt-bigcode-heads", "opt-no-bias", "falcon-40b", "cohere", "bamba", "lfm2-moe"),
    *("nemotron-h", "falcon-h1", "minimax-m2", "glm4-moe", "gemma2", "llama4", "gpt-oss"),  # many parts, all in others
]
# Models of MORE and VARIANTS with a kind of state or of attention that no other has.
OF_THEIR_OWN = [
    *("bloom", "gpt2", "gpt-oss", "llama4", "deepseek-v3", "lfm2", "mamba", "mamba2", "falcon-h1", "gemma3n"),
    *("minimax", "deepseek-v32-sparse", "kimi-linear"),
]
SECOND_JAX = ["llama", "gemma3", "qwen3-next"]  # one for each kind of layer state
IN_EVERY_RUN = [name for name in MORE if name not in COVERED]
ROPES = [
    ("llama", "rope-linear"),
    ("llama", "rope-dynamic"),
    ("llama", "rope-llama3"),
    ("llama", "rope-yarn"),
    ("llama", "rope-yarn-mscale"),
    ("llama", "rope-longrope-long"),
    ("llama", "rope-longrope-short"),
    ("qwen3", "rope-v5"),
]
# Cases with the length of the prompt, which is continued to 40 tokens; the scalings change at 24.
GROWING = [("rope-longrope-grown", 17), ("rope-dynamic-grown", 17), ("rope-dynamic-further", 30)]
BUCKET, ROWS = 48, 4  # one step shape, so that a model compiles once
TOLERANCE = 2e-4


def close(got: Any, case: Any) -> None:
    assert np.abs(got[case.at] - case.logits).max() <= TOLERANCE


@pytest.fixture(
    scope="module",
    params=at_levels([*CHECKPOINTS, *MORE, *VARIANTS], fast=CHECKPOINTS, slow=OF_THEIR_OWN, jax_api=SECOND_JAX),
)
def model(request: Any, golden: Any, stepper: Any) -> Any:
    """A checkpoint and one engine for all its tests."""
    checkpoint = golden(request.param)
    return checkpoint, stepper(checkpoint.config, checkpoint.params, max_len=64, num_pages=256)


def run_in_chunks(engine: Any, tokens: Any, chunk: Any, bucket: int = BUCKET, prompt_len: int | None = None) -> Any:
    request = engine.add(tokens, prompt_len=prompt_len)
    parts = []
    while request.done < len(tokens):
        count = min(chunk, len(tokens) - request.done)
        parts += engine.step([(request, count)], bucket=bucket, rows=ROWS)
    return np.concatenate(parts)


@pytest.mark.parametrize("prompt", ["long", "short"])
def test_one_shot_prefill(model: Any, prompt: Any) -> None:
    checkpoint, engine = model
    case = checkpoint.cases[prompt]
    close(run_in_chunks(engine, case.tokens, BUCKET), case)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunks_and_single_tokens(model: Any, chunk: Any) -> None:
    checkpoint, engine = model
    close(run_in_chunks(engine, checkpoint.cases["long"].tokens, chunk), checkpoint.cases["long"])


def test_decode_in_a_step_of_as_many_tokens_as_requests(golden: Any, stepper: Any) -> None:
    checkpoint = golden("gemma3")
    case = checkpoint.cases["short"]
    close(run_in_chunks(stepper(checkpoint.config, checkpoint.params), case.tokens, 1, bucket=ROWS), case)


def test_prefix_hits_and_preemption(model: Any) -> None:
    checkpoint, engine = model
    case = checkpoint.cases["long"]
    first, preempted = engine.add(case.tokens), engine.add(case.tokens)
    engine.step([(first, 30), (preempted, 5)], bucket=BUCKET, rows=ROWS)
    # Six pages are another request's.
    hit = engine.add(case.tokens)
    hit.tables = [np.concatenate([theirs[:6], own[6:]]) for theirs, own in zip(first.tables, hit.tables, strict=True)]
    hit.done, again = 24, engine.add(case.tokens)
    (rest,) = engine.step([(hit, len(case.tokens) - 24)], bucket=BUCKET, rows=ROWS)
    np.testing.assert_allclose(rest, case.logits[24:], rtol=0, atol=TOLERANCE)
    # Pages of a preempted request are gone; what it had is computed at once with what follows.
    (recomputed,) = engine.step([(again, len(case.tokens))], bucket=BUCKET, rows=ROWS)
    np.testing.assert_allclose(recomputed, case.logits, rtol=0, atol=TOLERANCE)


def test_prefill_of_one_request_among_decodes_of_others(model: Any) -> None:
    check_mixed_steps(*model)


def test_greedy_continuations_of_64_tokens(model: Any) -> None:
    check_greedy_continuation(*model)


@pytest.mark.parametrize("name", [*CHECKPOINTS, *MORE, *VARIANTS])
def test_checkpoints_hold_what_models_need(golden: Any, name: str) -> None:
    checkpoint = golden(name)
    config = model_config(checkpoint.config)
    shapes = abstract_model(config, dtype=jnp.dtype("float32"), activation_dtype=jnp.dtype("float32"))[1]
    assert {key: values.shape for key, values in checkpoint.params.items()} == {k: v.shape for k, v in shapes.items()}


@pytest.mark.parametrize(
    "name",
    [
        *IN_EVERY_RUN,
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*COVERED, *VARIANTS]),
    ],
)
def test_mixed_steps_and_greedy_continuations_of_more_families(golden: Any, stepper: Any, name: str) -> None:
    checkpoint = golden(name)
    engine = stepper(checkpoint.config, checkpoint.params, max_len=64, num_pages=96)
    check_mixed_steps(checkpoint, engine)
    check_greedy_continuation(checkpoint, engine)


def check_greedy_continuation(checkpoint: Any, engine: Any) -> None:
    """Checks that each of Hugging Face's 64 tokens is the likeliest after the ones before it, as in greedy decoding."""
    tokens = checkpoint.greedy
    request = engine.add(tokens[:-1], prompt_len=1)
    parts = [engine.step([(request, count)], bucket=BUCKET, rows=ROWS)[0] for count in (*[1] * 16, 16, 16, 16)]
    assert np.concatenate(parts).argmax(1).tolist() == tokens[1:].tolist()


def check_mixed_steps(checkpoint: Any, engine: Any) -> None:
    """Prefill of one request among decodes of others."""
    long, short = checkpoint.cases["long"], checkpoint.cases["short"]
    decoding = [engine.add(short.tokens), engine.add(long.tokens)]
    parts = [[part] for part in engine.step([(r, 6) for r in decoding], bucket=BUCKET, rows=ROWS)]
    prefilling = engine.add(long.tokens)
    rest = []
    for count in (5, 9, 11):
        *decoded, prefilled = engine.step(
            [(decoding[0], 1), (decoding[1], 1), (prefilling, count)], bucket=BUCKET, rows=ROWS
        )
        for i, part in enumerate(decoded):
            parts[i].append(part)
        rest.append(prefilled)
    rest += engine.step([(prefilling, len(long.tokens) - prefilling.done)], bucket=BUCKET, rows=ROWS)
    for case, logits in ((short, np.concatenate(parts[0])), (long, np.concatenate(parts[1]))):
        np.testing.assert_array_equal(len(logits), 9)
        known = case.at[case.at < 9]
        np.testing.assert_allclose(logits[known], case.logits[: len(known)], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(rest), long.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "case"), ROPES)
def test_rope_scalings(golden: Any, golden_keys: Any, stepper: Any, name: Any, case: Any) -> None:
    checkpoint = golden(name)
    expected = checkpoint.cases[case]
    engine = stepper({**checkpoint.config, **golden_keys(name, case)}, checkpoint.params)
    close(run_in_chunks(engine, expected.tokens, BUCKET), expected)
    unscaled = checkpoint.cases["short" if case.endswith("-short") else "long"].logits[expected.at]
    assert np.abs(unscaled - expected.logits).max() > 0.05


@pytest.mark.parametrize(("case", "prompt_len"), GROWING)
def test_sequences_that_outgrow_a_rope_scaling(
    golden: Any, golden_keys: Any, stepper: Any, case: str, prompt_len: int
) -> None:
    """In chunks, token by token, and at once as after a preemption."""
    checkpoint = golden("llama")
    expected = checkpoint.cases[case]
    engine = stepper({**checkpoint.config, **golden_keys("llama", case)}, checkpoint.params)
    for chunk in (1, 7, BUCKET):
        close(run_in_chunks(engine, expected.tokens, chunk, prompt_len=prompt_len), expected)
    other = run_in_chunks(engine, expected.tokens, BUCKET)  # as one long prompt
    assert np.abs(other[expected.at] - expected.logits).max() > 0.05


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_bf16_weights(golden: Any, stepper: Any, activations: str) -> None:
    """Stored values are bf16, so that only roundings on the way differ."""
    checkpoint = golden("qwen3")
    case = checkpoint.cases["short"]
    engine = stepper(checkpoint.config, checkpoint.params, dtype="bfloat16", activation_dtype=activations)
    logits = run_in_chunks(engine, case.tokens, BUCKET)
    assert logits.dtype == np.float32
    assert divergence(case.logits, logits[case.at]) <= 1e-3


@pytest.mark.parametrize("name", ["phi", "stablelm-2"])
def test_fused_halves_behind_layer_norms(golden: Any, stepper: Any, name: str) -> None:
    """Kernels that fuse halves take bf16 weights and few rows, and give their products, which are added outside."""
    checkpoint = golden(name)
    case = checkpoint.cases["short"]
    engine = stepper(checkpoint.config, checkpoint.params, dtype="bfloat16")
    logits = run_in_chunks(engine, case.tokens, 1, bucket=ROWS)
    # XLA's products round their inputs.
    assert np.abs(logits[case.at] - case.logits).max() < (TOLERANCE if library() is not None else 0.5)
