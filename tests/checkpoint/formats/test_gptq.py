"""GPTQ layers packed code by code, as the fact sheets of AutoGPTQ and GPTQModel describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SCALES = np.array([0.01, 0.0, -0.0, 65504.0, -65504.0, 6e-8, 6.1e-5, -0.5, 1.0], np.float16)


def pack_words(codes: list[int], bits: int) -> list[int]:
    """32-bit words of codes; 3-bit codes go by 32 into three words, with codes 10 and 21 cut in two."""
    words = []
    if bits != 3:
        per_word = 32 // bits
        for first in range(0, len(codes), per_word):
            words.append(sum(code << bits * k for k, code in enumerate(codes[first : first + per_word])))
        return words
    for first in range(0, len(codes), 32):
        c = codes[first : first + 32]
        words.append(sum(c[k] << 3 * k for k in range(10)) | (c[10] & 3) << 30)
        words.append(c[10] >> 2 | sum(c[k] << 3 * (k - 11) + 1 for k in range(11, 21)) | (c[21] & 1) << 31)
        words.append(c[21] >> 1 | sum(c[k] << 3 * (k - 22) + 2 for k in range(22, 32)))
    return words


def int32(words: list[list[int]]) -> np.ndarray:
    return np.array(words, np.uint32).view(np.int32)


def packer(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = False,
    version: int = 1,
    act: bool = False,
    g_idx: bool = True,
    values: np.ndarray = SCALES,
) -> Callable[[int, int], tuple[dict[str, np.ndarray], np.ndarray]]:
    rng = np.random.default_rng(bits)

    def pack(outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        codes = rng.integers(0, 2**bits, (inputs, outputs))
        if symmetric:
            zeros = np.full((groups, outputs), 2 ** (bits - 1))
        else:  # what AutoGPTQ's version 1 can express: 0 wraps around, except in 3 bits, which can express 8 instead
            zeros = rng.integers(0, 2**bits, (groups, outputs)) + (version == 1 and bits == 3)
        scales = rng.choice(values, (groups, outputs))
        group_of = np.arange(inputs) // size
        if act:
            group_of = rng.permutation(group_of)
        weight = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            g = group_of[i]
            weight[:, i] = (codes[i] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
        stored_zeros = (zeros - (version == 1)) % 2**bits
        parts = {
            ".qweight": int32([pack_words(codes[:, o].tolist(), bits) for o in range(outputs)]).T.copy(),
            ".qzeros": int32([pack_words(row.tolist(), bits) for row in stored_zeros]),
            ".scales": scales,
        }
        if g_idx:
            parts[".g_idx"] = group_of.astype(np.int32)
        return parts, weight

    return pack


def config(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False} | more


@pytest.mark.parametrize("group", [-1, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_and_group_size(bits: int, group: int, check_model: Callable, small_tiles: None) -> None:
    check_model(packer(bits, group), config(bits, group))


@pytest.mark.parametrize("bits", [3, 4])
def test_version_2_stores_zeros_as_they_are(bits: int, check_model: Callable) -> None:
    check_model(packer(bits, version=2), config(bits, checkpoint_format="gptq_v2"))


@pytest.mark.parametrize("version", [1, 2])
def test_act_order_and_a_quantized_head(version: int, check_model: Callable, small_tiles: None) -> None:
    name = "gptq" if version == 1 else "gptq_v2"
    settings = config(desc_act=True, checkpoint_format=name, lm_head=True, sym=True)
    check_model(packer(act=True, version=version, symmetric=True), settings, head=True)


def test_settings_in_a_file_of_their_own_and_no_g_idx(check_model: Callable) -> None:
    settings = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
    checkpoint = check_model(packer(symmetric=True, g_idx=False), settings, file="quantize_config.json")
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].type_name == "GPTQ-4"


def test_layers_may_differ_where_the_settings_say_so(check_model: Callable) -> None:
    kinds = [packer(4, 32), packer(8, 64), packer(2, -1)]
    count = iter(range(100))
    settings = config(4, 128, dynamic={"+:.*down.*": {"bits": 8}})
    check_model(lambda outputs, inputs: kinds[next(count) % 3](outputs, inputs), settings)


def test_group_size_128_and_a_short_last_group(check_model: Callable) -> None:
    check_model(packer(4, 128), config(4, 128))


@pytest.mark.parametrize(("bits", "act"), [(4, True), (8, False)])
def test_logits(bits: int, act: bool, check_model: Callable, check_logits: Callable) -> None:
    layers = packer(bits, act=act, values=np.array([0.01, 0.02, -0.015], np.float16) * 16 / 2**bits)
    check_logits(check_model(layers, config(bits, desc_act=act)))
