"""What many devices would bring: the model's arithmetic, and that what it is fed with can be measured."""

from __future__ import annotations

import pytest

from benchmarks.link_model import LinkModel, Size, num_sums, read_bytes_per_second, seconds_of_sum, tell_seconds

SIZE = Size(name="1B", layers=10, parameters=1e9, bits=8)


def test_a_step_reads_weights_and_sums() -> None:
    model = LinkModel(bytes_per_second=1e10, sum_seconds=1e-3)
    assert model.tokens_per_second(SIZE, 1) == pytest.approx(10)
    assert 1 / model.tokens_per_second(SIZE, 4) == pytest.approx(0.025 + 22e-3)
    assert model.words(8)[1] == "  8B (4.5 GB): 8.2 tokens/s, 3.7 × one device's"


def test_a_sum_is_what_several_devices_take_longer() -> None:
    assert seconds_of_sum([0.010, 0.0122], 10) == pytest.approx(0.0022 / num_sums(10)) == pytest.approx(1e-4)
    assert seconds_of_sum([0.010, 0.009], 10) == 0


def test_what_it_is_fed_with() -> None:
    assert tell_seconds(4) > 0
    assert read_bytes_per_second(2) > 0
