"""The settings and versions that all ranks of a group must have in common."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

from llmjax.config import EngineConfig
from llmjax.version import __version__

# Settings that each rank may have for itself; all others decide which programs are compiled.
OWN_SETTINGS = frozenset(
    {
        "model",
        "tokenizer",
        "skip_tokenizer_init",
        "hf_token",
        "download_dir",
        "offline",
        "chat_template",
        "generation_config",
        "override_generation_config",
        "quantization_param_path",
        "seed",
        "scheduling_policy",
        "max_num_queued_reqs",
        "max_cpu_loras",
        "lora_modules",
        "lora",
        "lora_scaled",
        "lora_init_without_apply",
        "lora_fused",
        "kv_cache_memory_bytes",
        "device_ids",
        "node_rank",
        "master_addr",
        "master_port",
        "master_secret",
        "distributed_timeout_seconds",
        "multi_process",
        "threads",
        "cpu_list",
        "numa",
        "compilation_cache_dir",
        "packed_weights_bytes",
        "compile_threads",
        "engine_process",
        "served_model_name",
        "disable_log_stats",
    }
)


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Everything that must be equal on all ranks, by name: versions, and settings that decide programs."""
    fields = dataclasses.fields(config)
    settings = {field.name: repr(getattr(config, field.name)) for field in fields if field.name not in OWN_SETTINGS}
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    return {"llmjax": __version__, **versions, **settings}


def difference(ours: dict[str, str], theirs: dict[str, str], name: str) -> str | None:
    """The first setting that another rank has otherwise than rank 0, as an error says it.

    Args:
        ours: settings of rank 0, as `shared_settings` has them.
        theirs: settings of the other rank.
        name: the other rank, as messages call it.
    """
    for setting, value in ours.items():
        if theirs.get(setting) != value:
            return f"{name} has {setting} {theirs.get(setting)}, and rank 0 has {value}: start all ranks alike"
    return None
