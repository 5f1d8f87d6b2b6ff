"""The figures of a benchmark, against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.bench.metrics import Distribution, EngineWork, RequestRecord, summarize


def record(start: float, times: list[float], *, prompt: int = 10, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        start=start, end=times[-1], prompt_tokens=prompt, output_tokens=len(times), chunk_times=times, error=error
    )


def test_one_request() -> None:
    one = record(1.0, [1.5, 1.6, 1.8, 2.1])
    assert one.ttft == 0.5
    assert one.latency == pytest.approx(1.1)
    assert one.tpot == pytest.approx((1.1 - 0.5) / 3)
    assert one.itls == pytest.approx([0.1, 0.2, 0.3])


def test_one_token_has_no_time_per_further_token() -> None:
    one = record(0.0, [0.25])
    assert (one.ttft, one.tpot, one.itls) == (0.25, None, [])


def test_several_tokens_in_a_piece_count_in_tpot_not_in_itl() -> None:
    one = RequestRecord(start=0.0, end=1.0, prompt_tokens=1, output_tokens=9, chunk_times=[0.2, 1.0])
    assert one.tpot == pytest.approx(0.1)
    assert one.itls == pytest.approx([0.8])


def test_first_token_time_without_chunks() -> None:
    one = RequestRecord(start=1.0, end=3.0, prompt_tokens=1, output_tokens=5, first_token=2.0)
    assert (one.ttft, one.tpot, one.itls) == (1.0, 0.25, [])


def test_distribution() -> None:
    found = Distribution.of([1.0, 2.0, 3.0, 10.0], (50, 90, 99))
    assert found is not None
    assert (found.mean, found.median, found.percentiles[50]) == (4.0, 2.5, 2.5)
    assert found.std == pytest.approx(12.5**0.5)  # (9 + 4 + 1 + 36) / 4
    assert found.percentiles[90] == pytest.approx(7.9)  # rank 2.7: 3 + 0.7 * 7
    assert found.percentiles[99] == pytest.approx(9.79)  # rank 2.97
    assert Distribution.of([]) is None


def test_a_run_of_two_and_a_failure() -> None:
    records = [record(0.0, [0.5, 1.0, 1.5]), record(1.0, [1.75, 4.0], prompt=20), record(0.5, [0.6], error="refused")]
    result = summarize(records, percentiles=(90,))
    assert (result.completed, result.failed) == (2, 1)
    assert result.duration == 4.0
    assert (result.total_input_tokens, result.total_output_tokens) == (30, 5)
    assert result.output_throughput == 1.25
    assert result.total_token_throughput == 8.75
    assert result.request_throughput == 0.5
    assert result.max_concurrent_requests == 2
    assert result.max_output_tokens_per_s == 3.0  # second 1 holds 1.0, 1.5 and 1.75
    ttft, itl = result.latencies["ttft"], result.latencies["itl"]
    assert ttft is not None and itl is not None
    assert (ttft.mean, ttft.median) == (625.0, 625.0)
    assert ttft.percentiles[90] == pytest.approx(725.0)  # 500 and 750 ms at rank 0.9
    assert itl.mean == pytest.approx((500 + 500 + 2250) / 3)


def test_json_has_the_names_of_vllm() -> None:
    work = EngineWork(steps=20, host_seconds=0.03, compilations=1) - EngineWork(
        steps=10, host_seconds=0.01, compilations=1
    )
    fields = summarize([record(0.0, [0.5, 1.0])], work=work).as_json(detailed=True)
    assert fields["mean_ttft_ms"] == fields["p99_ttft_ms"] == 500.0
    assert fields["median_e2el_ms"] == 1000.0
    assert fields["std_tpot_ms"] == 0.0
    assert (fields["steps"], fields["compilations"]) == (10, 0)
    assert fields["host_ms_per_step"] == pytest.approx(2.0)
    assert (fields["input_lens"], fields["output_lens"], fields["ttfts"]) == ([10], [2], [0.5])
    assert fields["errors"] == [""]


def test_nothing_at_all() -> None:
    result = summarize([])
    assert (result.completed, result.duration, result.output_throughput, result.max_concurrent_requests) == (0, 0, 0, 0)
    assert result.latencies["ttft"] is None
    assert EngineWork(steps=0, host_seconds=0.0, compilations=0).host_ms_per_step is None


def test_a_request_that_ends_as_another_starts_is_not_counted_twice() -> None:
    assert summarize([record(0.0, [1.0]), record(1.0, [2.0])]).max_concurrent_requests == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.lists(st.floats(0.001, 10), min_size=1, max_size=5)), min_size=1))
def test_invariants(runs: list[tuple[float, list[float]]]) -> None:
    records = []
    for start, gaps in runs:
        times = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
        records.append(record(start, times))
    result = summarize(records)
    assert result.completed == len(runs)
    assert 1 <= result.max_concurrent_requests <= len(runs)
    assert result.output_throughput * result.duration == pytest.approx(result.total_output_tokens)
    for one in records:
        assert one.ttft is not None
        assert one.ttft + sum(one.itls) == pytest.approx(one.latency)
