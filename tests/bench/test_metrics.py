"""The figures of a benchmark, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.bench.metrics import Distribution, DraftWork, EngineWork, RequestRecord, summarize
from llmjax.bench.scrape import parse_drafts


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


def test_goodput_counts_what_meets_all_objectives() -> None:
    records = [
        record(0.0, [0.1, 0.2]),  # 100 ms to the first token, 100 between
        record(0.0, [0.3, 0.4]),
        record(0.0, [0.1, 0.9]),
        record(0.0, [0.1]),  # nothing between its tokens
        record(0.0, [0.1], error="refused"),
    ]
    result = summarize(records, objectives={"ttft": 200.0, "tpot": 150.0})
    assert result.request_goodput == pytest.approx(2 / 0.9)
    assert result.as_json()["request_goodput"] == result.request_goodput
    assert summarize(records, objectives={"e2el": 150.0}).request_goodput == pytest.approx(1 / 0.9)
    assert summarize(records).as_json()["request_goodput"] is None


def test_waiting_for_others_is_counted_by_itself() -> None:
    records = [dataclasses.replace(record(1.0, [1.5]), queued=0.25)]
    fields = summarize(records, latencies=["client_queue_time", "e2el_including_client_queue"]).as_json(detailed=True)
    assert (fields["mean_client_queue_time_ms"], fields["p99_e2el_including_client_queue_ms"]) == (250, 750)
    assert "mean_ttft_ms" not in fields
    assert (fields["queue_times"], fields["start_times"], fields["latencies"]) == ([0.25], [1.0], [0.5])


def test_drafts_have_the_names_of_vllm() -> None:
    before = DraftWork(drafts=10, tokens=30, accepted=10, accepted_at={0: 8, 1: 2})
    work = DraftWork(drafts=20, tokens=60, accepted=25, accepted_at={0: 16, 1: 8, 2: 1}) - before
    assert work.as_json() == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 30,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.1],
    }
    nothing = (work - work).as_json()
    assert nothing["spec_decode_acceptance_length"] == nothing["spec_decode_acceptance_rate"] == 0


def test_drafts_of_all_engines() -> None:
    page = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {count}\n'
        for name, count in (("drafts", 2), ("draft_tokens", 6), ("accepted_tokens", 3))
        for engine in "01"
    )
    place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    page += "".join(f'{place}{{engine="{engine}",position="{at}"}} {2 - at}\n' for engine in "01" for at in (0, 1))
    assert parse_drafts(page) == DraftWork(drafts=4, tokens=12, accepted=6, accepted_at={0: 4, 1: 2})
    assert parse_drafts("vllm:spec_decode_num_drafts_total 2\n") is parse_drafts("<html>") is None
