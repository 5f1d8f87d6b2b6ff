"""Whole steps compiled for a described card, without one: launches by the host, copies, and sorts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llmjax import models
from llmjax.engine.device.batch import BatchLayout, make_buckets
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.device.step import step
from llmjax.engine.programs.graphs import GRAPHS, LAUNCHES
from llmjax.kernels.offloading import HOST_MEMORY, SplitStack
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.models.layers.state import make_stacks
from llmjax.sampling.state import make_sampler_state
from tests.described_card import LLAMA, ForCard, compile_for_card, needs_plugin, whole_step

pytestmark = [needs_plugin, whole_step, pytest.mark.jax_api]
Shape = jax.ShapeDtypeStruct

TIED = {**LLAMA, "tie_word_embeddings": True}
QWEN_MOE = {
    **TIED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
FOUR_BITS = partial(RowFormat, codes=Codes(4), group_size=128, scale="f16", zero="u8")


def quantized(shape: Shape) -> Shape | QTensor:
    """A weight in 4 bits, if it is a matrix or a stack."""
    if len(shape.shape) < 2 or shape.dtype != jnp.bfloat16:
        return shape
    form = FOUR_BITS(shape.shape[-1])
    words = Shape((*shape.shape[:-2], -(-shape.shape[-2] // CUDA_TILE), form.num_words, CUDA_TILE), jnp.uint32)
    return QTensor(words, None, form, shape.shape[-2], jnp.dtype(jnp.bfloat16))


def with_copy(shape: Shape) -> Shape | QTensor:
    """A weight in 4 bits with a copy in 16, if it is a matrix."""
    weight = quantized(shape)
    return replace(weight, copy=shape) if isinstance(weight, QTensor) else weight


def offloaded(shape: Shape, count: int) -> Shape | SplitStack:
    """A weight with the last experts in the host's memory, if it is a stack."""
    if len(shape.shape) < 3:
        return shape
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_MEMORY)
    here, there = ((n, *shape.shape[1:]) for n in (shape.shape[0] - count, count))
    return SplitStack(Shape(here, shape.dtype), Shape(there, jnp.uint16, sharding=place))


def compiled_step(
    folder: Path, settings: dict[str, Any] = TIED, weight: Any = lambda shape: shape, **options: Any
) -> ForCard:
    """A step of the decode family, or of the mixed one with ``tokens``, as the engine runs it."""
    seqs, steps, tokens = (options.get(name, default) for name, default in (("seqs", 1), ("steps", 1), ("tokens", 0)))
    num_pages = options.get("num_pages", 1024)
    config = models.model_config(settings, max_model_len=4096)
    graph, shapes = models.abstract_model(config, dtype=jnp.dtype("bfloat16"), activation_dtype=jnp.dtype("bfloat16"))
    make = partial(make_stacks, config.states, num_pages=dict.fromkeys(config.spans, num_pages), page_size=16)
    kv = jax.eval_shape(partial(make, dtype=jnp.dtype("bfloat16")))
    sampler = jax.eval_shape(partial(make_sampler_state, num_slots=seqs, vocab_size=config.vocab_size))
    rows = jax.eval_shape(partial(make_row_state, num_slots=seqs, num_groups=1, pages_per_sequence=256))
    state = DeviceState(kv=kv, rows=rows, sampler=sampler)
    buckets = make_buckets(max_num_seqs=seqs, max_num_batched_tokens=tokens or 16, decode_steps=steps)
    bucket = [bucket for bucket in buckets if bucket.decode is not bool(tokens)][-1]
    layout = BatchLayout(bucket=bucket, num_slots=seqs, pages_per_sequence=256, num_groups=1)
    run = partial(step, graph=graph, names=tuple(shapes), layout=layout, max_logprobs=20)
    found = compile_for_card(
        run,
        tuple(weight(shape) for shape in shapes.values()),
        state,
        Shape((layout.size,), jnp.int32),
        donated=1,
        options=options.get("xla", GRAPHS),
        folder=folder,
    )
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert found.memory.alias_size_in_bytes >= state_bytes  # nothing of the state is held twice
    return found


@pytest.mark.parametrize("options", [{}, {"steps": 8}, {"seqs": 32}, {"tokens": 512}], ids=str)
def test_a_dispatch_is_one_graph(options: dict[str, int], tmp_path: Path) -> None:
    found = compiled_step(tmp_path, weight=quantized, **options)
    assert found.started == ["kCommandBuffer"]
    assert found.count("kConditional") > 5
    # The sampler's search has two; steps, log-probabilities of prompts, and rows whose windows of penalties move on.
    assert found.count("kWhile") == 2 + ("steps" in options) + ("tokens" in options) + ("seqs" in options)


def test_without_graphs_everything_is_started_by_the_host(tmp_path: Path) -> None:
    found = compiled_step(tmp_path, weight=quantized, xla=LAUNCHES)
    assert found.count("kCommandBuffer") == 0
    assert len(found.started) > 30


@pytest.mark.parametrize("options", [{"steps": 8}, {"seqs": 32}, {"tokens": 64}, {"tokens": 512}], ids=str)
def test_nothing_large_is_copied_converted_or_sorted(options: dict[str, int], tmp_path: Path) -> None:
    found = compiled_step(tmp_path, **options)
    rows = options.get("tokens") or options.get("seqs", 1)  # whose logits there are
    sorts = [
        shape for line in found.text.splitlines() if " sort(" in line for shape in re.findall(r"\[(\d+,\d+)\]", line)
    ]
    assert max(int(shape.split(",")[1]) for shape in sorts) < 4096
    joined = [line for line in found.text.splitlines() if " concatenate(" in line]
    assert not [line for line in joined if f",{LLAMA['hidden_size']}]{{" in line]  # nor weights to one matrix
    # Some copies of the logits, and no matrix or page: a layer's pages are 32 MiB, the embedding 1 GiB.
    assert found.memory.temp_size_in_bytes < 6 * rows * LLAMA["vocab_size"] * 4 + (4 << 20)


def test_temporaries_do_not_depend_on_the_number_of_pages(tmp_path: Path) -> None:
    """Therefore the engine may measure them with more pages than there will be."""
    few, many = (compiled_step(tmp_path / str(n), seqs=4, tokens=64, num_pages=n).memory for n in (2048, 4096))
    assert few.temp_size_in_bytes == many.temp_size_in_bytes
    assert few.output_size_in_bytes - few.alias_size_in_bytes == many.output_size_in_bytes - many.alias_size_in_bytes


def test_offloaded_experts_stay_in_the_hosts_memory(tmp_path: Path) -> None:
    on_card = compiled_step(tmp_path / "whole", QWEN_MOE)
    found = compiled_step(tmp_path / "split", QWEN_MOE, partial(offloaded, count=100))
    stack = 100 * 768 * 2048 * 2
    assert found.memory.host_argument_size_in_bytes == 2 * 3 * stack
    assert found.memory.argument_size_in_bytes == on_card.memory.argument_size_in_bytes - 2 * 3 * stack
    # One expert at a time is on the card.
    assert found.memory.temp_size_in_bytes < on_card.memory.temp_size_in_bytes + 3 * 768 * 2048 * 2 * 2
    assert found.started == ["kCommandBuffer"]


def test_a_step_with_copies_dequantizes_nothing(tmp_path: Path) -> None:
    """Its prompts are products of plain matrices: no weights in bf16 lie there meanwhile."""
    without, found = (
        compiled_step(tmp_path / name, weight=weight, tokens=512, seqs=4, xla=LAUNCHES)
        for name, weight in (("without", quantized), ("with", with_copy))
    )
    assert without.memory.temp_size_in_bytes > found.memory.temp_size_in_bytes + 2 * 14336 * 4096
    matrices = 2 * 7  # of two layers; each was three kernels: words of a row side by side, scales, weights
    assert found.count("kCustomKernel") <= without.count("kCustomKernel") - 3 * matrices


@pytest.mark.parametrize("seqs", [1, 32])
def test_small_kernels_of_a_layer_are_few(seqs: int, tmp_path: Path) -> None:
    """Rotating and storing keys and values are one kernel, and queries are rotated beside it."""
    found = compiled_step(tmp_path, seqs=seqs)
    lines = [line for line in found.thunks if "kCustomKernel" in line]
    decodes = [i for i, line in enumerate(lines) if " decode grid" in line]
    assert len(decodes) == 2 and all(" merge grid" in lines[i + 1] for i in decodes)
    layer = lines[decodes[0] : decodes[1]]  # from attention to attention
    assert sum("scatter_fusion" in line for line in layer) == 1
    assert sum("concatenate_fusion" in line for line in layer) == 1
    assert len(layer) <= 17  # 6 or 7 of products; norms, residuals, activation, rope, storing, attention, merging


def test_products_for_a_described_card_are_none_that_a_card_would_choose(tmp_path: Path) -> None:
    """Why programs are not compiled ahead and carried to a card: there XLA measures how each product is divided, and
    without one it takes the first division that there is. Once it does better, they can be carried along."""
    x, weight = Shape((512, 4096), jnp.bfloat16), Shape((14336, 4096), jnp.bfloat16)
    product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    found = compile_for_card(product, x, weight, donated=(), options={}, folder=tmp_path)
    assert '"output_tiles":[{"sizes":["16","8"]}]' in found.text and '"num_warps":"2"' in found.text
