"""Rope scalings against an independent transcription of the formulas, one frequency at a time."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.models import UnsupportedModel
from llmjax.models.fields import Fields
from llmjax.models.layers.rope_scaling import RopeLengths, extended_length, resolve_rope, rope_parameters

DIM, THETA, MAX = 64, 10000.0, 4096


def resolve(keys: dict[str, Any], *, dim: int = DIM, served: int | None = None, **top: Any) -> Any:
    fields = Fields({"rope_theta": THETA, "rope_scaling": keys, **top})
    lengths = RopeLengths(MAX, served)
    return resolve_rope(rope_parameters(fields, "full_attention"), head_dim=dim, lengths=lengths)


def plain(i: int, *, dim: int = DIM, theta: float = THETA) -> float:
    return 1 / theta ** (2 * i / dim)


def check(got: Any, expected: list[float], attention_factor: float = 1.0) -> None:
    np.testing.assert_allclose(got.inv_freq, expected, rtol=1e-6)
    assert got.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_default() -> None:
    check(resolve({}), [plain(i) for i in range(32)])
    check(resolve({"type": "default"}), [plain(i) for i in range(32)])


def test_linear() -> None:
    check(resolve({"rope_type": "linear", "factor": 8}), [plain(i) / 8 for i in range(32)])


def frequencies(rope: Any, *lengths: int) -> np.ndarray:
    """f32 [lengths, rotary_dim / 2]."""
    return np.asarray(rope.by_length.at(jnp.asarray(rope.inv_freq, jnp.float32), jnp.array(lengths, jnp.int32)))


@pytest.mark.parametrize("served", [None, 100, 10000])
def test_dynamic(served: int | None) -> None:
    got = resolve({"rope_type": "dynamic", "factor": 2.0}, served=served)
    check(got, [plain(i) for i in range(32)])
    known, same, *beyond = frequencies(got, 100, MAX, MAX + 1, 10000)
    assert np.array_equal(known, got.inv_freq) and np.array_equal(same, got.inv_freq)
    for length, found in zip((MAX + 1, 10000), beyond, strict=True):
        theta = THETA * (2.0 * length / MAX - 1) ** (64 / 62)
        np.testing.assert_allclose(found, [plain(i, theta=theta) for i in range(32)], rtol=2e-6)
    assert [got.by_length.kind(length) for length in (1, MAX, MAX + 1, 9999)] == [0, 0, MAX + 1, 9999]


def test_llama3() -> None:
    keys = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    expected, kinds = [], set()
    for i in range(32):
        inv = plain(i)
        wavelength = 2 * math.pi / inv
        if wavelength < 1024 / 4:
            kinds.add("kept")
            expected.append(inv)
        elif wavelength > 1024 / 1:
            kinds.add("divided")
            expected.append(inv / 8)
        else:
            kinds.add("blended")
            smooth = (1024 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * inv / 8 + smooth * inv)
    assert kinds == {"kept", "divided", "blended"}
    check(resolve({"rope_type": "llama3", **keys}), expected)


def yarn(*, factor: float, original: int, fast: float = 32, slow: float = 1, truncate: bool = True) -> list[float]:
    low, high = (DIM * math.log(original / (2 * math.pi * r)) / (2 * math.log(THETA)) for r in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    expected = []
    for i in range(DIM // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(plain(i) / factor * ramp + plain(i) * (1 - ramp))
    return expected


@pytest.mark.parametrize("truncate", [None, True, False])
def test_yarn(truncate: bool | None) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "truncate": truncate}
    expected = yarn(factor=4, original=2048, truncate=truncate is not False)
    check(resolve(keys), expected, 0.1 * math.log(4) + 1)


def test_yarn_betas_and_attention_factor() -> None:
    keys = {"type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7}
    check(resolve(keys), yarn(factor=4, original=MAX, fast=16, slow=2), 0.7)


def test_yarn_factor_of_the_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B's, which makes up for what YaRN would multiply queries and keys with."""
    keys = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    check(resolve({**keys, "attn_factor": 0.8782488562869419}), yarn(factor=4, original=2048), 1.0)
    with pytest.raises(UnsupportedModel, match=r"attn_factor = 0.5 is given beside attention_factor"):
        resolve({**keys, "attn_factor": 0.5, "attention_factor": 0.7})


def test_yarn_mscale_and_factor_from_the_lengths() -> None:
    keys = {"type": "yarn", "original_max_position_embeddings": 1024, "mscale": 1.2, "mscale_all_dim": 0.5}
    expected = (0.12 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    check(resolve(keys), yarn(factor=4, original=1024), expected)
    check(resolve(keys | {"mscale_all_dim": 0}), yarn(factor=4, original=1024), 0.1 * math.log(4) + 1)


@pytest.mark.parametrize("name", ["longrope", "su"])
@pytest.mark.parametrize("served", [None, 17, 9999])
def test_longrope(name: str, served: int | None) -> None:
    lists = {"long": [1 + i / 4 for i in range(32)], "short": [1 + i / 64 for i in range(32)]}
    keys = {"type": name, "long_factor": lists["long"], "short_factor": lists["short"]}
    got = resolve(keys, served=served, original_max_position_embeddings=1024)
    expected = {which: [plain(i) / divisors[i] for i in range(32)] for which, divisors in lists.items()}
    check(got, expected["short"], math.sqrt(1 + math.log(4) / math.log(1024)))
    found = frequencies(got, 17, 1024, 1025, 9999)
    np.testing.assert_allclose(found, [expected[which] for which in ("short", "short", "long", "long")], rtol=1e-6)
    assert [got.by_length.kind(length) for length in (1, 1024, 1025, 9999)] == [0, 0, 1, 1]


def test_longrope_factors() -> None:
    keys = {"rope_type": "longrope", "long_factor": [1.0] * 32, "short_factor": [1.0] * 32}
    assert resolve(keys).attention_factor == 1
    explicit = keys | {"factor": 32.0, "original_max_position_embeddings": 128}
    assert resolve(explicit).attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(128)))
    assert resolve(explicit | {"attention_factor": 1.19}).attention_factor == 1.19


def test_custom_divisors() -> None:
    divisors = [1.0] * 10 + [3.5] * 12 + [8.0] * 10
    got = resolve({"rope_type": "custom", "inv_freq_divisors": divisors})
    check(got, [plain(i) / divisors[i] for i in range(32)])


@pytest.mark.parametrize(("head_dim", "part", "rotary"), [(80, 0.25, 20), (96, 18 / 96, 18), (64, 0.5, 32)])
def test_partial_rotary(head_dim: int, part: float, rotary: int) -> None:
    got = resolve({}, dim=head_dim, partial_rotary_factor=part)
    assert got.rotary_dim == rotary
    check(got, [plain(i, dim=rotary) for i in range(rotary // 2)])


def test_transformers_5_style() -> None:
    fields = Fields({"rope_theta": 3.0, "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 500.0}})
    got = resolve_rope(rope_parameters(fields, "full_attention"), head_dim=8, lengths=RopeLengths(64))
    check(got, [plain(i, dim=8, theta=500.0) / 2 for i in range(4)])


def test_nested_by_layer_type() -> None:
    nested = {"full_attention": {"rope_type": "linear", "factor": 2}, "sliding_attention": {"rope_theta": 100.0}}
    fields = Fields({"rope_parameters": nested}, {"rope_theta": 900.0})
    lengths = RopeLengths(64)
    full = resolve_rope(rope_parameters(fields, "full_attention"), head_dim=8, lengths=lengths)
    sliding = resolve_rope(rope_parameters(fields, "sliding_attention"), head_dim=8, lengths=lengths)
    check(full, [plain(i, dim=8, theta=900.0) / 2 for i in range(4)])
    check(sliding, [plain(i, dim=8, theta=100.0) for i in range(4)])


def test_a_users_rope_scaling_replaces_a_plain_rope_parameters() -> None:
    keys = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
        "rope_scaling": {"type": "linear", "factor": 2},
    }
    got = resolve_rope(rope_parameters(Fields(keys), "full_attention"), head_dim=4, lengths=RopeLengths(64))
    check(got, [plain(i, dim=4, theta=7.0) / 2 for i in range(2)])


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"type": "yarn", "factor": 4.0}, 4 * MAX),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, MAX),
        ({"type": "linear", "factor": 4.0}, MAX),
        ({"type": "dynamic", "factor": 4.0}, 9000),
    ],
)
def test_extended_length(keys: dict[str, Any], length: int) -> None:
    parameters = rope_parameters(Fields({"rope_theta": THETA, "rope_scaling": keys}), "full_attention")
    assert extended_length(parameters, RopeLengths(MAX, 9000)) == length


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_type": "spiral"}, "config.json: rope_scaling: rope_type = 'spiral' is not supported; supported are"),
        ({"type": 3}, "rope_type = 3 is not supported"),
        ({"type": "linear"}, "factor = None must be a positive number"),
        ({"type": "linear", "factor": -2}, "factor = -2 must be a positive number"),
        ({"type": "linear", "factor": float("nan")}, "factor = nan must be a positive number"),
        ({"type": "linear", "factor": 2, "mrope_section": [1, 2]}, "mrope_section = [1, 2] is not supported here"),
        ({"type": "default", "factor": 2}, "factor = 2 is not supported here"),
        ({"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 2}, "must be at least low_freq"),
        ({"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, "must be a list of 32 numbers"),
        ({"type": "longrope", "long_factor": [1] * 32, "short_factor": ["a"] * 32}, "short_factor = 'a' must be a"),
        ({"type": "linear", "factor": 1e-60}, "frequencies that f32 cannot hold"),
        (
            {"type": "longrope", "long_factor": [1e-60] * 32, "short_factor": [1.0] * 32},
            "frequencies that f32 cannot hold",
        ),
        ({"type": "custom", "inv_freq_divisors": [0.0] * 32}, "inv_freq_divisors = 0.0 must be a positive number"),
        ({"type": "yarn", "factor": 2, "truncate": "no"}, "truncate = 'no' must be true or false"),
        ({"type": "yarn", "factor": 2, "rope_theta": 1.0}, "rope_theta = 1.0 must exceed 1"),
        ({"partial_rotary_factor": 1.5}, "leaves 96 of 64"),
        ({"partial_rotary_factor": 1e308}, "leaves 128 of 64"),
        ({"partial_rotary_factor": 0.02}, "leaves 1 of 64"),
    ],
)
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        resolve(keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": [1]}, "rope_parameters = [1] must be an object"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 4}},
            "contradicts rope_parameters in factor",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "has no entry for full_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear", "factor": 2}},
            "stands beside a rope_parameters nested by layer type",
        ),
    ],
)
def test_contradictions(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        rope_parameters(Fields(config), "full_attention")
    assert message in str(caught.value)
