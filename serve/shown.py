"""Which settings ``/server_info`` shows to every client: those that are listed here, and no others.

Types, sizes and switches are safe to show. Secrets, addresses, paths of this machine and free text, which may hold any
of these, are not, so a field that is new stays hidden until somebody has decided that it may be listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.info import EngineInfo, PoolerInfo
from llmjax.kv_events import KVEventsConfig
from llmjax.kv_transfer import KVTransferConfig
from llmjax.speculative import SpeculativeConfig

_MODEL = "skip_tokenizer_init revision offline runner convert task served_model_name"
_NUMERICS = "dtype quantization kv_cache_dtype activations seed"
_MEMORY = (
    "max_model_len max_num_seqs max_num_batched_tokens decode_steps page_size gpu_memory_utilization "
    "num_experts_offload_per_rank dequantized_copies kv_cache_memory_bytes enable_prefix_caching kv_offloading_size "
    "kv_offloading_backend kv_offloading_disk_size scheduling_policy max_num_queued_reqs stream_interval max_logprobs "
    "packed_weights_bytes enable_lora max_loras max_lora_rank max_cpu_loras"
)
_DEVICES = (
    "device device_ids tensor_parallel_size pipeline_parallel_size enable_expert_parallel data_parallel_size nnodes "
    "node_rank distributed_timeout_seconds multi_process threads cpu_list numa cuda_graphs compile_threads "
    "engine_process disable_log_stats"
)
_LIMITS = (
    "guard_metrics cache_salt_per_key max_requests_per_minute max_tokens_per_minute max_request_bytes max_header_bytes "
    "max_header_count read_timeout send_timeout keep_alive_timeout max_idle_connections sse_keep_alive_interval "
    "request_timeout shutdown_timeout max_stored_responses max_stored_response_bytes stored_response_lifetime "
    "record_conversation max_conversations max_conversation_bytes conversation_lifetime max_file_bytes "
    "max_files_bytes file_lifetime"
)
_ANSWERS = (
    "trust_request_chat_template cut_max_tokens ignore_unknown_fields response_role "
    "tool_call_parser reasoning_parser enable_auto_tool_choice enable_per_request_metrics docs "
    "enable_request_id_headers log_level access_log"
)

_OF_ENGINE = (
    "model_name architecture num_layers vocab_size max_model_len max_num_seqs max_num_batched_tokens eos_token_ids "
    "default_sampling_params device platform dtype weight_bytes offloaded_bytes load_seconds kv_bytes kv_tokens "
    "kv_dtype kv_calibrated page_size longest_contexts sampler_bytes dequantized_from activations"
)
_OF_POOLER = (
    "kind task size normalize activation labels whole matryoshka_dimensions prompts default_prompt lowercase "
    "pair_template instruction"
)


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


SHOWN: Mapping[type, frozenset[str]] = {
    EngineConfig: _names(_MODEL, _NUMERICS, _MEMORY, _DEVICES),
    ServerConfig: _names(_LIMITS, _ANSWERS),
    SpeculativeConfig: _names(
        "num_speculative_tokens quantization prompt_lookup_max prompt_lookup_min disable_by_batch_size"
    ),
    KVEventsConfig: _names("buffer_steps hwm max_queue_size"),
    KVTransferConfig: _names("kv_connector kv_role kv_buffer_size"),
    EngineInfo: _names(_OF_ENGINE),
    PoolerInfo: _names(_OF_POOLER),
}


def shown(settings: Any) -> dict[str, Any]:
    """The fields of an object, of a class in ``SHOWN``, that clients may see, in their order."""
    listed = SHOWN[type(settings)]
    return {name: value for name, value in vars(settings).items() if name in listed}
