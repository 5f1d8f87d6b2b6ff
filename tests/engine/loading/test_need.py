"""What an engine needs is known before its weights are read, and is what it then takes."""

from __future__ import annotations

import pytest

from llmjax.config import EngineConfig
from llmjax.engine.build import build_engine
from llmjax.engine.description import info_of
from llmjax.engine.loading.need import PROCESS_BYTES, card_need, opens_card
from llmjax.engine.need import MEMORY, Need
from llmjax.errors import ConfigError
from llmjax.machine_share import MachineShare
from tests.checkpoints import GOLDEN, POOLED

MIB = 2**20


class Refused(Exception):
    pass


def asked(config: EngineConfig, *, memory: int) -> Need:
    """What an engine says before it reads weights."""
    needs: list[Need] = []

    def admit(need: Need) -> None:
        needs.append(need)
        raise Refused

    with pytest.raises(Refused):
        build_engine(config, MachineShare(host_memory=memory), admit=admit)
    (need,) = needs
    return need


def config_of(name: str, compile_cache_dir: str) -> EngineConfig:
    folder = GOLDEN if (GOLDEN / name).exists() else POOLED
    return EngineConfig(
        model=str(folder / name),
        dtype="float32",
        device="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        skip_tokenizer_init=True,
        compilation_cache_dir=compile_cache_dir,
    )


@pytest.mark.parametrize("name", ["llama", "bert-cls"])
def test_an_engine_takes_what_it_has_asked_for(name: str, compile_cache_dir: str) -> None:
    needs: list[Need] = []
    engine = build_engine(config_of(name, compile_cache_dir), MachineShare(host_memory=4096 * MIB), admit=needs.append)
    try:
        info = info_of(engine)
    finally:
        engine.close()
    (need,) = needs
    assert (need.weight_bytes, need.kv_bytes) == (info.weight_bytes, info.kv_bytes)
    assert need.other_bytes > PROCESS_BYTES + info.sampler_bytes
    assert need.awake == {MEMORY: need.weight_bytes + need.kv_bytes + need.other_bytes}
    assert need.asleep == {MEMORY: need.weight_bytes + need.other_bytes}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_places_for_adapters_count(name: str, compile_cache_dir: str) -> None:
    """All places count, whether or not adapters are in them."""
    plain = config_of(name, compile_cache_dir)
    adapted = plain.replace(enable_lora=True, max_loras=3, max_lora_rank=16)
    needs: list[Need] = []
    engine = build_engine(adapted, MachineShare(host_memory=4096 * MIB), admit=needs.append)
    try:
        taken = info_of(engine).weight_bytes
    finally:
        engine.close()
    without, twice = (asked(one, memory=4096 * MIB) for one in (plain, adapted.replace(max_loras=6)))
    assert needs[0].weight_bytes == taken > without.weight_bytes
    places = taken - without.weight_bytes
    assert twice.weight_bytes - without.weight_bytes == pytest.approx(2 * places, rel=0.01)


def test_pages_get_a_share_of_what_there_is_for_all(compile_cache_dir: str) -> None:
    config = config_of("llama", compile_cache_dir).replace(
        hf_overrides={"max_position_embeddings": 2**20}, max_num_seqs=4
    )
    small, large = (asked(config, memory=memory * MIB).kv_bytes for memory in (600, 16 * 1024))
    assert 0 < small < 64 * MIB
    assert 900 * MIB < large <= 1024 * MIB
    assert asked(config.replace(kv_cache_memory_bytes=8 * MIB), memory=600 * MIB).kv_bytes <= 8 * MIB
    offloading = config.replace(kv_offloading_size=2.0, enable_prefix_caching=True)
    more = asked(offloading, memory=8192 * MIB).other_bytes - asked(config, memory=8192 * MIB).other_bytes
    assert more == 2048 * MIB


def test_a_draft_model_counts(compile_cache_dir: str) -> None:
    config = config_of("llama", compile_cache_dir)
    drafted = config.replace(speculative_config={"model": str(GOLDEN / "llama"), "num_speculative_tokens": 2})
    alone, both = (asked(each, memory=4096 * MIB).weight_bytes for each in (config, drafted))
    assert both == 2 * alone


def test_what_can_never_fit_is_an_error(compile_cache_dir: str) -> None:
    config = config_of("llama", compile_cache_dir).replace(kv_cache_memory_bytes=1024)
    with pytest.raises(ConfigError, match="cannot hold two pages"):
        build_engine(config, MachineShare(host_memory=600 * MIB), admit=lambda need: None)


def test_cards_are_asked_for_by_the_share_of_their_memory() -> None:
    config = EngineConfig(device="cuda", device_ids="1,2", tensor_parallel_size=2, gpu_memory_utilization=0.4)
    need = card_need(config)
    assert {name: parts for name, parts in need.awake.items() if name != MEMORY} == {
        "card 1": 400_000,
        "card 2": 400_000,
    }
    assert need.asleep == need.awake  # JAX's pool stays
    assert opens_card(config) and not opens_card(EngineConfig(device="cpu"))
