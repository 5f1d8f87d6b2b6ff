"""Histogram arithmetic, against prometheus_client's own histogram, and what steps become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from llmjax.config import EngineConfig
from llmjax.engine.core.stats import QUEUE_FULL, DraftCounts, OffloadCounts, StepStats
from llmjax.engine.info import EngineState
from llmjax.serve.metrics import TOKEN_LATENCY, EngineMetrics, Histogram, one_two_five


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(TOKEN_LATENCY))))
def test_buckets_equal_the_librarys(values: list[float]) -> None:
    ours = Histogram("", TOKEN_LATENCY)
    ours.observe(*values)
    theirs = Reference("x", "", registry=CollectorRegistry(), buckets=TOKEN_LATENCY)
    for value in values:
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name == "x_bucket"]
    assert ours.buckets() == expected
    (total,) = (sample.value for sample in family.samples if sample.name == "x_sum")
    assert ours.sum == total


def test_one_two_five() -> None:
    assert one_two_five(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert one_two_five(1) == (1,)
    assert one_two_five(10) == (1, 2, 5, 10)


def test_drafts_have_vllms_names() -> None:
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m"),
        info=SimpleNamespace(model_name="m", max_model_len=64, kv_tokens=640, page_size=32, drafts=3),
        states=(EngineState(serving=True),),
        sleep_state="awake",
        num_held_back=0,
    )
    metrics = EngineMetrics(engine)
    drafts = DraftCounts(num_drafts=2, num_draft_tokens=5, accepted_per_pos=[2, 1])
    stats = StepStats(
        num_running=2,
        num_waiting=0,
        kv_usage=0.5,
        step_tokens=[5],
        num_prompt_tokens=0,
        num_generation_tokens=5,
        drafts=drafts,
    )
    for _ in range(2):
        metrics.record_step(stats)
    samples = {
        (sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert samples == {
        ("drafts_total", None): 4,
        ("draft_tokens_total", None): 10,
        ("accepted_tokens_total", None): 6,
        ("accepted_tokens_per_pos_total", "0"): 4,
        ("accepted_tokens_per_pos_total", "1"): 2,
        ("accepted_tokens_per_pos_total", "2"): 0,
    }


def test_offloaded_pages_have_vllms_names() -> None:
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m", kv_offloading_size=1.0),
        info=SimpleNamespace(model_name="m", max_model_len=64, kv_tokens=640, page_size=32, drafts=0),
        states=(EngineState(serving=True),),
        sleep_state="awake",
        num_held_back=0,
    )
    metrics = EngineMetrics(engine)
    offload = OffloadCounts(
        host_hits=8,
        disk_hits=4,
        remote_hits=2,
        device_to_host_bytes=100,
        host_to_device_bytes=50,
        disk_write_bytes=70,
        disk_read_bytes=20,
        remote_read_bytes=30,
        disk_dropped_bytes=10,
    )
    stats = StepStats(
        num_running=1,
        num_waiting=0,
        kv_usage=0.5,
        step_tokens=[5],
        num_prompt_tokens=5,
        num_generation_tokens=1,
        prefix_cache_queries=40,
        prefix_cache_hits=34,
        offload=offload,
    )
    for _ in range(2):
        metrics.record_step(stats)
    samples = {
        (sample.name, sample.labels.get("tier") or sample.labels.get("transfer_type")): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if "offload" in sample.name or "external" in sample.name
    }
    assert samples == {
        ("vllm:external_prefix_cache_queries_total", None): 40,
        ("vllm:external_prefix_cache_hits_total", None): 28,
        ("llmjax:kv_offload_hits_total", "host"): 16,
        ("llmjax:kv_offload_hits_total", "disk"): 8,
        ("llmjax:kv_offload_hits_total", "remote"): 4,
        ("vllm:kv_offload_total_bytes_total", "GPU_to_CPU"): 200,
        ("vllm:kv_offload_total_bytes_total", "CPU_to_GPU"): 100,
        ("vllm:kv_offload_total_bytes_total", "CPU_to_disk"): 140,
        ("vllm:kv_offload_total_bytes_total", "disk_to_CPU"): 40,
        ("vllm:kv_offload_total_bytes_total", "remote_to_CPU"): 60,
        ("vllm:kv_offload_total_bytes_total", "dropped"): 20,
    }


def test_waiting_by_reason_rejections_and_steps() -> None:
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m"),
        info=SimpleNamespace(model_name="m", max_model_len=64, kv_tokens=640, page_size=32, drafts=0),
        states=(EngineState(serving=True),),
        sleep_state="awake",
        num_held_back=0,
    )
    metrics = EngineMetrics(engine)
    # A dispatch of three steps: two rows, one of which ends after the first.
    stats = StepStats(
        num_running=2,
        num_waiting=5,
        kv_usage=0.5,
        step_tokens=[2, 1, 1],
        num_prompt_tokens=0,
        num_generation_tokens=4,
    )
    metrics.record_step(stats)
    for _ in range(3):
        metrics.record_rejection(QUEUE_FULL)
    samples = {
        (sample.name, sample.labels.get("reason")): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert samples["vllm:num_requests_waiting", None] == 5
    assert samples["vllm:num_requests_waiting_by_reason", "capacity"] == 5
    assert samples["vllm:num_requests_waiting_by_reason", "deferred"] == 0
    assert samples["vllm:admission_rejections_total", "max_num_queued_reqs"] == 3
    assert samples["vllm:iteration_tokens_total_count", None] == 3
    assert samples["vllm:iteration_tokens_total_sum", None] == 4
    assert samples["llmjax:steps_total", None] == 3
