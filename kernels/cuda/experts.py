"""Products of mixture-of-experts layers: each choice of a token with the matrices of its expert, read where they lie.

With one or two tokens every choice has programs of its own, which read its expert once. With more, choices are sorted
by expert and cut into blocks that share an expert, for tensor cores; an expert that nobody chose is not read. Codes
that can become fragments (`fragments.py`) do, in a kernel for each of the three products. Otherwise there are two: the
first multiplies with ``gate`` and ``up``, and applies the activation where columns are not shared among programs; the
second multiplies with ``down``, and puts what it finds back in the tokens' order. What their programs compute
is in `products.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.activations import gated
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cuda import fragments
from llmjax.kernels.cuda.fragments import FragmentPlan
from llmjax.kernels.cuda.lowering import MIN_DOT, Launch, launch, load, power_of_2, program_id, store
from llmjax.kernels.cuda.plan import MAX_VECTOR_ROWS, ProductPlan
from llmjax.kernels.cuda.products import Factor, Floats, Records, Share, levels_of
from llmjax.kernels.cuda.ragged import Blocks, num_blocks
from llmjax.kernels.cuda.tuned import Key, form_name
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.row_format import CHUNK

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
MOST_ROWS = 64  # of x that a program takes
NOT_FUSED = ("gelu",)  # Pallas for Triton has no erfc
NO_WORK = -1
NO_CHOICES: Mapping[str, Mapping[str, int]] = MappingProxyType({})


def refuses(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> str | None:
    """Why the kernels do not take these arguments; None: they do."""
    if not chosen.size:
        return "no choices"
    if x.dtype not in FLOATS:
        return f"activations are {x.dtype}"
    for name in ("gate", "up", "down"):
        weight = getattr(weights, name).weight
        if isinstance(weight, QTensor):
            if weight.tile != CUDA_TILE:
                return f"rows of {name} are interleaved by {weight.tile}, not {CUDA_TILE}"
            if weight.columns is not None:
                return f"columns of {name} have an order of their own"
        elif weight.dtype not in FLOATS:
            return f"{name} is {weight.dtype}"
    if _kind(weights.gate) != _kind(weights.up):
        return "gate and up are stored differently"
    return None


def experts(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    *,
    activation: str,
    rows: int | None = None,
    choices: Mapping[str, Mapping[str, int]] = NO_CHOICES,
    interpret: bool = False,
) -> jax.Array:
    """``llmjax.kernels.experts.experts``.

    Args:
        rows: choices of an expert that a program takes: 1, or a power of two from 16 on (8 with fragments); None: by
            their number.
        choices: fields of the plan of "experts in" (gate and up) or "experts out" (down), or of "fragments in" and
            "fragments out", to be changed.
        interpret: run the kernels as XLA operations, on any device.
    """
    tokens, top = chosen.shape
    count = weights.gate.weight.shape[0]
    rows = rows or rows_of(tokens, chosen.size, weights)
    expert = jnp.where(shares == 0, count, chosen).reshape(-1).astype(jnp.int32)
    work = _each(expert, count) if rows == 1 else _sorted(expert, count, rows)
    how = _How(rows, choices, interpret)
    if rows > 1 and by_fragments(weights):
        out = _with_fragments(x, work, weights, top=top, how=how, activation=activation)
    else:
        place = jnp.arange(chosen.size, dtype=jnp.int32)
        ins = jnp.stack([work.choice // top, place], 1)
        (inner,) = _product(x, ins, work, [weights.gate, weights.up], how=how, activation=activation)
        (out,) = _product(inner, jnp.stack([place, work.choice], 1), work, [weights.down], how=how, activation=None)
    # What has no share was not computed.
    out = jnp.where(shares[..., None] == 0, 0, out.reshape(tokens, top, -1) * shares[..., None])
    return out.sum(1).astype(x.dtype)


def by_fragments(weights: ExpertWeights) -> bool:
    """Whether codes of these experts become bf16 fragments where programs take several rows (`fragments.py`)."""
    stacks = [weights.gate.weight, weights.up.weight, weights.down.weight]
    return all(isinstance(weight, QTensor) and fragments.refuses(weight) is None for weight in stacks)


def rows_of(tokens: int, choices: int, weights: ExpertWeights) -> int:
    """How many choices a program takes: about as many as an expert has."""
    if tokens <= MAX_VECTOR_ROWS:
        return 1
    least = fragments.COLUMN_ROWS if by_fragments(weights) else MIN_DOT
    return min(MOST_ROWS, max(least, power_of_2(choices // weights.gate.weight.shape[0])))


def plans_of(rows: int, choices: int, weights: ExpertWeights) -> dict[Key, ProductPlan | FragmentPlan]:
    """How products of ``choices`` choices are divided, by arithmetic, and what the table of a card knows them by."""
    blocks = choices if rows == 1 else num_blocks(weights.gate.weight.shape[0], size=rows, most=choices)
    make = _fragment_plan_of if rows > 1 and by_fragments(weights) else _plan_of
    return dict(make(rows, blocks, stacks) for stacks in ([weights.gate, weights.up], [weights.down]))


def _fragment_plan_of(rows: int, blocks: int, stacks: Sequence[Projection]) -> tuple[Key, FragmentPlan]:
    weight = stacks[0].weight
    size_out, size_in = weight.shape[1:]
    # Blocks fill a card, and all warps of a program have some of a row's columns.
    plan = FragmentPlan(rows, 1 if rows <= 16 else 2, 1)
    kernel = "fragments out" if len(stacks) == 1 else "fragments in"
    return Key.of(kernel, form_name(weight.format), rows, blocks, size_out, size_in), plan


def _plan_of(rows: int, blocks: int, stacks: Sequence[Projection]) -> tuple[Key, ProductPlan]:
    weight = stacks[0].weight
    size_out, size_in = weight.shape[1:]
    chunks = -(-size_in // CHUNK)
    if isinstance(weight, QTensor):
        plan = ProductPlan.of_records(
            rows, blocks, size_out=size_out, chunks=chunks, codes=weight.format.codes, matrices=len(stacks)
        )
        name = form_name(weight.format)
    else:
        size, name = weight.dtype.itemsize, weight.dtype.name
        plan = ProductPlan.of_floats(rows, blocks, size_out=size_out, chunks=chunks, itemsize=size)
    kernel = "experts out" if len(stacks) == 1 else "experts in"
    return Key.of(kernel, name, rows, blocks, size_out, size_in), plan


@dataclass(frozen=True)
class _Work:
    """Which choices each program has, as runs of places in an order of them. A choice is ``token * K + k``."""

    choice: jax.Array  # i32 [T * K], at each place
    programs: jax.Array  # i32 [programs, 3]: expert, first place, place after the last; expert NO_WORK: none


def _each(expert: jax.Array, count: int) -> _Work:
    """A program for each choice."""
    place = jnp.arange(len(expert), dtype=jnp.int32)
    return _Work(place, jnp.stack([jnp.where(expert < count, expert, NO_WORK), place, place + 1], 1))


def _sorted(expert: jax.Array, count: int, rows: int) -> _Work:
    """Programs that each take up to ``rows`` choices of one expert."""
    counts = (expert[:, None] == jnp.arange(count, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    blocks = Blocks.of(counts, size=rows, most=len(expert))
    first = (starts[blocks.group] + blocks.first).astype(jnp.int32)
    stop = (starts + counts)[blocks.group].astype(jnp.int32)
    busy = blocks.first < counts[blocks.group]
    programs = jnp.stack([jnp.where(busy, blocks.group, NO_WORK), first, jnp.where(busy, stop, first)], 1)
    return _Work(jnp.argsort(expert).astype(jnp.int32), programs)


@dataclass(frozen=True)
class _How:
    rows: int
    choices: Mapping[str, Mapping[str, int]]
    interpret: bool


def _with_fragments(
    x: jax.Array, work: _Work, weights: ExpertWeights, *, top: int, how: _How, activation: str
) -> jax.Array:
    """What the experts of all choices give, f32 [T * K, out]; of choices without a share, something.

    Rows are sorted into blocks by XLA, stay there from the first product to the last, and are put back by XLA.
    """
    blocks, choices = len(work.programs), len(work.choice)
    expert, first, stop = (work.programs[:, i, None] for i in range(3))
    place = first + jnp.arange(how.rows, dtype=jnp.int32)  # [blocks, rows]
    choice = work.choice[jnp.minimum(place, choices - 1)].reshape(-1)

    def run(x: jax.Array, stacks: list[Projection]) -> list[jax.Array]:
        key, plan = _fragment_plan_of(how.rows, blocks, stacks)
        chunks = stacks[0].weight.format.num_chunks
        plan = plan.tuned(key, chunks).changed(how.choices.get(key.kernel, {}), chunks)
        matrices = [stack.weight for stack in stacks]
        sums = fragments.products(x, matrices, expert[:, 0], plan, interpret=how.interpret)
        return [
            out if bias is None else (out.reshape(blocks, how.rows, -1) + bias[expert]).reshape(out.shape)
            for out, bias in zip(sums, (stack.bias for stack in stacks), strict=True)
        ]

    inner = gated(activation, *run(x[choice // top], [weights.gate, weights.up])).astype(x.dtype)
    (out,) = run(inner, [weights.down])
    of_choice = jnp.where((place < stop).reshape(-1), choice, choices)
    at = jnp.zeros(choices, jnp.int32).at[of_choice].set(jnp.arange(blocks * how.rows, dtype=jnp.int32), mode="drop")
    return out[at]


def _product(
    x: jax.Array,
    rows: jax.Array,
    work: _Work,
    stacks: Sequence[Projection],
    *,
    how: _How,
    activation: str | None,
) -> list[jax.Array]:
    """Rows of x with the matrices of the programs' experts.

    Args:
        rows: i32 [T * K, 2], for each place the row of x and that of the result.
        stacks: stacks of matrices that are stored alike.
        activation: the activation of ``activation(first) * second``; None: no such product.

    Returns:
        One [T * K, out] in x's dtype with an activation, f32 [T * K, out] for each stack without; rows whose choices
        have no share are undefined.
    """
    weight = stacks[0].weight
    size_out, size_in = weight.shape[1:]
    blocks, chunks, choices = len(work.programs), -(-size_in // CHUNK), len(rows)
    factor: Factor
    key, plan = _plan_of(how.rows, blocks, stacks)
    plan = plan.tuned(key, chunks).changed(how.choices.get(key.kernel, {}), chunks)
    if isinstance(weight, QTensor):
        factor, levels = Records(weight.format, weight.dtype, plan), levels_of(weight)
    else:
        factor, levels = Floats(size_in, weight.dtype, plan), x
    fused = activation if plan.splits == 1 and activation not in NOT_FUSED else None
    shape = (plan.splits, choices, size_out)
    out = [jax.ShapeDtypeStruct(shape, x.dtype if fused else jnp.float32) for _ in (stacks[:1] if fused else stacks)]
    biases = [x if stack.bias is None else stack.bias.astype(jnp.float32) for stack in stacks]
    words = [stack.weight.words if isinstance(stack.weight, QTensor) else stack.weight for stack in stacks]
    kernel = _Kernel(factor, size_out, tuple(stack.bias is not None for stack in stacks), fused)
    results = launch(
        kernel,
        out,
        [factor.prepared(x), work.programs, rows, levels, *words, *biases],
        Launch((-(-size_out // plan.outputs), plan.splits, blocks), plan.warps, plan.stages, how.interpret),
    )
    if fused:
        return [results[0][0]]
    sums = [each.sum(0) if plan.splits > 1 else each[0] for each in results]
    return sums if activation is None else [gated(activation, *sums).astype(x.dtype)]


def _kind(stack: Projection) -> Any:
    weight = stack.weight
    return (weight.format if isinstance(weight, QTensor) else None, weight.dtype)


@dataclass(frozen=True)
class _Kernel:
    factor: Factor
    size_out: int
    has_bias: tuple[bool, ...]  # for each stack
    activation: str | None

    def __call__(self, x: Any, programs: Any, rows: Any, levels: Any, *refs: Any) -> None:
        """refs: a stack of matrices and a bias [E, out] for each product, and the results [splits, T * K, out]."""
        number = len(self.has_bias)
        stacks, biases, results = refs[:number], refs[number : 2 * number], refs[2 * number :]
        program, split, plan = program_id(2), program_id(1), self.factor.plan
        expert, first, stop = (load(programs, (program, np.int32(i))) for i in range(3))
        busy = expert != NO_WORK
        expert = jnp.maximum(expert, 0)
        share = Share.of(plan, self.size_out, stacks, levels, at=(expert,), busy=busy)

        if plan.rows == 1:
            source, target = (load(rows, (first, np.int32(i))) for i in range(2))
            sums = [total for (total,) in self.factor.vectors(x, [source], share)]
            index: Any = (split, target, share.output)
            where = share.inside & busy
        else:
            place = first + jnp.arange(plan.rows, dtype=jnp.int32)
            inside = place < stop
            source, target = (load(rows, (place, np.int32(i)), inside) for i in range(2))
            sums = list(self.factor.tile(x, source, inside, share))
            # Interpreted, a masked store writes back what it read: places that do not count must not name a row.
            index = (split, jnp.where(inside, target, rows.shape[0])[:, None], share.output[None])
            where = inside[:, None] & share.inside[None]
        for i, bias in enumerate(biases):
            if self.has_bias[i]:  # the first of those that share the columns adds it
                added = load(bias, (expert, share.output), share.inside & (split == 0))
                sums[i] = sums[i] + (added if plan.rows == 1 else added[None])
        if self.activation is not None:
            sums = [gated(self.activation, *sums)]
        for result, values in zip(results, sums, strict=True):
            store(result, index, values.astype(result.dtype), where)
