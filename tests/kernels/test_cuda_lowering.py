"""Every CUDA kernel lowers for Ampere and Hopper on a machine without a card, and compiles where JAX's CUDA plug-in is
installed (``pip install 'llmjax[test-cuda]'``; it compiles without a card)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llmjax import models
from llmjax.engine.device.batch import BatchLayout, make_buckets
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.device.step import step
from llmjax.engine.programs.graphs import LAUNCHES
from llmjax.kernels.activations import ACTIVATIONS, CLAMPED_SWIGLU
from llmjax.kernels.attention import RaggedBatch, attend, make_pages
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cuda import attention as cuda
from llmjax.kernels.cuda import tuned
from llmjax.kernels.cuda.experts import by_fragments
from llmjax.kernels.cuda.kv_write import write_kv
from llmjax.kernels.cuda.quantized_linear import multiplies_fragments
from llmjax.kernels.cuda.records import E2M1
from llmjax.kernels.experts import EXPERTS
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.models.layers.state import make_stacks
from llmjax.sampling.state import make_sampler_state
from tests.described_card import (
    A100,
    B200,
    H100,
    LLAMA,
    RTX_4090,
    RTX_5090,
    Card,
    ForCard,
    compile_for_card,
    lower_for,
    needs_plugin,
    whole_step,
)

pytestmark = pytest.mark.jax_api

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Attention:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bfloat16"
    activations: str = "bfloat16"
    tokens: int = 512
    rules: tuple[tuple[str, Any], ...] = ()
    calibrated: bool = False
    value_dim: int | None = None

    def arguments(self, rows: int = 16) -> tuple[Any, ...]:
        tokens = self.tokens or rows
        dtype = jnp.dtype(self.activations)
        pages = jax.eval_shape(
            lambda: make_pages(
                num_pages=64,
                page_size=16,
                num_kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtype=jnp.dtype(self.cache),
                calibration=jnp.ones((2, 2)) if self.calibrated else None,
                value_dim=self.value_dim,
            )
        )
        batch = RaggedBatch(
            query_start=Shape((rows + 1,), jnp.int32),
            kv_len=Shape((rows,), jnp.int32),
            page_table=Shape((rows, 256), jnp.int32),
            kv_index=Shape((tokens,), jnp.int32),
            first_page=Shape((), jnp.int32),
            decode=not self.tokens,
        )
        q, k = (Shape((tokens, heads, self.head_dim), dtype) for heads in (self.heads, self.kv_heads))
        return q, k, None if self.value_dim else k, pages, batch

    def call(self, *arguments: Any) -> jax.Array:
        return cuda.attend(*arguments, scale=0.1, **dict(self.rules))[0]


ALL_RULES = (("window", 100), ("softcap", 30.0))
LATENT: dict[str, Any] = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
ATTENTIONS = {
    "decode": Attention(tokens=0),
    "mixed": Attention(),
    "rules": Attention(rules=ALL_RULES),
    "multi-head, head size 80": Attention(kv_heads=32, head_dim=80),
    "head size 256": Attention(heads=4, kv_heads=1, head_dim=256),
    "head size 64": Attention(heads=9, kv_heads=3, head_dim=64),
    "few tokens": Attention(tokens=16),
    "int8": Attention(cache="int8"),
    "int8 decode": Attention(cache="int8", tokens=0),
    "int8, calibrated": Attention(cache="int8", calibrated=True),
    "e4m3": Attention(cache="float8_e4m3fn"),
    "e5m2": Attention(cache="float8_e5m2"),
    "f16": Attention(cache="float16", activations="float16"),
    "latent, decode": Attention(tokens=0, **LATENT),
    "latent": Attention(**LATENT),
    "latent, int8": Attention(cache="int8", **LATENT),
    "latent, f32": Attention(cache="float32", activations="float32", **LATENT),
    "f32": Attention(cache="float32", activations="float32"),
    "f32, int8": Attention(cache="int8", activations="float32"),
}

FORMATS = {
    "q4_0": RowFormat(4096, Codes(4), 32, "f16", zero=8),
    "q4_k": RowFormat(4096, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "q6_k": RowFormat(4096, Codes(6), 16, "i8", zero=32, super_size=256),
    "q8_0": RowFormat(4096, Codes(8, "int"), 32, "f16"),
    "gptq": RowFormat(4096, Codes(4), 128, "f16", zero="u8"),
    "fp8": RowFormat(4096, Codes(8, "e4m3"), 128, "f32"),
    "nvfp4": RowFormat(4096, Codes(4, levels=E2M1), 16, "e4m3", super_size=4096, super_scale="f32"),
    "mxfp4": RowFormat(4096, Codes(4, levels=E2M1), 32, "e8m0"),
    "iq4_nl": RowFormat(4096, Codes(4, levels=tuple(range(16))), 32, "f16"),
    "bits5": RowFormat(4096, Codes(5), 32, "f16", minimum="f16"),
}


def matrix(form: RowFormat, dtype: str = "bfloat16", *, size_out: int = 4096) -> QTensor:
    words = Shape((size_out // CUDA_TILE, form.num_words, CUDA_TILE), jnp.uint32)
    return QTensor(words, None, form, size_out, jnp.dtype(dtype))


def kernels_of() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    for name, case in ATTENTIONS.items():
        yield f"attention, {name}", case.call, case.arguments()
    for cache in cuda.CACHE_TYPES:
        _, k, v, pages, batch = Attention(cache=cache).arguments()
        yield f"KV write, {cache}", write_kv, (pages, k, v, batch)
    for name, form in FORMATS.items():
        for rows in (1, 2, 16, 128):
            x = Shape((rows, form.size_in), jnp.bfloat16)
            yield f"{name}, {rows} rows", partial(QUANTIZED_LINEAR), (x, matrix(form), None)
    yield (
        "f32, 16 rows",
        partial(QUANTIZED_LINEAR),
        (Shape((16, 4096), jnp.float32), matrix(FORMATS["q4_0"], "float32"), None),
    )

    integers = dataclasses.replace(matrix(RowFormat(4096, Codes(8, "int"), 4096, "f32")), activations="int8")
    for rows in (16, 128):
        yield f"w8a8, {rows} rows", partial(QUANTIZED_LINEAR), (Shape((rows, 4096), jnp.bfloat16), integers, None)

    for name, kind in {"bf16": None, "q4_k": FORMATS["q4_k"], "mxfp4": FORMATS["mxfp4"]}.items():
        for tokens in (1, 16, 4096):
            yield f"experts, {name}, {tokens} tokens", partial(EXPERTS, activation="silu"), experts_of(kind, tokens)


def experts_of(form: RowFormat | None, tokens: int) -> tuple[Any, ...]:
    """Sizes of Qwen3-30B-A3B, with biases."""

    def stack(size_out: int, size_in: int) -> Projection:
        bias = Shape((128, size_out), jnp.bfloat16)
        if form is None:
            return Projection(Shape((128, size_out, size_in), jnp.bfloat16), bias)
        own = dataclasses.replace(form, size_in=size_in)
        one = matrix(own, size_out=size_out)
        return Projection(dataclasses.replace(one, words=Shape((128, *one.words.shape), jnp.uint32)), bias)

    weights = ExpertWeights(gate=stack(768, 2048), up=stack(768, 2048), down=stack(2048, 768))
    chosen, shares = (Shape((tokens, 8), dtype) for dtype in (jnp.int32, jnp.float32))
    return Shape((tokens, 2048), jnp.bfloat16), chosen, shares, weights


KERNELS = {name: (call, arguments) for name, call, arguments in kernels_of()}


def by_mosaic(name: str) -> bool:
    """Whether Mosaic GPU lowers a kernel; what it makes is tested in `test_cuda_fragments.py`."""
    _, (x, weight, *others) = KERNELS[name]
    if isinstance(others[-1], ExpertWeights):
        return x.shape[0] > 2 and by_fragments(others[-1])
    return isinstance(weight, QTensor) and multiplies_fragments(x.shape[0], weight)


COMPILED_ONLY = (", 2 rows", ", 128 rows", ", 4096 tokens")
LOWERED = [name for name in KERNELS if not name.endswith(COMPILED_ONLY)]


def number_of_kernels(name: str) -> int:
    kind, _, rest = name.partition(", ")
    if kind != "attention":
        return 2 if kind == "experts" else 1  # by Mosaic, that of gate is up's too
    case = ATTENTIONS[rest]
    attends = 2 if case.tokens else 1
    stores = bool(case.tokens) or (jnp.dtype(case.cache).itemsize == 1 and not case.calibrated)
    return attends + 1 + stores  # one merges


# What is lowered differs in the types of 8-bit floats alone.
ON_HOPPER = ("attention, mixed", "attention, e4m3", "KV write, float8_e5m2", "fp8, 1 rows", "experts, q4_k, 1 tokens")


@pytest.mark.parametrize(
    "name,card", [*((name, A100) for name in LOWERED), *((name, H100) for name in ON_HOPPER)], ids=str
)
def test_lowers_for(name: str, card: Card) -> None:
    call, arguments = KERNELS[name]
    text = lower_for(card, call, *arguments).as_text()
    by_mosaic_alone, kernels = by_mosaic(name), [text.count("@mosaic_gpu"), text.count("xla.gpu.triton")]
    assert sum(kernels) == number_of_kernels(name)
    prefills = card is H100 and name == "attention, mixed"
    assert kernels[0] == (sum(kernels) if by_mosaic_alone else prefills)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLAMPED_SWIGLU])
def test_experts_lower_with_every_activation(activation: str) -> None:
    lowered = lower_for(A100, partial(EXPERTS, activation=activation), *experts_of(None, 16))
    assert lowered.as_text().count("xla.gpu.triton") == 2


def test_other_platforms_do_not_trace_the_kernels() -> None:
    case = ATTENTIONS["mixed"]
    call = partial(attend, scale=0.1)
    traced = jax.jit(call).trace(*case.arguments())
    assert "llmjax_cuda_kernel" in str(traced.jaxpr)
    assert "pallas_call[" not in str(traced.jaxpr)
    assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert lower_for(A100, call, *case.arguments()).as_text().count("xla.gpu.triton") == 4


@needs_plugin
@pytest.mark.parametrize("name", [name for name in KERNELS if not by_mosaic(name)])
def test_compiles_within_shared_memory(name: str) -> None:
    """Triton compiles to PTX here, as it does on a card, and says how much shared memory a program takes."""
    compile_for(name, A100, H100)


# All others do too; these are the largest, and one of each kind.
ON_OTHERS = (
    "attention, decode",
    "attention, mixed",
    "attention, latent",
    "attention, latent, int8",
    "attention, latent, f32",
    "KV write, float8_e4m3fn",
    "f32, 16 rows",
    "iq4_nl, 128 rows",
    "q4_k, 2 rows",
    "w8a8, 16 rows",
    "experts, bf16, 4096 tokens",
)


@needs_plugin
@pytest.mark.parametrize("card", [B200, RTX_4090, RTX_5090], ids=lambda card: card.name)
@pytest.mark.parametrize("name", ON_OTHERS)
def test_compiles_for_newer_and_smaller_cards(name: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's, and those for desktops, whose programs have less than half as much shared memory."""
    described = SimpleNamespace(platform="described", shared_memory_per_block_optin=card.shared_memory)
    monkeypatch.setattr(tuned, "default_device", lambda: described)
    compile_for(name, card)


def compile_for(name: str, *cards: Card) -> None:
    call, arguments = KERNELS[name]
    # A function of its own: else JAX knows it as it was traced for another card.
    module = lower_for(H100, lambda *given: call(*given), *arguments).compiler_ir()
    for card in cards:
        assert compiled_for(card, module)


def compiled_for(card: Card, module: Any) -> list[Any]:
    """The kernels of a lowered program, each within the card's shared memory."""
    from jax._src.lib import triton

    if not hasattr(triton, "compile"):
        pytest.skip("in this version of JAX, XLA alone has Triton's compiler")
    found = [
        triton.compile(
            "cuda",
            attributes["ir"].value_bytes,
            card.capability,
            num_warps=attributes["num_warps"].value,
            num_ctas=1,
            num_stages=attributes["num_stages"].value,
        )
        for attributes in _custom_calls(module.operation)
    ]
    assert found
    assert all(compiled.asm and compiled.smem_bytes <= card.shared_memory for compiled in found)
    return found


@needs_plugin
@pytest.mark.parametrize("card", [RTX_4090, H100, B200, RTX_5090], ids=lambda card: card.name)
@pytest.mark.parametrize("group", [128, 4096])
def test_8_bit_floats_are_multiplied_by_tensor_cores_that_know_them(group: int, card: Card) -> None:
    """Weights have a scale for each block of columns or for each row. For Hopper Triton makes halves of the
    codes, whose products of warpgroups want another order of them."""
    weight = dataclasses.replace(matrix(RowFormat(4096, Codes(8, "e4m3"), group, "f32")), activations="fp8")
    arguments = Shape((64, 4096), jnp.bfloat16), weight, None
    (compiled,) = compiled_for(card, lower_for(H100, partial(QUANTIZED_LINEAR), *arguments).compiler_ir())
    asm = compiled.asm if isinstance(compiled.asm, str) else compiled.asm.decode()
    assert {H100: ".f16.f16", B200: ".kind::f8f6f4"}.get(card, ".e4m3.e4m3") in asm


@needs_plugin
@pytest.mark.parametrize("card", [H100, B200], ids=lambda card: card.name)
def test_many_rows_of_8_bit_floats_are_cublaslt_s(card: Card, tmp_path: Path) -> None:
    """XLA chooses on a card between its own kernel for tensor cores and cuBLASLt's; without Triton, there is one. Codes
    in a row, one byte each, and sums are all that lies in memory meanwhile."""
    weight = matrix(RowFormat(4096, Codes(8, "e4m3"), 4096, "f32"), size_out=14336)
    weight = dataclasses.replace(weight, activations="fp8")
    arguments = Shape((1024, 4096), jnp.bfloat16), weight, None
    options = {**LAUNCHES, "xla_gpu_enable_triton_gemm": "False"}
    compiled = compile_for_card(
        partial(QUANTIZED_LINEAR), *arguments, donated=(), options=options, folder=tmp_path, card=card
    )
    (product,) = (line for line in compiled.text.splitlines() if "custom_call_target" in line)
    assert 'custom_call_target="__cublas$lt$matmul$f8"' in product
    assert compiled.memory.temp_size_in_bytes < 1.25 * (14336 * 4096 + 4 * 1024 * 14336) + (33 << 20)


@needs_plugin
def test_more_rows_than_kernels_take_meet_the_whole_matrix(tmp_path: Path) -> None:
    """Dequantized once, in no loop: its weights in bf16 and little else lie there meanwhile."""
    weight = matrix(FORMATS["q4_k"], size_out=14336)
    arguments = Shape((1024, 4096), jnp.bfloat16), weight, None
    compiled = compile_for_card(partial(QUANTIZED_LINEAR), *arguments, donated=(), options=LAUNCHES, folder=tmp_path)
    assert " while(" not in compiled.text.split("ENTRY")[1]
    assert compiled.memory.temp_size_in_bytes < 1.25 * 2 * 14336 * 4096


@needs_plugin
def test_experts_as_fragments_move_no_weights(tmp_path: Path) -> None:
    """Three kernels that read the stacks where they lie, between what sorts rows and what puts them back: no loops, and
    rows of activations alone in memory meanwhile."""
    call, arguments = KERNELS["experts, q4_k, 16 tokens"]
    compiled = compile_for_card(call, *arguments, donated=(), options=LAUNCHES, folder=tmp_path)
    entry = compiled.text.split("ENTRY")[1]
    assert entry.count('custom_call_target="mosaic_gpu_v2"') == 3
    assert " while(" not in entry
    assert compiled.memory.temp_size_in_bytes < 32 << 20
    assert len(launched(compiled)) <= 24


@needs_plugin
@pytest.mark.parametrize(
    "name,kernels,mib", [("decode", 8, 3), ("int8 decode", 8, 3), ("latent, decode", 8, 17), ("mixed", 16, 17)]
)
def test_xla_compiles_an_attention_in_place(name: str, kernels: int, mib: int, tmp_path: Path) -> None:
    """XLA compiles for a card that is described and not there: pages are neither copied nor held twice, and a decode
    is one kernel that stores keys and values, one that attends, one that merges, and five small ones that deal out
    the work, which all layers of a step have in common. Prefill by warpgroups has its queries and what comes out in
    tiles besides."""
    arguments = ATTENTIONS[name].arguments()
    call = partial(attend, scale=0.1)
    compiled = compile_for_card(call, *arguments, donated=3, options=LAUNCHES, folder=tmp_path)
    pages = arguments[3].data
    assert compiled.memory.alias_size_in_bytes == pages.size * pages.dtype.itemsize
    assert compiled.memory.temp_size_in_bytes < mib << 20
    assert len(launched(compiled)) <= kernels
    entry = compiled.text.split("ENTRY")[1]
    assert " copy(" not in entry
    assert " while(" not in entry


@needs_plugin
@whole_step
def test_xla_compiles_a_decode_step_of_llama(tmp_path: Path) -> None:
    """Two layers of Llama-3.1-8B in 4 bits, as the engine runs them: pages in place, kernels counted."""
    config = models.model_config(LLAMA, max_model_len=4096)
    graph, shapes = models.abstract_model(config, dtype=jnp.dtype("bfloat16"), activation_dtype=jnp.dtype("bfloat16"))
    weights = tuple(
        matrix(RowFormat(shape.shape[1], Codes(4), 128, "f16", zero="u8"), size_out=shape.shape[0])
        if len(shape.shape) == 2
        else shape
        for shape in shapes.values()
    )
    make = partial(make_stacks, config.states, num_pages=dict.fromkeys(config.spans, 1024), page_size=16)
    kv = jax.eval_shape(partial(make, dtype=jnp.dtype("bfloat16")))
    sampler = jax.eval_shape(partial(make_sampler_state, num_slots=1, vocab_size=config.vocab_size))
    rows = jax.eval_shape(partial(make_row_state, num_slots=1, num_groups=1, pages_per_sequence=256))
    state = DeviceState(kv=kv, rows=rows, sampler=sampler)
    bucket = next(b for b in make_buckets(max_num_seqs=1, max_num_batched_tokens=64, decode_steps=1) if b.decode)
    layout = BatchLayout(bucket=bucket, num_slots=1, pages_per_sequence=256, num_groups=1)
    run = partial(step, graph=graph, names=tuple(shapes), layout=layout, max_logprobs=0)
    packed = Shape((layout.size,), jnp.int32)
    compiled = compile_for_card(run, weights, state, packed, donated=1, options=LAUNCHES, folder=tmp_path)
    kernels = launched(compiled)
    # A layer has seven products in fragments, an attention and its merge; the head's is in the branch that samples.
    own = Counter(found[1] for kernel in kernels if (found := re.search(r'custom_call_target="([^"]*)"', kernel)))
    assert own == {"mosaic_gpu_v2": 7 * config.num_layers, "__gpu$xla.gpu.triton": 2 * config.num_layers}
    assert len(kernels) <= 76
    assert compiled.memory.alias_size_in_bytes >= sum(2 * leaf.size for leaf in jax.tree.leaves(kv))
    # Among them is x in the order of fragments, and no dequantized matrix, of which the smallest has 8 MiB.
    assert compiled.memory.temp_size_in_bytes < 5 << 20


def launched(compiled: ForCard) -> list[str]:
    """The kernels of a program, a line each."""
    lines = compiled.text.split("ENTRY")[1].splitlines()
    return [line for line in lines if " fusion(" in line or " custom-call(" in line]


def _custom_calls(operation: Any) -> Iterator[dict[str, Any]]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    yield {entry.name: entry.attr for entry in inner.operation.attributes["mhlo.backend_config"]}
                yield from _custom_calls(inner.operation)
