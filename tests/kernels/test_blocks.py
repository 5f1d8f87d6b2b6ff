"""Halves of decoder layers in C++ against the same step by step: norms, gates, ropes, weights, batches."""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmjax.kernels.attention import make_pages
from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.blocks import AttentionRules, AttentionWeights, MLPWeights, Projection
from llmjax.kernels.cpu import blocks as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import MAX_ROWS
from llmjax.kernels.norm import Norm
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.rope import Rotation
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.models import MLP, RMS, Attention, GatedMLP, RopeConfig
from llmjax.models.layers.context import Context
from llmjax.models.modules.attention import ATTENTION_SUBLAYER
from llmjax.models.modules.layer import build_part
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import MLP_SUBLAYER, GatedMLPModule, MLPModule
from llmjax.models.modules.norm import RMSNorm, build_norm
from llmjax.models.modules.residual import fed_forward, mixed
from tests.kernels.attention_case import Case, filled_pages, ragged_batch, real_tokens
from tests.kernels.instruction_sets import each_isa

NATIVE = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels are not built")

F32 = jnp.dtype(jnp.float32)
SIZE, INNER, PAGE = 72, 104, 4  # neither a multiple of the widest vectors


class Maker:
    """Random weights of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rng = np.random.default_rng(0)

    def floats(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape).astype(np.float32))

    def norm(self, size: int, *, plus_one: bool) -> Norm:
        return Norm(self.floats(size) + (0 if plus_one else 1), 1e-5, plus_one)

    def projection(self, size_out: int, size_in: int, *, bias: bool, group: int = 32) -> Projection:
        added = self.floats(size_out) if bias else None
        if self.kind != "q4":
            weight = self.rng.standard_normal((size_out, size_in)).astype(np.float32) * size_in**-0.5
            return Projection(jnp.asarray(weight.astype(jnp.dtype(self.kind))), added)
        form = RowFormat(size_in, Codes(4), group, "f32", minimum="f32")
        words = self.rng.integers(0, 1 << 32, (-(-size_out // 16), form.num_words, 16), dtype=np.uint32)
        for entry, most in ((form.fields["scales"], 0.2), (form.fields["minima"], 1.5)):
            values = self.rng.random((len(words), entry.num_words, 16), np.float32) * most * size_in**-0.5
            words[:, entry.start : entry.start + entry.num_words] = values.view(np.uint32)
        return Projection(QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(jnp.float32)), added)


def linear_of(projection: Projection) -> Linear:
    made = Linear(1, 1, bias=projection.bias is not None, dtype=F32)
    made.weight = nnx.Param(projection.weight)
    made.bias = None if projection.bias is None else nnx.Param(projection.bias)
    return made


def norm_of(norm: Norm | None) -> RMSNorm | None:
    if norm is None:
        return None
    made = build_norm(RMS(norm.eps, norm.plus_one), 1)
    made.weight = nnx.Param(norm.weight)
    return made


def mlp_in_steps(x: jax.Array, weights: MLPWeights, *, activation: str, residual: bool = True) -> jax.Array:
    """The model's own definition, with these weights."""
    if weights.gate is None:
        module = MLPModule(MLP(inner=1, activation=activation), 1, dtype=F32)
    else:
        module = GatedMLPModule(GatedMLP(inner=1, activation=activation), 1, dtype=F32)
        module.gate_proj = linear_of(weights.gate)
    module.up_proj, module.down_proj = linear_of(weights.up), linear_of(weights.down)
    return fed_forward(x, module, norm_of(weights.before), norm_of(weights.after), None, residual=residual)


def attention_in_steps(
    x: jax.Array,
    weights: AttentionWeights,
    by: Rotation,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    rules: AttentionRules,
    residual: bool = True,
) -> tuple[jax.Array, KVPages]:
    """The model's own definition, with these weights."""
    rope = RopeConfig((1.0,), interleaved=rules.interleaved)
    spec = Attention(
        heads=1,
        kv_heads=1,
        head_dim=pages.data.shape[-1],
        scale=rules.scale,
        rope=rope,
        window=rules.window,
        softcap=rules.softcap,
        qk_norm=None if weights.q_norm is None else RMS(1.0),
    )
    module = build_part(spec, 1, dtype=F32)
    for name in ("q", "k", "v", "o"):
        setattr(module, f"{name}_proj", linear_of(getattr(weights, name)))
    if weights.q_norm is not None:
        module.q_norm, module.k_norm = norm_of(weights.q_norm), norm_of(weights.k_norm)
    before, after = norm_of(weights.before), norm_of(weights.after)
    return mixed(x, module, before, after, Context(by, pages, batch), residual=residual)


def exact(weights: Any) -> Any:
    """The same with plain matrices in f32: XLA would round rows of x to bf16 too."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, weights)


ROUNDED = 4e-2  # where vectors or tiles multiply bf16, many rows are rounded to it beside plain matrices


def close(found: jax.Array, expected: jax.Array, *, atol: float = 2e-3) -> None:
    """Where tiles multiply plain matrices, an element of x keeps 16 bits."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-4, atol=atol)


@cache
def jitted_mlp(activation: str) -> Any:
    """Compiled once for all instruction sets, as `jitted_attention`."""
    return jax.jit(partial(cpu.mlp, activation=activation))


@cache
def jitted_attention(rules: AttentionRules) -> Any:
    return jax.jit(partial(cpu.attention_block, rules=rules))


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "rows,activation,norms,plus_one,bias,gated",
    [
        (1, "silu", "before", False, False, True),
        (3, "gelu_pytorch_tanh", "both", True, True, True),
        (4, "quick_gelu", "none", False, True, True),
        (21, "silu", "both", False, False, True),
        (0, "silu", "before", False, False, True),
        (5, "gelu", "both", False, True, True),
        (1, "gelu", "none", False, True, False),
        (6, "relu2", "before", False, False, False),
        (19, "relu", "both", True, True, False),
    ],
)
def test_mlp(
    isa: str, kind: str, rows: int, activation: str, norms: str, plus_one: bool, bias: bool, gated: bool
) -> None:
    x, weights, expected = specified_mlp(kind, rows, activation, norms, plus_one, bias, gated)
    rounded = kind == "bfloat16" and isa in ("avx512bf16", "amx") and rows > 8
    close(jitted_mlp(activation)(x, weights), expected, atol=ROUNDED if rounded else 2e-3)


@lru_cache(maxsize=1)
def specified_mlp(
    kind: str, rows: int, activation: str, norms: str, plus_one: bool, bias: bool, gated: bool
) -> tuple[jax.Array, MLPWeights, np.ndarray]:
    """Rows, weights, and what the steps make of them; the same for all instruction sets."""
    make = Maker(kind)
    norm = partial(make.norm, SIZE, plus_one=plus_one)
    weights = MLPWeights(
        before=None if norms == "none" else norm(),
        gate=make.projection(INNER, SIZE, bias=bias) if gated else None,
        up=make.projection(INNER, SIZE, bias=bias),
        down=make.projection(SIZE, INNER, bias=bias),
        after=norm() if norms == "both" else None,
    )
    x = make.floats(rows, SIZE)
    return x, weights, np.asarray(jax.jit(partial(mlp_in_steps, activation=activation))(x, exact(weights)))


@each_isa
@pytest.mark.parametrize(
    "rows,size,inner,activation,bias,groups",
    [
        (40, 72, 104, "silu", True, (32, 32)),  # an odd number of tiles
        (17, 72, 128, "gelu_pytorch_tanh", False, (32, 32)),
        (33, 64, 90, "quick_gelu", True, (32, 32)),
        (9, 64, 90, "silu", True, (32, 16)),  # gate and up with groups of their own
        (450, 1300, 70, "silu", False, (32, 32)),  # rows and columns in parts
        (200, 70, 1200, "silu", False, (32, 32)),
        (70, 200, 1990, "silu", True, (256, 256)),  # bytes in tiles: spans, the last one and its last tile not whole
        (90, 300, 1288, "gelu_pytorch_tanh", False, (512, 512)),
        (450, 520, 2050, "quick_gelu", False, (256, 256)),
        (450, 520, 200, "relu2", True, (256, 256)),  # too few spans for the threads
        (70, 300, 520, "silu", False, (512, 256)),
    ],
)
def test_mlp_with_rounded_inputs(
    isa: str, rows: int, size: int, inner: int, activation: str, bias: bool, groups: tuple[int, int]
) -> None:
    x, weights, expected = specified_rounding_mlp(rows, size, inner, activation, bias, groups)
    found = jitted_mlp(activation)(x, weights)
    added, expected_added = np.asarray(found - x), expected - np.asarray(x)
    assert np.isfinite(added).all()
    most = 0.02 if min(groups) <= 32 else 0.03  # the peak of 256 numbers is larger than that of 32
    assert np.linalg.norm(added - expected_added) < most * np.linalg.norm(expected_added)


@lru_cache(maxsize=1)
def specified_rounding_mlp(
    rows: int, size: int, inner: int, activation: str, bias: bool, groups: tuple[int, int]
) -> tuple[jax.Array, MLPWeights, np.ndarray]:
    """Groups: of gate and down, and of up."""
    make = Maker("q4")

    def rounding(size_out: int, size_in: int, group: int) -> Projection:
        made = make.projection(size_out, size_in, bias=bias, group=group)
        assert isinstance(made.weight, QTensor)
        weight = dataclasses.replace(made.weight, dtype=jnp.dtype(jnp.bfloat16), activations="int8")
        return dataclasses.replace(made, weight=weight)

    weights = MLPWeights(
        before=make.norm(size, plus_one=False),
        gate=rounding(inner, size, groups[0]),
        up=rounding(inner, size, groups[1]),
        down=rounding(size, inner, groups[0]),
        after=None,
    )
    x = make.floats(rows, size)

    @jax.jit
    def without_rounding(x: jax.Array, weights: MLPWeights) -> jax.Array:
        plain = jax.tree.map(
            lambda leaf: leaf.dequantize() if isinstance(leaf, QTensor) else leaf,
            weights,
            is_leaf=lambda leaf: isinstance(leaf, QTensor),
        )
        return mlp_in_steps(x, plain, activation=activation)

    return x, weights, np.asarray(without_rounding(x, weights))


DECODES = Case(((1, 1), (1, 9), (1, 30)), page_size=PAGE, decode=True, padding=1)
ONE = Case(((1, 17),), page_size=PAGE, decode=True, padding=0)
CHUNKS = Case(((1, 5), (6, 6), (3, 11)), page_size=PAGE, padding=2)
LONG = Case(((21, 26),), page_size=PAGE)


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
@pytest.mark.parametrize(
    "shape,rotary,norms,rules,cache,bias",
    [
        (ONE, 16, "before", AttentionRules(0.25), "float32", False),
        (DECODES, 16, "all", AttentionRules(0.3, window=7), "bfloat16", True),
        (CHUNKS, 8, "before", AttentionRules(0.25, interleaved=True, softcap=9.0), "int8", True),
        (LONG, 12, "none", AttentionRules(0.25), "float32", False),
        (LONG, 16, "all", AttentionRules(0.25, window=5), "bfloat16", False),
    ],
    ids=["one", "decodes", "chunks", "long", "long, normed"],
)
def test_attention_block(
    isa: str, kind: str, shape: Case, rotary: int, norms: str, rules: AttentionRules, cache: str, bias: bool
) -> None:
    arguments, expected = specified_attention(kind, shape, rotary, norms, rules, cache, bias)
    *_, pages, batch = arguments
    found, stored = jitted_attention(rules)(*arguments)
    real = real_tokens(batch)
    # One step of int8 apart where the rounding of a key differs in its last bit.
    rounded = cache == "bfloat16" or (kind == "bfloat16" and isa in ("avx512bf16", "amx"))
    atol = 3e-2 if cache == "int8" else ROUNDED if rounded else 2e-3
    np.testing.assert_allclose(np.asarray(found)[real], expected[real], rtol=2e-4, atol=atol)
    assert np.isfinite(np.asarray(found)).all()
    touched = {int(place) // PAGE for place in np.asarray(batch.places(PAGE))} - {int(batch.first_page)}
    before, after = np.asarray(pages.data), np.asarray(stored.data)
    assert {i for i in range(len(before)) if not np.array_equal(after[i], before[i])} == touched


@lru_cache(maxsize=1)
def specified_attention(
    kind: str, shape: Case, rotary: int, norms: str, rules: AttentionRules, cache: str, bias: bool
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Arguments, and what the steps make of them; the same for all instruction sets."""
    make, heads, kv_heads, head_dim = Maker(kind), 6, 2, 16
    case = dataclasses.replace(shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim, cache=cache)
    batch = ragged_batch(case, make.rng)
    everywhere = norms == "all"
    weights = AttentionWeights(
        before=None if norms == "none" else make.norm(SIZE, plus_one=everywhere),
        q=make.projection(heads * head_dim, SIZE, bias=bias),
        k=make.projection(kv_heads * head_dim, SIZE, bias=bias),
        v=make.projection(kv_heads * head_dim, SIZE, bias=False),
        q_norm=make.norm(head_dim, plus_one=False) if everywhere else None,
        k_norm=make.norm(head_dim, plus_one=True) if everywhere else None,
        o=make.projection(SIZE, heads * head_dim, bias=bias),
        after=make.norm(SIZE, plus_one=False) if everywhere else None,
    )
    tokens = len(batch.kv_index)
    x, angles = make.floats(tokens, SIZE), make.floats(tokens, rotary // 2)
    by = Rotation(cos=jnp.cos(angles), sin=jnp.sin(angles))
    filling = make.rng.standard_normal((2, case.all_pages * PAGE, kv_heads, head_dim), np.float32)
    pages = filled_pages(case, filling, as_bits=True)
    expected, _ = jax.jit(partial(attention_in_steps, rules=rules))(x, exact(weights), by, pages, batch)
    return (x, weights, by, pages, batch), np.asarray(expected)


@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
def test_products_alone(kind: str) -> None:
    """Without bias, norm after and residual stream, which follow when devices have added up their parts."""
    make, heads, head_dim = Maker(kind), 4, 16
    norm = partial(make.norm, SIZE, plus_one=False)
    project = partial(make.projection, bias=True)
    sizes = (INNER, SIZE), (INNER, SIZE), (SIZE, INNER)
    mlp = MLPWeights(norm(), *(project(*size) for size in sizes), norm())
    x = make.floats(3, SIZE)
    found = jax.jit(partial(cpu.mlp, activation="silu", residual=False))(x, mlp)
    close(found, jax.jit(partial(mlp_in_steps, activation="silu", residual=False))(x, exact(mlp)))
    wide = heads * head_dim
    q, k, v, o = (project(*size) for size in ((wide, SIZE), (wide, SIZE), (wide, SIZE), (SIZE, wide)))
    attention = AttentionWeights(norm(), q, k, v, None, None, o, norm())
    case = dataclasses.replace(CHUNKS, heads=heads, kv_heads=heads, head_dim=head_dim, cache="float32")
    batch = ragged_batch(case, make.rng)
    x, angles = make.floats(len(batch.kv_index), SIZE), make.floats(len(batch.kv_index), head_dim // 2)
    by = Rotation(cos=jnp.cos(angles), sin=jnp.sin(angles))
    filling = make.rng.standard_normal((2, case.all_pages * PAGE, heads, head_dim), np.float32)
    pages, rules = filled_pages(case, filling, as_bits=True), AttentionRules(0.25)
    found, _ = jax.jit(partial(cpu.attention_block, rules=rules, residual=False))(x, attention, by, pages, batch)
    in_steps = jax.jit(partial(attention_in_steps, rules=rules, residual=False))
    expected, _ = in_steps(x, exact(attention), by, pages, batch)
    real = real_tokens(batch)
    close(np.asarray(found)[real], np.asarray(expected)[real], atol=ROUNDED if kind == "bfloat16" else 2e-3)


def test_a_page_that_does_not_exist_is_an_error() -> None:
    make = Maker("bfloat16")
    project = partial(make.projection, bias=False)
    weights = AttentionWeights(
        None, project(32, 32), project(16, 32), project(16, 32), None, None, project(32, 32), None
    )
    pages = make_pages(num_pages=2, page_size=PAGE, num_kv_heads=1, head_dim=16, dtype=jnp.dtype("float32"))
    by = Rotation(jnp.ones((1, 8)), jnp.zeros((1, 8)))
    batch = ragged_batch(ONE, make.rng)
    batch = dataclasses.replace(batch, page_table=batch.page_table + 70, first_page=0)
    with pytest.raises(Exception, match=r"page 7\d does not exist"):
        cpu.attention_block(make.floats(1, 32), weights, by, pages, batch, rules=AttentionRules(0.25))[
            0
        ].block_until_ready()


def test_what_the_library_takes_goes_to_it() -> None:
    def explain(platform: str, rows: int = 1, *, activation: str = "silu", dtype: Any = jnp.float32) -> str:
        mlp = GatedMLPModule(GatedMLP(inner=64, activation=activation), 64, dtype=jnp.dtype(jnp.bfloat16))
        return MLP_SUBLAYER.explain(platform, jax.ShapeDtypeStruct((rows, 64), dtype), mlp, None, None, None)

    assert explain("cpu") == "C++"
    assert "activation is tanh" in explain("cpu", activation="tanh")
    native = library()
    assert native is not None
    assert ("slower from" in explain("cpu", 256)) == (native.best in MAX_ROWS)
    assert "activations are bfloat16" in explain("cpu", dtype=jnp.bfloat16)
    assert explain("cuda") == "in steps"
    assert ATTENTION_SUBLAYER.implementations[-1].name == "in steps"


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
@pytest.mark.parametrize("decode", [False, True])
def test_padding_is_left_out(kind: str, decode: bool, isa: str) -> None:
    """Rows after those of requests are zeros, whatever they hold. The others are what they would be in a full program,
    since a prompt's tokens may be cached; those of decodes are computed as the fewer rows that they are."""
    make, used, rows = Maker(kind), 3, 16
    full = make.floats(rows, SIZE)
    weights = MLPWeights(
        before=make.norm(SIZE, plus_one=False),
        gate=make.projection(INNER, SIZE, bias=True),
        up=make.projection(INNER, SIZE, bias=True),
        down=make.projection(SIZE, INNER, bias=True),
        after=make.norm(SIZE, plus_one=False),
    )
    lengths = jnp.where(jnp.arange(rows if decode else 3) < (used if decode else 2), 3, 0)
    batch = RaggedBatch(
        query_start=jnp.arange(rows + 1) if decode else jnp.array([0, 2, used, used]),
        kv_len=lengths,
        page_table=jnp.zeros((len(lengths), 1), jnp.int32),
        kv_index=jnp.zeros(rows, jnp.int32),
        decode=decode,
    )
    half = jitted_mlp("silu")
    found = half(full.at[used:].set(jnp.nan), weights, batch)
    assert not np.asarray(found[used:]).any()
    expected = half(full[:used] if decode else full, weights)
    np.testing.assert_array_equal(found[:used], expected[:used])


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
@pytest.mark.parametrize("shape", [DECODES, CHUNKS], ids=["decodes", "chunks"])
def test_attention_leaves_padding_out(kind: str, shape: Case, isa: str) -> None:
    arguments, _ = specified_attention(kind, shape, 16, "all", AttentionRules(0.25), "float32", True)
    x, *others, batch = arguments
    used = int(batch.used)
    assert 0 < used < len(x)
    half = jitted_attention(AttentionRules(0.25))
    expected, stored = half(*arguments)
    found, stored_beside_padding = half(x.at[used:].set(jnp.nan), *others, batch)
    assert not np.asarray(found[used:]).any()
    np.testing.assert_array_equal(found[:used], expected[:used])
    np.testing.assert_array_equal(stored_beside_padding.data, stored.data)


def test_more_tokens_than_there_are_is_an_error() -> None:
    make = Maker("bfloat16")
    weights = MLPWeights(
        before=None,
        gate=make.projection(INNER, SIZE, bias=False),
        up=make.projection(INNER, SIZE, bias=False),
        down=make.projection(SIZE, INNER, bias=False),
        after=None,
    )
    batch = RaggedBatch(
        query_start=jnp.array([0, 9]),
        kv_len=jnp.array([9]),
        page_table=jnp.zeros((1, 1), jnp.int32),
        kv_index=jnp.zeros(8, jnp.int32),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="more rows in use than there are"):
        jax.block_until_ready(jax.jit(partial(cpu.mlp, activation="silu"))(make.floats(8, SIZE), weights, batch))
