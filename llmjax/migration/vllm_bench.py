"""Flags of ``vllm bench serve``, ``latency``, ``throughput`` and ``startup``, up to 0.33, and of vLLM-GCU's
benchmark_serving and benchmark_test, that are not here."""

from __future__ import annotations

from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.rows import MEDIA, accepted, means, refused

SWITCH, NOTHING, VALUES = Takes.SWITCH, Takes.NOTHING, Takes.VALUES

HUB = "data sets of the Hub are not fetched; write their prompts into a file of --dataset-name custom"
SPEED_BENCH = "SPEED-Bench is not fetched; write its prompts into a file of --dataset-name custom"
SEARCH = "a beam search has no times of single tokens"
HUB_FLAGS = [
    *refused("--hf-subset|--hf-split|--hf-name|--hf-output-len", HUB),
    *refused("--blazedit-min-distance|--blazedit-max-distance|--bfcl-categories", HUB, neutral="0 1"),
    *refused("--asr-max-audio-len-sec|--asr-min-audio-len-sec", MEDIA, neutral="inf 0"),
    *accepted("--no-stream", "", neutral="true", takes=NOTHING),
]

SERVE: tuple[ForeignFlag, ...] = (
    *HUB_FLAGS,
    *refused("--use-beam-search", SEARCH, takes=NOTHING),
    *refused(
        "--probe-request-rate",
        "run a second llmjax bench serve beside this one, with --output-len 1",
        neutral="0",
    ),
    *refused(
        "--plot-timeline|--plot-dataset-stats",
        "nothing is drawn; --save-detailed has the lengths of all requests and the times of all tokens",
        takes=NOTHING,
    ),
    *accepted("--timeline-itl-thresholds", "nothing is drawn", neutral="25,50"),
    *accepted("--skip-chat-template", "texts go as they are; --backend openai-chat has the server's", takes=NOTHING),
    *accepted("--custom-ensure-client-side-data", "", neutral="true", takes=NOTHING),
    *accepted("--enable-multimodal-chat", "pictures stand in messages", takes=NOTHING),
    *refused("--no-reranker", "use --backend openai-embeddings with --random-batch-size", takes=NOTHING),
    *refused("--speed-bench-dataset-subset|--speed-bench-output-len|--speed-bench-category", SPEED_BENCH),
    *refused("--keep-special-tokens", """use --extra-body '{"skip_special_tokens": false}'""", takes=NOTHING),
    *accepted("--strict-in-out-len", "random prompts are token ids, of the length asked for", takes=NOTHING),
    *refused("--sonnet-input-len|--sonnet-output-len|--sonnet-prefix-len", "write the prompts into a file of "
             "--dataset-name custom, or use --dataset-name prefix_repetition"),
)  # fmt: skip

# Of those that run the engine in their own process.
OFFLINE: tuple[ForeignFlag, ...] = (
    *accepted("--lora-assignment", "prompts take adapters in turn", neutral="round-robin random"),
    *HUB_FLAGS,
    *refused(
        "--backend",
        "prompts go to the engine in this process; llmjax bench serve measures servers of all kinds",
        neutral="vllm",
    ),
    *refused("--n", "give more prompts, or a larger batch", neutral="1"),
    *refused("--use-beam-search", SEARCH, takes=NOTHING),
    *means("--disable-detokenize", "skip_tokenizer_init", True),
    *accepted(
        "--async-engine", "there is one engine; llmjax bench serve has the times of single tokens", takes=NOTHING
    ),
    *accepted("--prequeue-requests", "", neutral="true", takes=NOTHING),
    *refused("--hf-max-batch-size", "the engine is llmjax"),
    *refused("--hf-enable-torch-compile", "the engine is llmjax", takes=NOTHING),
    *refused("--enable-multimodal-chat", MEDIA, takes=NOTHING),
    *refused("--dataset|--dataset-for-perf", "use --dataset-name sharegpt or custom with --dataset-path"),
    *refused("--save-output", "texts are not kept; llmjax run-batch writes them"),
    *refused("--demo|--template", "llmjax generate and llmjax chat show what a model says, with its chat template"),
    *refused(
        "--add-generation-prompt",
        "llmjax chat and llmjax serve put it there as the chat template says",
        neutral="false",
    ),
    *accepted("--random-prompt", "", neutral="true", takes=NOTHING),
    *refused("--acc", "llmjax perplexity measures a model, and lm-eval a server", takes=NOTHING),
)
