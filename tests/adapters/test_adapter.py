"""Adapters as data: sums and factors against the matrices that they stand for."""

from __future__ import annotations

import numpy as np

from llmjax.adapters.adapter import Adapter, LowRank, summed


def part(rank: int, seed: int, *, experts: int | None = None, gain: bool = False) -> LowRank:
    rng = np.random.default_rng(seed)
    before = () if experts is None else (experts,)
    a, b = (rng.normal(size=(*before, *shape)).astype(np.float32) for shape in ((rank, 5), (7, rank)))
    return LowRank(a=a, b=b, gain=np.linspace(0.5, 2, 7, dtype=np.float32) if gain else None)


def test_a_sum_adds_what_its_parts_add() -> None:
    one, two = part(2, 0), part(3, 1)
    whole = summed([one, two.scaled(0.5)])
    assert whole.rank == 5
    np.testing.assert_allclose(whole.delta(), one.delta() + 0.5 * two.delta(), atol=1e-6)
    assert summed([one]) is one


def test_sums_of_experts() -> None:
    one, two = part(1, 0, experts=3), part(2, 1, experts=3)
    np.testing.assert_allclose(summed([one, two]).delta(), one.delta() + two.delta(), atol=1e-6)


def test_gains_are_changes_of_the_product() -> None:
    """With factors w, the sum of adapters changes the product by the sum of w times what each changes."""
    weight = np.random.default_rng(2).normal(size=(7, 5)).astype(np.float32)
    one, two = part(2, 0, gain=True), part(3, 1, gain=True)

    def of(low: LowRank) -> np.ndarray:
        assert low.gain is not None
        return low.gain[:, None] * weight + low.delta() - weight

    whole = summed([one.scaled(2.0), two.scaled(-1.0)])
    np.testing.assert_allclose(of(whole), 2 * of(one) - of(two), atol=1e-5)


def test_the_size_of_an_adapter() -> None:
    adapter = Adapter(digest="0", parts={"x.weight": part(2, 0), "y.weight": part(3, 1, gain=True)})
    assert adapter.rank == 3
    assert adapter.nbytes == 4 * (2 * 12 + 3 * 12 + 7)
    assert Adapter(digest="0", parts={}).rank == 0
