"""How the KV memory is divided. That the longest request can always run is in test_scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.config import EngineConfig
from llmjax.engine.loading.memory import KVPlan, check_memory, plan_kv
from llmjax.errors import ConfigError
from llmjax.kernels.attention import KVLayout, make_pages
from llmjax.models import RMS, Attention, GatedMLP, LayerSpec, ModelConfig
from llmjax.models.layers.state import AllTokens, LastTokens

MIB = 2**20
BF16 = KVLayout.of(jnp.dtype(jnp.bfloat16), page_size=16)


def model(*windows: int | None, max_position: int = 8192) -> ModelConfig:
    """A model with 2 key/value heads of size 8: 32 elements for each token and layer."""
    return ModelConfig(
        architecture="Test",
        vocab_size=96,
        hidden_size=32,
        layers=tuple(
            LayerSpec(
                mixer=Attention(heads=4, kv_heads=2, head_dim=8, scale=1.0, rope=None, window=window),
                feed_forward=GatedMLP(inner=32, activation="silu"),
                norm=RMS(1e-6),
            )
            for window in windows
        ),
        norm=RMS(1e-6),
        max_position=max_position,
    )


def cpu(free: int) -> Any:
    return SimpleNamespace(is_cpu=True, is_cuda=False, free_memory=lambda: free)


def gpu(free: int) -> Any:
    return SimpleNamespace(is_cpu=False, is_cuda=True, available_memory=lambda utilization: int(free * utilization))


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})


def test_given_bytes_are_used_and_not_exceeded() -> None:
    # 3 layers × 32 elements × 16 tokens × 2 bytes = 3072 bytes a page.
    plan = plan_kv(config(kv_cache_memory_bytes=MIB, max_model_len=4096), model(None, None, None), gpu(0), layout=BF16)
    assert [group.num_pages for group in plan.groups] == [MIB // 3072]
    assert plan.num_bytes == MIB // 3072 * 3072 <= MIB
    assert plan.num_tokens == (MIB // 3072 - 1) * 16
    assert plan.pages_per_sequence == 256
    assert [plan.longest_context(n) for n in (1, 2, 4)] == [4096, 170 * 16, 85 * 16]


def test_no_more_pages_than_all_slots_can_use() -> None:
    plan = plan_kv(config(kv_cache_memory_bytes=2**40, max_model_len=100), model(None), gpu(0), layout=BF16)
    assert plan.groups[0].num_pages == 4 * 7 + 1


@pytest.mark.parametrize(("gib", "kept"), [(2, 2), (3, 2), (4, 2), (5, 5)])
def test_one_byte_pages_are_as_many_as_kernels_reach(gib: int, kept: int, caplog: pytest.LogCaptureFixture) -> None:
    """Between 2 and 4 GiB a layer 32-bit offsets overflow, and attention would not be the kernels'."""
    layout = KVLayout.of(jnp.dtype(jnp.int8), page_size=16, calibrated=True)  # 32 bytes a token
    settings = config(kv_cache_memory_bytes=gib << 30, max_num_seqs=1 << 20)
    plan = plan_kv(settings, model(None), gpu(0), layout=layout)
    assert plan.groups[0].num_pages == (kept << 30) // (16 * 32)
    assert plan.num_bytes == kept << 30
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [] if gib == kept else "pages instead of" in warned[0] and "2,048 MiB of int8" in warned[0]
    wide = KVLayout.of(jnp.dtype(jnp.bfloat16), page_size=16)
    assert plan_kv(settings, model(None), gpu(0), layout=wide).num_bytes == gib << 30


def test_a_window_gets_what_it_can_use_and_full_attention_the_rest() -> None:
    plan = plan_kv(config(kv_cache_memory_bytes=MIB), model(None, 32, 32, 32), gpu(0), layout=BF16)
    full, window = plan.groups
    assert (full.span, window.span) == (AllTokens(), LastTokens(32))
    assert window.num_pages == 4 * (2 + 3) + 4
    assert full.num_pages == (MIB - 24 * 3 * 1024) // 1024
    assert plan.num_bytes <= MIB


@pytest.mark.parametrize(
    ("free", "context", "tokens"),
    [
        (8 * 2**30, 2048, 2**30),  # a quarter is 2 GiB, but 1 GiB is enough for one request
        (2 * 2**30, 2048, 2**29),
        (64 * 2**30, 2**19, 2**31),  # one request needs 2 GiB
        (64 * 2**30, 2**22, 2**32),  # at most 4 GiB
    ],
)
def test_default_share_of_a_cpu(free: int, context: int, tokens: int) -> None:
    layers: list[int | None] = [None] * 64  # 64 × 32 × 2 bytes = 4 KiB a token
    settings = config(max_num_seqs=4096)
    plan = plan_kv(settings, model(*layers, max_position=context), cpu(free), layout=BF16)
    assert tokens * 0.999 < plan.num_bytes <= tokens


def test_default_share_of_an_accelerator() -> None:
    settings = config(gpu_memory_utilization=0.5, max_num_seqs=10_000)
    plan = plan_kv(settings, model(None), gpu(64 * MIB), layout=BF16)
    assert plan.num_bytes == 32 * MIB
    plan = plan_kv(settings, model(None), gpu(64 * MIB), layout=BF16, reserved=5 * MIB)
    assert plan.num_bytes == 27 * MIB


def test_what_is_free_may_differ_a_little_from_start_to_start() -> None:
    settings = config(gpu_memory_utilization=1.0, max_num_seqs=10_000_000)
    free = [60 * MIB + taken for taken in (0, 1000, MIB // 2 - 1)]
    plans = [plan_kv(settings, model(None), gpu(size), layout=BF16) for size in free]
    assert {plan.num_bytes for plan in plans} == {60 * MIB}


@pytest.mark.parametrize("noise", [-40, 0, 55])
def test_a_small_machine_gets_the_same_pages_from_start_to_start(noise: int) -> None:
    layers: list[int | None] = [None] * 64
    settings = config(max_num_seqs=4096)
    plan = plan_kv(settings, model(*layers, max_position=2048), cpu((2600 + noise) * MIB), layout=BF16)
    assert plan.num_bytes == 640 * MIB  # of 650, 640 and 663


def test_what_does_not_fit_is_said_before_it_is_allocated() -> None:
    def check(free: int, **settings: Any) -> None:
        asked = config(**{"kv_cache_memory_bytes": 4 * MIB, "max_model_len": 4096, **settings})
        plan = plan_kv(asked, model(None), cpu(free), layout=BF16)
        check_memory(asked, model(None), cpu(free), plan)

    check(64 * MIB)
    with pytest.raises(
        ConfigError, match=r"^max_num_seqs 1000000 is too large: it takes 7,359 MiB, and 64 MiB are free"
    ):
        check(64 * MIB, max_num_seqs=1_000_000)
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens 1000000 is too large: it takes 488 MiB"):
        check(64 * MIB, max_num_batched_tokens=1_000_000)
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes 104857600 is too large: it takes 1.. MiB"):
        check(64 * MIB, kv_cache_memory_bytes=100 * MIB, max_num_seqs=1000)


def test_bytes_that_nothing_can_use_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for size, warned in ((100 * MIB, True), (100_000, False)):
        asked = config(kv_cache_memory_bytes=size, max_model_len=1024)
        check_memory(asked, model(None), cpu(2**30), plan_kv(asked, model(None), cpu(2**30), layout=BF16))
        lines = [record.getMessage() for record in caplog.records]
        expected = "kv_cache_memory_bytes 100 MiB: 0 MiB are all that 4 sequences (max_num_seqs) of 1024 tokens can use"
        assert lines == ([expected] if warned else [])
        caplog.clear()


def test_nothing_left_beside_what_steps_need() -> None:
    with pytest.raises(ConfigError, match=r"steps need 80 MiB, 48 MiB more than there are; .*one pool"):
        plan_kv(config(gpu_memory_utilization=0.5), model(None), gpu(64 * MIB), layout=BF16, reserved=80 * MIB)


def test_context_is_cut_to_the_memory_unless_it_was_asked_for() -> None:
    settings = config(kv_cache_memory_bytes=100 * 1024)
    plan = plan_kv(settings, model(None), gpu(0), layout=BF16)
    assert plan.max_model_len == 99 * 16
    with pytest.raises(ConfigError, match=r"max_model_len 8192 needs up to 1 MiB of KV cache.*\(1584 tokens\)"):
        plan_kv(settings.replace(max_model_len=8192), model(None), gpu(0), layout=BF16)


def test_two_pages_are_the_least() -> None:
    def plan(budget: int) -> KVPlan:
        return plan_kv(config(kv_cache_memory_bytes=budget), model(None, 8), gpu(0), layout=BF16)

    assert plan(4096).max_model_len == 16
    with pytest.raises(ConfigError, match=r"4095 bytes of KV cache cannot hold two pages of 16 tokens.* to 4096"):
        plan(4095)


def test_a_window_alone_does_not_limit_the_context() -> None:
    plan = plan_kv(config(kv_cache_memory_bytes=24 * 1024), model(64), gpu(0), layout=BF16)
    assert plan.max_model_len == 8192
    assert plan.groups[0].num_pages == 24


@given(
    budget=st.integers(1, 4 * MIB),
    windows=st.lists(st.sampled_from([None, 1, 16, 100, 1000]), min_size=1, max_size=4),
    max_num_seqs=st.integers(1, 64),
    batched=st.integers(1, 512),
    page_size=st.integers(1, 64),
)
def test_never_over_budget(
    budget: int, windows: list[int | None], max_num_seqs: int, batched: int, page_size: int
) -> None:
    settings = config(
        kv_cache_memory_bytes=budget, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched, page_size=page_size
    )
    try:
        plan = plan_kv(
            settings, model(*windows), gpu(0), layout=KVLayout.of(jnp.dtype(jnp.float32), page_size=page_size)
        )
    except ConfigError:
        return
    assert plan.num_bytes <= budget
    assert 1 <= plan.max_model_len <= 8192


def test_more_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 8193 is above the 8192 tokens"):
        plan_kv(config(max_model_len=8193), model(None), cpu(2**34), layout=BF16)


@pytest.mark.parametrize(
    "dtype,calibrated,expected",
    [
        (jnp.float32, False, 2 * 2 * 16 * 8 * 4),
        (jnp.bfloat16, False, 2 * 2 * 16 * 8 * 2),
        # 16 scales of 4 bytes fill 8 rows of 8.
        (jnp.int8, False, 2 * 2 * (16 + 8) * 8),
        (jnp.float8_e4m3fn, False, 2 * 2 * (16 + 8) * 8),
        (jnp.float8_e5m2, True, 2 * 2 * 16 * 8),
    ],
)
def test_bytes_of_every_type_are_those_of_the_arrays(dtype: jnp.dtype, calibrated: bool, expected: int) -> None:
    layout = KVLayout.of(dtype, page_size=16, calibrated=calibrated)
    plan = plan_kv(config(kv_cache_memory_bytes=MIB), model(None, None), gpu(0), layout=layout)
    assert plan.num_bytes == plan.groups[0].num_pages * 2 * expected <= MIB
    pages = make_pages(
        num_pages=plan.groups[0].num_pages,
        page_size=16,
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        calibration=jnp.ones((2, 2)) if calibrated else None,
    )
    assert pages.layout == layout
    assert pages.data.nbytes * 2 == plan.num_bytes
