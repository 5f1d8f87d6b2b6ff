"""Flags of ``vllm serve`` and arguments of ``vllm.LLM``, up to 0.33, and those that later versions dropped."""

from __future__ import annotations

from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.rows import (
    CHUNKS,
    DRAFT_MODEL,
    KERNELS,
    MEDIA,
    PARALLEL,
    VERIFICATION,
    accepted,
    alias,
    means,
    ours,
    refused,
)

SWITCH, OPTIONAL, VALUES, NOTHING = Takes.SWITCH, Takes.OPTIONAL, Takes.VALUES, Takes.NOTHING

MODEL = [
    *ours("--model --tokenizer --dtype --seed --revision --max-model-len --quantization --max-logprobs"),
    *ours("--skip-tokenizer-init --served-model-name --hf-token --hf-overrides --generation-config"),
    *ours("--override-generation-config --enforce-eager --download-dir --config"),
    *alias("-q", "quantization"),
    *accepted("--trust-remote-code", "no code that comes with a model is run, and none is needed", takes=SWITCH),
    *accepted("--code-revision", "no code that comes with a model is run", neutral="main"),
    *refused("--tokenizer-revision", "name the tokenizer with --tokenizer, or give --revision for both"),
    *accepted("--tokenizer-mode", "every tokenizer is read from its own files", neutral="auto hf slow fast"),
    *ours("--runner --task --convert"),
    *refused(
        "--pooler-config|--override-pooler-config", "how hidden states are pooled follows from the files of the model"
    ),
    *refused("--hf-config-path", "config.json is read beside the weights; --hf-overrides replaces keys of it"),
    *refused(
        "--model-class-overrides", "the model's family follows from config.json; --hf-overrides replaces keys of it"
    ),
    *accepted("--model-impl", "models have one implementation here", neutral="auto vllm"),
    *accepted("--config-format", "the format is recognized", neutral="auto hf"),
    *accepted("--allow-deprecated-quantization", "no format is deprecated here", takes=SWITCH),
    *refused("--quantization-config", "use --quantization and, for single modules, --quantization-rules"),
    *refused(
        "--logprobs-mode",
        "log-probabilities are those of the model, before sampling parameters",
        neutral="raw_logprobs",
    ),
    *refused(
        "--disable-sliding-window",
        "windows are what the model was trained with; --hf-overrides can take them out",
        takes=SWITCH,
    ),
    *accepted("--disable-cascade-attn", KERNELS, neutral="true false", takes=SWITCH),
    *refused("--enable-prompt-embeds", "prompts are text or token ids", takes=SWITCH),
    *refused(
        "--enable-return-routed-experts|--return-sampling-mask|--enable-trace-replay", "not reported", takes=SWITCH
    ),
    *accepted("--use-fp64-gumbel", "noise is computed in float32", takes=SWITCH),
    *accepted(
        "--enable-sleep-mode|--sleep-mode-offload-cudagraph",
        "any server with --api-key can be put to sleep, and any LLM",
        takes=SWITCH,
    ),
    *accepted("--sleep-mode-backend", "what sleeps is what JAX holds (/sleep)", neutral="cumem"),
    *refused("--sleep-preserve-parameter-names", "all weights leave the device when an engine sleeps", takes=VALUES),
    *accepted("--enable-cumem-allocator|--enable-nccl-comm-suspend", "XLA allocates memory", takes=SWITCH),
    *refused("--logits-processors", "use logit_bias, bad_words or allowed_token_ids of requests", takes=VALUES),
    *refused("--logits-processor-pattern", "use logit_bias, bad_words or allowed_token_ids of requests"),
    *refused("--io-processor-plugin", "plug-ins are not loaded"),
    *accepted(
        "--renderer-num-workers", "chat templates are rendered in two processes that are always there", neutral="1"
    ),
    *alias("--rope-scaling", "hf_overrides", key="rope_scaling"),
    *alias("--rope-theta", "hf_overrides", key="rope_theta"),
]

LOADING = [
    *ours("--load-format"),
    *accepted("--safetensors-load-strategy", "files are mapped into memory", neutral="lazy"),
    *accepted("--safetensors-prefetch-num-threads|--safetensors-prefetch-block-size", "files are mapped into memory"),
    *refused("--model-loader-extra-config", "the loader has no options"),
    *refused("--model-weights", "weights lie beside config.json; --model names their folder, file or repository"),
    *accepted("--ignore-patterns", "only the files of the model are fetched", takes=VALUES),
    *accepted("--use-tqdm-on-load", "", neutral="true false", takes=SWITCH),
    *accepted("--pt-load-map-location", "weights go straight to the device that computes with them", neutral="cpu"),
    *accepted("--max-parallel-loading-workers", "weights are read one after another"),
    *refused("--weight-transfer-config", "weights cannot be replaced while the server runs"),
]

PARALLELISM = [
    *ours("--tensor-parallel-size --pipeline-parallel-size --data-parallel-size --device-ids --enable-expert-parallel"),
    *alias("-tp", "tensor_parallel_size"),
    *alias("-dp", "data_parallel_size"),
    *alias("-pp", "pipeline_parallel_size"),
    *refused("--data-parallel-size-local -dpl", "every engine is on this machine; leave the flag out", neutral="1"),
    *refused("--data-parallel-rank -dpn|--data-parallel-start-rank -dpr", PARALLEL, neutral="0"),
    *refused("--data-parallel-address -dpa|--data-parallel-rpc-port -dpp", PARALLEL),
    *accepted("--data-parallel-backend -dpb", "there is one process", neutral="mp"),
    *refused("--data-parallel-hybrid-lb -dph|--data-parallel-external-lb -dpe", PARALLEL, takes=SWITCH),
    *refused("--data-parallel-multi-port-external-lb -dpm", PARALLEL, takes=NOTHING),
    *accepted(
        "--data-parallel-supervisor-port|--dp-supervisor-probe-interval-s|--dp-supervisor-probe-timeout-s",
        "there is one server",
        neutral="9256 5",
    ),
    *accepted("--dp-supervisor-probe-failure-threshold", "there is one server", neutral="3"),
    *accepted("--headless", "ranks above 0 (--node-rank) have no server", takes=NOTHING),
    *accepted("--api-server-count -asc", "one process answers all requests", neutral="1"),
    *refused("-n", "vLLM means --nnodes by it and llama-server --n-predict; write the long form"),
    *refused("-r", "vLLM means --node-rank by it and llama-server --reverse-prompt; write the long form"),
    *ours("--nnodes --node-rank --master-addr --master-port --distributed-timeout-seconds"),
    *alias("--cpu-distributed-timeout-seconds", "distributed_timeout_seconds"),
    *accepted("--distributed-executor-backend", "one process drives all devices, or --multi-process", neutral="mp uni"),
    *accepted("--worker-use-ray|--engine-use-ray", "devices are driven by one process", takes=SWITCH),
    *accepted("--numa-bind", "processes are bound to the nodes that --numa (--numa-bind-nodes) names", takes=SWITCH),
    *alias("--numa-bind-nodes", "numa", takes=VALUES),
    *refused("--numa-bind-cpus", "use --cpu-list, for example 0-3,8", takes=VALUES),
    *refused("--decode-context-parallel-size -dcp|--prefill-context-parallel-size -pcp", PARALLEL, neutral="1"),
    *accepted("--dcp-comm-backend|--dcp-kv-cache-interleave-size|--cp-kv-cache-interleave-size", PARALLEL, neutral="1"),
    *accepted("--dcp-q-replicate|--enable-hc-sp|--enable-batch-sharded-sampling", PARALLEL, takes=SWITCH),
    *means("-ep", "enable_expert_parallel", True, off=False),
    *accepted("--enable-ep-weight-filter|--enable-dbo|--enable-shm-tensor-arena|--enable-eplb", PARALLEL, takes=SWITCH),
    *accepted("--all2all-backend", KERNELS, neutral="allgather_reducescatter"),
    *accepted("--ubatch-size", PARALLEL, neutral="0"),
    *refused("--enable-elastic-ep", PARALLEL, takes=SWITCH),
    *accepted("--elastic-ep-max-dp-size|--eplb-config|--expert-placement-strategy", PARALLEL, neutral="linear"),
    *accepted("--dbo-decode-token-threshold|--dbo-prefill-token-threshold", PARALLEL, neutral="32 512"),
    *accepted("--dp-sync-interval", PARALLEL, neutral="16"),
    *accepted("--disable-nccl-for-dp-synchronization|--ray-workers-use-nsight", "there is one process", takes=SWITCH),
    *accepted("--disable-custom-all-reduce", "XLA sums over devices", takes=SWITCH),
    *refused("--worker-cls", "the engine has no classes to replace", neutral="auto"),
    *refused("--worker-extension-cls|--scheduler-cls", "the engine has no classes to replace"),
    *refused("--enable-fault-tolerance", "engines of --data-parallel-size are restarted when they die", takes=SWITCH),
    *accepted("--fault-tolerance-config", "engines of --data-parallel-size are restarted when they die"),
]

CACHE = [
    *ours("--block-size --gpu-memory-utilization --kv-cache-memory-bytes --kv-cache-dtype --enable-prefix-caching"),
    *ours("--quantization-param-path"),
    *alias("--device-memory-utilization", "gpu_memory_utilization"),
    *refused("--num-gpu-blocks-override", "size the KV cache with --kv-cache-memory-bytes"),
    *accepted("--prefix-caching-hash-algo", "prefixes are told apart by SHA-256", neutral="sha256 builtin"),
    *accepted(
        "--prefix-cache-retention-interval|--prefix-match-unit", "pages are kept while there is room", neutral="0"
    ),
    *refused(
        "--kv-cache-dtype-skip-layers", "all layers' keys and values have the type of --kv-cache-dtype", takes=VALUES
    ),
    *accepted("--kv-sharing-fast-prefill|--swa-bounded-replay", KERNELS, neutral="true false", takes=SWITCH),
    *accepted("--calculate-kv-scales", "scales are computed for each token and head", takes=SWITCH),
    *accepted("--mamba-cache-dtype|--mamba-ssm-cache-dtype", "recurrent states are float32", neutral="auto float32"),
    *accepted(
        "--mamba-block-size|--mamba-cache-mode|--replayssm-buffer-len",
        "recurrent states are kept by sequence",
        neutral="align none 16",
    ),
    *accepted("--mamba-config", "recurrent states are float32, and " + KERNELS),
    *accepted("--mamba-backend|--mamba-ssu-algorithm|--mamba-cache-philox-rounds", KERNELS, neutral="auto triton 0"),
    *accepted(
        "--enable-mamba-cache-stochastic-rounding|--enable-mamba-shared-prefix-checkpoint|--use-replayssm",
        KERNELS,
        takes=SWITCH,
    ),
    *ours("--kv-offloading-size --kv-offloading-backend"),
    *refused(
        "--cpu-offload-gb",
        "of a mixture of experts --num-experts-offload-per-rank keeps experts in host memory; other weights stay",
        neutral="0",
    ),
    *refused("--offload-backend|--offload-group-size", "see --num-experts-offload-per-rank", neutral="auto uva 0"),
    *accepted("--offload-num-in-group|--offload-prefetch-step", "nothing is prefetched", neutral="0 1"),
    *refused("--cpu-offload-params|--offload-params", "see --num-experts-offload-per-rank", takes=VALUES),
    *accepted("--swap-space", "preempted requests are computed again, so none are swapped", neutral="0 4"),
    *accepted("--preemption-mode", "preempted requests are computed again", neutral="recompute"),
    *accepted("--use-v2-block-manager", "", neutral="true false", takes=SWITCH),
    *accepted("--num-lookahead-slots", "pages for drafts are reserved when there are any", neutral="0"),
    *ours("--kv-events-config --kv-transfer-config"),
    *refused("--ec-transfer-config", MEDIA),
    *accepted("--ec-manager-config|--engram-config", MEDIA),
]

SCHEDULING = [
    *ours("--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path --allowed-media-domains"),
    *ours("--max-num-batched-tokens --max-num-seqs --max-num-queued-reqs --scheduling-policy --num-scheduler-steps"),
    *alias("--max-num-scheduled-tokens", "max_num_batched_tokens"),
    *alias("--max-num-active-seqs", "max_num_seqs"),
    *refused("--max-num-queued-tokens", "the queue is bounded by requests: --max-num-queued-reqs"),
    *accepted("--enable-chunked-prefill", CHUNKS, neutral="true", takes=SWITCH),
    *accepted(
        "--long-prefill-token-threshold", "a long prompt leaves other requests their tokens of each step", neutral="0"
    ),
    *accepted(
        "--long-prefill-token-threshold-adaptive|--disable-chunked-mm-input",
        "the scheduler has no such rule",
        takes=SWITCH,
    ),
    *accepted(
        "--max-num-partial-prefills|--max-long-partial-prefills", "several prompts share a step anyway", neutral="1"
    ),
    *accepted("--scheduler-delay-factor|--watermark", "requests start when their pages are free", neutral="0"),
    *accepted(
        "--scheduler-reserve-full-isl", "requests start when their pages are free", neutral="true false", takes=SWITCH
    ),
    *accepted("--prefill-schedule-interval", "prompts join every step", neutral="1"),
    *accepted("--disable-hybrid-kv-cache-manager", "groups of layers have caches of their own", takes=SWITCH),
    *accepted("--async-scheduling", "the next step is always planned while one runs", neutral="true", takes=SWITCH),
    *accepted(
        "--disable-async-output-proc|--multi-step-stream-outputs",
        "the engine always reads a step while the next runs",
        neutral="true false",
        takes=SWITCH,
    ),
    *ours("--stream-interval"),
]

COMPILATION = [
    *ours("--device"),
    *accepted("--compilation-config -cc", "XLA compiles every step; --compilation-cache-dir keeps the programs"),
    *accepted("--optimization-level -O", "XLA compiles every step, as well as it can", takes=OPTIONAL),
    *accepted("--performance-mode", "see --decode-steps and --max-num-batched-tokens", neutral="balanced"),
    *accepted(
        "--cudagraph-capture-sizes|--cuda-graph-sizes", "buckets of steps are CUDA graphs (--cuda-graphs)", takes=VALUES
    ),
    *accepted(
        "--max-cudagraph-capture-size|--max-seq-len-to-capture",
        "buckets of steps are CUDA graphs (--cuda-graphs)",
        neutral="8192",
    ),
    *accepted(
        "--attention-backend|--attention-config -ac|--moe-backend|--linear-backend|--kernel-config",
        KERNELS,
        neutral="auto",
    ),
    *accepted(
        "--sparse-indexer-topk-backend|--gdn-prefill-backend|--kda-prefill-backend|--kda-decode-backend",
        KERNELS,
        neutral="auto",
    ),
    *accepted("--ir-op-priority", KERNELS),
    *accepted("--monokernel", KERNELS, takes=SWITCH),
    *accepted("--enable-flashinfer-autotune", KERNELS, takes=SWITCH),
    *accepted("--additional-config|--override-neuron-config", "no platform here reads it"),
    *accepted("--jit-monitor-mode", "programs compiled while serving are counted at /metrics", neutral="warn"),
    *accepted("--jit-monitor-verbose", "programs compiled while serving are counted at /metrics", takes=SWITCH),
]

MULTIMODAL = [
    *accepted("--media-io-kwargs", MEDIA),
    *accepted(
        "--language-model-only|--skip-mm-profiling|--disable-mm-preprocessor-cache",
        "",
        takes=SWITCH,
        neutral="true false",
    ),
    *refused("--enable-mm-embeds|--mm-encoder-only|--interleave-mm-strings", MEDIA, takes=SWITCH),
    *accepted("--enable-multimodal-encoder-data-parallel", MEDIA, takes=SWITCH),
    *accepted(
        "--mm-processor-cache-gb|--mm-processor-cache-type|--mm-hasher-algorithm", MEDIA, neutral="0 4 lru blake3"
    ),
    *accepted(
        "--mm-shm-cache-max-object-size-mb|--mm-encoder-tp-mode|--mm-encoder-attn-backend", MEDIA, neutral="128 weights"
    ),
    *accepted("--mm-encoder-attn-dtype|--mm-encoder-fp8-scale-path|--mm-encoder-fp8-scale-save-path", MEDIA),
    *accepted(
        "--mm-encoder-fp8-scale-save-margin|--video-pruning-rate|--video-pruning-method", MEDIA, neutral="1.5 evs"
    ),
    *accepted("--mm-tensor-ipc|--mm-processor-device|--mm-ipc-gpu-memory-gb", MEDIA, neutral="direct_rpc auto 0"),
    *accepted("--mm-device-do-normalize", MEDIA, neutral="true", takes=SWITCH),
    *refused("--default-mm-loras", MEDIA),
]

OWN_FILES = "an adapter's files say what it changes"
PROMPT_ADAPTERS = "prompt adapters are not supported, only LoRA (--lora-modules)"
PROMPT_ADAPTERS = "prompt adapters are not supported, only LoRA (--lora-modules)"
ADAPTERS = [
    *ours("--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras"),
    *accepted("--lora-dtype", "the engine decides in which type adapters are kept", neutral="auto"),
    *accepted("--enable-tower-connector-lora|--enable-lora-bias", OWN_FILES, takes=SWITCH),
    *refused("--enable-prompt-adapter", PROMPT_ADAPTERS, takes=SWITCH),
    *refused("--prompt-adapters", PROMPT_ADAPTERS, takes=VALUES),
    *accepted("--max-prompt-adapters|--max-prompt-adapter-token", PROMPT_ADAPTERS, neutral="0 1"),
    *accepted("--lora-extra-vocab-size", "adapters add no tokens to the vocabulary", neutral="0 256"),
    *accepted("--max-lora-cls-labels", OWN_FILES, neutral="256"),
    *accepted("--long-lora-scaling-factors", "an adapter's configuration says its scale"),
    *accepted("--lora-target-modules", OWN_FILES, takes=VALUES),
    *accepted(
        "--fully-sharded-loras|--specialize-active-lora|--enable-mixed-moe-lora-format|--enable-moe-shared-loras",
        "the engine decides how adapters are laid out and computed",
        takes=SWITCH,
    ),
    *refused("--qlora-adapter-name-or-path", "serve the base model, and name the adapter with --lora-modules"),
]

DECODING = [
    *ours("--reasoning-parser"),
    *refused("--reasoning-parser-plugin", "parsers are built in; --reasoning-parser names one"),
    *accepted(
        "--enable-reasoning",
        "reasoning is looked for whenever the template has it (--reasoning-parser)",
        neutral="true",
        takes=SWITCH,
    ),
    *refused("--reasoning-config", "requests set thinking_token_budget"),
    *accepted(
        "--structured-outputs-config|--guided-decoding-backend",
        "grammars have one implementation here",
        neutral="auto xgrammar guidance outlines lm-format-enforcer",
    ),
    *accepted("--guided-decoding-disable-fallback", "grammars have one implementation here", takes=SWITCH),
    *alias("--speculative-config -sc", "speculative_config"),
    *alias("--spec-method", "speculative_config", key="method"),
    *alias("--spec-model --speculative-model", "speculative_config", key="model"),
    *alias("--spec-tokens --num-speculative-tokens", "speculative_config", key="num_speculative_tokens"),
    *alias("--ngram-prompt-lookup-max", "speculative_config", key="prompt_lookup_max"),
    *alias("--ngram-prompt-lookup-min", "speculative_config", key="prompt_lookup_min"),
    *alias("--speculative-disable-by-batch-size", "speculative_config", key="disable_by_batch_size"),
    *accepted("--speculative-draft-tensor-parallel-size|--speculative-max-model-len", DRAFT_MODEL),
    *alias("--speculative-model-quantization", "speculative_config", key="quantization"),
    *accepted("--speculative-disable-mqa-scorer|--disable-logprobs-during-spec-decoding", VERIFICATION, takes=SWITCH),
    *accepted("--spec-decoding-acceptance-method", VERIFICATION, neutral="rejection_sampler"),
    *accepted(
        "--typical-acceptance-sampler-posterior-threshold|--typical-acceptance-sampler-posterior-alpha", VERIFICATION
    ),
    *refused("--watermark-config", "answers are not watermarked"),
    *refused("--diffusion-config -dc", "diffusion models are not supported"),
    *refused("--aux-output-config", "not reported"),
]

OBSERVING = [
    *ours("--disable-log-stats --log-level"),
    *accepted(
        "--enable-log-requests", "each request is a line of --access-log; prompts are never logged", takes=SWITCH
    ),
    *accepted("--disable-log-requests", "", neutral="true false", takes=SWITCH),
    *accepted("--aggregate-engine-logging", "there is one engine", takes=NOTHING),
    *accepted("--max-log-len", "prompts are never logged"),
    *refused("--enable-log-outputs", "what a model writes is never logged", takes=SWITCH),
    *accepted("--enable-log-deltas", "what a model writes is never logged", neutral="true false", takes=SWITCH),
    *accepted("--log-error-stack", "an error that is not the request's is logged with its traceback", takes=SWITCH),
    *refused(
        "--logging-config|--log-config-file",
        "logs go to stderr and the access log, as JSON, to stdout; see --log-level",
    ),
    *refused("--show-hidden-metrics-for-version", "no metrics are hidden"),
    *refused(
        "--collect-detailed-traces",
        "spans are of whole requests, with the times of their phases (--otlp-traces-endpoint); /start_profile has more",
        takes=VALUES,
    ),
    *accepted("--per-request-spec-decode-metrics", "/metrics has those of all requests", neutral="none"),
    *accepted(
        "--kv-cache-metrics|--cudagraph-metrics|--enable-mfu-metrics|--enable-layerwise-nvtx-tracing",
        "/metrics has what is measured",
        takes=SWITCH,
    ),
    *accepted(
        "--enable-logging-iteration-details|--enable-mm-processor-stats", "/metrics has what is measured", takes=SWITCH
    ),
    *accepted("--kv-cache-metrics-sample|--custom-histogram-buckets", "/metrics has what is measured", neutral="0.01"),
    *accepted("--watchdog-config", "a step that hangs writes all stacks to the log, and /health fails"),
    *refused("--profiler-config", "profiles are XLA's; --profile-dir says where they go"),
    *accepted("--fail-on-environ-validation", "no environment variable is a setting", takes=SWITCH),
]

FRONTEND = [
    *ours(
        "--host --port --uds --api-key --allowed-origins --allowed-methods --allowed-headers --root-path --ssl-keyfile"
    ),
    *ours(
        "--ssl-certfile --chat-template --default-chat-template-kwargs --trust-request-chat-template --response-role"
    ),
    *ours("--enable-auto-tool-choice --tool-call-parser --sse-keep-alive-interval --enable-request-id-headers"),
    *ours("--uvicorn-log-level --disable-uvicorn-access-log --h11-max-header-count --shutdown-timeout"),
    *ours("--otlp-traces-endpoint"),
    *alias("--h11-max-incomplete-event-size", "max_header_bytes"),
    *accepted(
        "--chat-template-content-format",
        "the form of content that a template takes is read from it",
        neutral="auto string openai",
    ),
    *refused("--trust-request-mm-kwargs", MEDIA, takes=SWITCH),
    *refused("--return-tokens-as-token-ids", "requests set return_tokens_as_token_ids", takes=SWITCH),
    *refused(
        "--exclude-tools-when-tool-choice-none",
        "with tool_choice none the model is still told of the tools",
        takes=SWITCH,
    ),
    *refused("--tool-parser-plugin", "parsers are built in; --tool-call-parser names one"),
    *refused("--tool-server", "tools are called by the client"),
    *accepted("--tool-strict-level", "each tool's own strict says it", neutral="auto"),
    *accepted("--enable-prompt-tokens-details", "", neutral="true false", takes=SWITCH),
    *ours("--enable-per-request-metrics"),
    *accepted("--enable-server-load-tracking", "", neutral="true false", takes=SWITCH),
    *refused("--enable-force-include-usage", "requests set stream_options.include_usage", takes=SWITCH),
    *accepted("--enable-tokenizer-info-endpoint", "", neutral="true false", takes=SWITCH),
    *accepted("--cohere-is-reasoning-model|--enable-flash-late-interaction", "", neutral="true false", takes=SWITCH),
    *accepted("--cohere-format|--anthropic-disabled-thinking-effort", "there is no such route", neutral="cmd4 auto"),
    *refused("--tokens-only|--enable-scale-out", "all routes are served", takes=SWITCH),
    *refused(
        "--fingerprint-mode", "system_fingerprint is a hash of what may change what a seed gives", neutral="full hash"
    ),
    *refused("--fingerprint-value", "system_fingerprint is a hash of what may change what a seed gives"),
    *refused("--grpc", "only HTTP is served", takes=NOTHING),
    *refused("--grpc-port", "only HTTP is served"),
    *accepted("--disable-access-log-for-endpoints", "/health, /ping and /metrics are logged only when they fail"),
    *refused("--allow-credentials", "browsers send keys in headers, which --allowed-headers allows", takes=SWITCH),
    *refused("--ssl-ca-certs|--ssl-ciphers", "put a reverse proxy in front for client certificates or ciphers"),
    *refused("--ssl-cert-reqs", "put a reverse proxy in front for client certificates", neutral="0"),
    *refused("--enable-ssl-refresh", "restart the server after a change of its certificate", takes=SWITCH),
    *refused("--middleware", "code is not loaded into the server; put a reverse proxy in front", takes=VALUES),
    *ours("--disable-fastapi-docs --reasoning-effort-map"),
    *accepted("--enable-offline-docs", "", neutral="true false", takes=SWITCH),
    *accepted(
        "--tokenizer-pool-size|--tokenizer-pool-type|--tokenizer-pool-extra-config",
        "long prompts are tokenized on threads",
        neutral="0 ray",
    ),
    *accepted("--intial-incremental-detokenization-offset", "", neutral="5"),
]

FLAGS: tuple[ForeignFlag, ...] = (
    *MODEL, *LOADING, *PARALLELISM, *CACHE, *SCHEDULING, *COMPILATION, *MULTIMODAL, *ADAPTERS, *DECODING, *OBSERVING,
    *FRONTEND,
)  # fmt: skip
