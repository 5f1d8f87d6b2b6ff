"""Flags of llama.cpp's ``llama-server`` that are in common use."""

from __future__ import annotations

from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.rows import KERNELS, accepted, alias, means, ours, refused

SWITCH, OPTIONAL, NOTHING = Takes.SWITCH, Takes.OPTIONAL, Takes.NOTHING

LAYERS = "a model lies on its devices whole; --device cpu uses none, --tensor-parallel-size divides it"
SAMPLERS = "there is no such sampler; temperature, top_p, top_k, min_p and penalties are"
CLIENT = "requests bring their own: response_format"
PROMPT_CACHE = "prefixes are kept in the pages of the KV cache while there is room (--kv-cache-memory-bytes)"
TOOLS = "tools are called by the client"

MODEL = [
    *ours("--model --threads --offline --hf-token --chat-template --device --numa --seed --config"),
    *alias("-m", "model"),
    *alias("-hf -hfr --hf-repo", "model"),
    *alias("-hff --hf-file", "gguf_file"),
    *alias("-hft", "hf_token"),
    *alias("-s", "seed"),
    *alias("-dev", "device"),
    *alias("-t", "threads", words={"-1": 0}),
    *accepted("-tb --threads-batch", "prompts are computed on --threads too"),
    *refused("-mu --model-url|-dr --docker-repo", "give a path, a GGUF file or a Hugging Face id to --model"),
    *alias("-c --ctx-size", "max_model_len", words={"0": "auto"}),
    *alias("-b --batch-size", "max_num_batched_tokens"),
    *accepted("-ub --ubatch-size", "steps have --max-num-batched-tokens at most"),
    *alias("-np --parallel", "max_num_seqs", neutral="-1"),
    *alias("-C --cpu-range -Cr", "cpu_list"),
    *refused("--cpu-mask", "use --cpu-list, for example 0-3,8"),
    *accepted("--prio|--poll|--cpu-strict", "threads have no priorities and do not poll"),
    *accepted("-ngl --gpu-layers --n-gpu-layers", LAYERS, neutral="auto all -1 99 999"),
    *accepted("-sm --split-mode|-ts --tensor-split|-mg --main-gpu", LAYERS, neutral="none 0"),
    *accepted(
        "-fit --fit|-fitt --fit-target|-fitc --fit-ctx", "the context is cut to what the memory holds", neutral="on"
    ),
    *refused("-cmoe --cpu-moe", "use --num-experts-offload-per-rank N", takes=NOTHING),
    *refused("-ncmoe --n-cpu-moe|-ncffn --n-cpu-ffn|-ot --override-tensor", "use --num-experts-offload-per-rank N"),
    *accepted("-fa --flash-attn", KERNELS, neutral="true auto on", takes=OPTIONAL),
    *alias("-ctk --cache-type-k", "kv_cache_dtype", words={"q8_0": "int8"}),
    *accepted("-ctv --cache-type-v", "values have the type of the keys (--kv-cache-dtype)"),
    *accepted("--mlock|--swa-full|--check-tensors|--no-host", "weights are copied to where they stay", takes=NOTHING),
    *accepted(
        "--mmap|-kvo --kv-offload|--repack|--op-offload|--warmup|--perf|-e --escape",
        "the engine decides it",
        neutral="true",
        takes=SWITCH,
    ),
    *accepted("-nkvo|-nr", "the engine decides it", takes=NOTHING),
    *accepted("-lm --load-mode|-lzm --lazy-mode", "files are mapped into memory", neutral="auto mmap"),
    *alias("--rope-freq-base", "hf_overrides", key="rope_theta"),
    *refused(
        "--rope-scale|--rope-freq-scale|--yarn-orig-ctx|--yarn-ext-factor|--yarn-attn-factor",
        "use --hf-overrides, with a rope_scaling as in config.json",
    ),
    *refused("--yarn-beta-slow|--yarn-beta-fast", "use --hf-overrides, with a rope_scaling as in config.json"),
    *refused("--override-kv", "use --hf-overrides, with the keys of config.json"),
    *refused("--rpc", "one machine is used"),
    *ours("--lora --lora-scaled --lora-init-without-apply"),
    *refused(
        "--control-vector|--control-vector-scaled|--control-vector-layer-range", "control vectors are not supported"
    ),
    *ours("--mmproj"),
    *alias("-mm", "mmproj"),
    *refused("-mmu --mmproj-url", "fetch it, and give its path to --mmproj"),
    *alias("--no-mmproj", "mmproj", neutral="false", takes=NOTHING, words={"true": "none"}),
    *alias("--mmproj-auto", "mmproj", neutral="true", takes=SWITCH, words={"false": "none"}),
    *accepted("--mmproj-offload", "the encoder of images runs where the model does", neutral="true", takes=SWITCH),
    *refused(
        "--image-min-tokens|--image-max-tokens",
        "pictures have the sizes of the model's own processor: --mm-processor-kwargs changes them by keys of its "
        'preprocessor_config.json, such as {"min_pixels": 200704, "max_pixels": 1003520} of Qwen-VL',
        neutral="-1",
    ),
    *alias(
        "--spec-type",
        "speculative_config",
        key="method",
        neutral="none",
        words=dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram"),
    ),
    *alias("--draft --draft-n --draft-max", "speculative_config", key="num_speculative_tokens"),
    *alias("--spec-ngram-size-n", "speculative_config", key="prompt_lookup_max"),
    *accepted("--draft-min --draft-n-min|--spec-ngram-size-m", "drafts have --draft-max tokens"),
    *alias("-md --model-draft", "speculative_config", key="model"),
    *refused(
        "-lcs --lookup-cache-static|-lcd --lookup-cache-dynamic", "prompts and outputs are looked up, and no file is"
    ),
]

SAMPLING = [
    *ours(
        "--temperature --top-k --top-p --min-p --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty"
    ),
    *alias("--temp", "override_generation_config", key="temperature"),
    *alias("--predict --n-predict", "override_generation_config", key="max_new_tokens", neutral="-1"),
    *refused(
        "--samplers|--sampler-seq --sampling-seq", "the order is fixed: penalties, temperature, min_p, top_k, top_p"
    ),
    *refused(
        "--top-nsigma --top-n-sigma|--xtc-probability|--adaptive-target|--dynatemp-range|--dry-multiplier",
        SAMPLERS,
        neutral="-1 0",
    ),
    *refused("--mirostat", SAMPLERS, neutral="0"),
    *refused("--typical --typical-p", SAMPLERS, neutral="1"),
    *accepted(
        "--xtc-threshold|--adaptive-decay|--dynatemp-exp|--dry-base|--dry-allowed-length|--dry-penalty-last-n", SAMPLERS
    ),
    *accepted("--mirostat-lr|--mirostat-ent|--dry-sequence-breaker", SAMPLERS),
    *refused("-l --logit-bias", "requests bring their own: logit_bias"),
    *refused("--ignore-eos", "requests bring their own: ignore_eos", takes=NOTHING),
    *refused("--reverse-prompt", "requests bring their own: stop"),
    *refused("--grammar|--grammar-file|-j --json-schema|-jf --json-schema-file", CLIENT),
    *accepted("-bs --backend-sampling", "tokens are always sampled on the device", takes=NOTHING),
    *accepted("--keep", "a context that is full ends the answer", neutral="0"),
]

SERVER = [
    *ours("--host --port --api-key --verbose"),
    *alias("-a --alias", "served_model_name"),
    *accepted("--tags", "models have no tags"),
    *alias("--ssl-key-file", "ssl_keyfile"),
    *alias("--ssl-cert-file", "ssl_certfile"),
    *alias("--cors-origins", "allowed_origins"),
    *alias("--cors-methods", "allowed_methods"),
    *alias("--cors-headers", "allowed_headers"),
    *refused("--cors-credentials", "browsers send keys in headers, which --allowed-headers allows", takes=SWITCH),
    *alias("--api-prefix", "root_path"),
    *refused("--api-key-file", "give the keys to --api-key, or list them under api_key in the file of --config"),
    *alias("-to --timeout", "read_timeout"),
    *alias("--sse-ping-interval", "sse_keep_alive_interval"),
    *accepted("--threads-http", "one event loop answers all requests", neutral="-1"),
    *accepted("--reuse-port", "a port has one server", takes=NOTHING),
    *means("--cache-prompt", "enable_prefix_caching", True, off=False),
    *accepted(
        "--cache-reuse|-cram --cache-ram|-ctxcp --ctx-checkpoints --swa-checkpoints|-cms --checkpoint-min-step",
        PROMPT_CACHE,
    ),
    *accepted("-kvu --kv-unified|-cb --cont-batching|--cache-idle-slots", PROMPT_CACHE, neutral="true", takes=SWITCH),
    *accepted("-nocb", "requests always share steps", takes=NOTHING),
    *accepted("--context-shift", "a context that is full ends the answer", takes=SWITCH),
    *accepted("--metrics|--slots", "", neutral="true false", takes=SWITCH),
    *refused("--props", "settings do not change while the server runs", takes=NOTHING),
    *refused("--slot-save-path", "pages are not written to disk"),
    *refused("--path", "no files are served"),
    *refused("--media-path", "give --allowed-local-media-path; file: URLs then have whole paths"),
    *means("--ui --webui", "web", True, off=False),
    *refused(
        "--models-dir|--models-preset|--models-max",
        "name each model with --model, or in the file of --config; memory decides how many are loaded at a time",
    ),
    *refused("--tools|--mcp-servers-config|--mcp-servers-json", TOOLS),
    *refused(
        "--embedding --embeddings|--rerank --reranking",
        "models that were made for it are recognized; --runner pooling makes embeddings of others",
        takes=NOTHING,
    ),
    *refused("--pooling", "how hidden states are pooled follows from the files of the model", neutral="none"),
    *refused("--jinja", "chat templates are always Jinja", neutral="true", takes=SWITCH),
    *alias("--chat-template-file", "chat_template"),
    *alias("--chat-template-kwargs", "default_chat_template_kwargs"),
    *alias("--reasoning-format", "reasoning_parser", words={"none": "none", "auto": "auto", "deepseek": "auto"}),
    *means(
        "-rea --reasoning",
        "default_chat_template_kwargs",
        '{"enable_thinking": true}',
        off='{"enable_thinking": false}',
    ),
    *alias("--reasoning-effort", "default_chat_template_kwargs", key="reasoning_effort", neutral="default"),
    *refused("--reasoning-budget", "requests bring their own: thinking_token_budget", neutral="-1"),
    *accepted("--reasoning-preserve", "the chat template decides it", neutral="true false", takes=SWITCH),
    *accepted("--spm-infill", "the tokenizer's own form is used", takes=NOTHING),
    *accepted("-sp --special", "requests bring their own: skip_special_tokens", takes=NOTHING),
    *alias(
        "-lv --verbosity --log-verbosity",
        "log_level",
        words={"0": "error", "1": "error", "2": "warning", "3": "info", "4": "debug", "5": "debug"},
    ),
    *means("-v --log-verbose", "log_level", "debug"),
    *refused("--log-file", "logs go to stderr; redirect it"),
    *means("--log-disable", "log_level", "error"),
    *accepted(
        "--log-jsonl|--log-prefix|--log-timestamps", "the access log is JSON, other lines have a time", takes=SWITCH
    ),
    *accepted("--log-colors", "lines have no colors", neutral="auto off", takes=OPTIONAL),
]

FLAGS: tuple[ForeignFlag, ...] = (*MODEL, *SAMPLING, *SERVER)
