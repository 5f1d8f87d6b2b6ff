"""Flags of candle-vLLM and Candle-vLLM-GCU: those of today, and those of the versions that took a model's type last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.config import ANY_NAME, parse_device_ids
from llmjax.errors import ConfigError
from llmjax.migration.answers import ForeignFlag, Takes
from llmjax.migration.rows import CHUNKS, accepted, alias, means, ours, refused

NOTHING = Takes.NOTHING
MCP = "--mcp-config names tool servers, with the tools that may be called"

# What older versions want after the other arguments. Here the model's files say it.
MODEL_TYPES = frozenset(
    [
        "llama",
        "llama2",
        "llama3",
        "llama4",
        "phi2",
        "phi3",
        "phi4",
        "qwen2",
        "qwen3",
        "qwen2-moe",
        "qwen3-moe",
        "qwen2moe",
        "qwen3moe",
        "qwen35",
        "qwen3-5",
        "gemma",
        "gemma2",
        "gemma3",
        "mistral",
        "yi",
        "stable-lm",
        "stablelm",
        "deep-seek",
        "deepseek",
        "deepseek2",
        "glm4",
        "qwq",
    ]
)

# The flags that name a model there, one of which every command line has, and which no other program knows.
MODEL_FLAGS = frozenset(["--m", "--model-id", "--w", "--weight-path", "--f", "--weight-file"])

PARSERS = {
    "qwen_coder": "qwen3_coder",
    "json": "llama3_json",
    "llama": "llama3_json",
    "deepseek": "deepseek_v3",
    "glm47_moe": "glm45",
    "passthrough": "none",
}

FLAGS: tuple[ForeignFlag, ...] = (
    *ours("--h --p --port --m --model-id --w --weight-path --f --weight-file --hf-token --dtype --isq --quant --cpu"),
    *ours("--d --device-ids --mem --kvcache-mem-gpu --kv-fraction --kvcache-dtype --block-size --disable-prefix-cache"),
    *ours("--max-num-seqs --max-model-len --num-experts-offload-per-rank --batch --verbose --log"),
    *refused("--hf-token-path", "give the token itself (--hf-token or HF_TOKEN), or log in with hf auth login"),
    *refused("--yarn-scaling-factor", """use --hf-overrides '{"rope_scaling": {"rope_type": "yarn", "factor": 4}}'"""),
    *ours("--multi-process --node-rank --master-addr --master-port"),
    *accepted("--multithread", "one process drives all devices (--engine-process)", takes=NOTHING),
    *accepted("--mamba-fraction", "recurrent states get what max_num_seqs sequences need"),
    *accepted("--kvcache-mem-cpu", "preempted requests are computed again, so none are swapped", neutral="0"),
    *accepted("--prefix-cache-max-tokens", "the prefix cache takes the pages that are free, and gives them back"),
    *accepted("--holding-time", "requests join the next step; none has to wait for others"),
    *means("--disable-cuda-graph", "cuda_graphs", "off"),
    *alias("--temperature", "override_generation_config", key="temperature"),
    *alias("--top-p", "override_generation_config", key="top_p"),
    *alias("--min-p", "override_generation_config", key="min_p"),
    *alias("--top-k", "override_generation_config", key="top_k"),
    *alias("--frequency-penalty", "override_generation_config", key="frequency_penalty"),
    *alias("--presence-penalty", "override_generation_config", key="presence_penalty"),
    *alias("--penalty --repeat-penalty --repetition-penalty", "override_generation_config", key="repetition_penalty"),
    *alias("--max-gen-tokens", "override_generation_config", key="max_new_tokens"),
    *alias("--repeat-last-n", "override_generation_config", key="repeat_last_n"),
    *means("--thinking", "default_chat_template_kwargs", '{"enable_thinking": true}', off='{"enable_thinking": false}'),
    *alias("--enforce-parser", "tool_call_parser", words=PARSERS),
    *refused("--mcp-command|--mcp-args", MCP),
    *ours("--mcp-config"),
    *ours("--record-conversation"),
    *accepted("--ui-server", "the chat page is at / of the same port", takes=NOTHING),
    *ours("--num-nodes"),
    *alias("--num-shards", "tensor_parallel_size"),
    *alias("--prefill-chunk-size", "max_num_batched_tokens", neutral="0", note=CHUNKS),
    *means("--fp8-kvcache", "kv_cache_dtype", "fp8"),
)  # fmt: skip


# Of its examples/chat.py, which is `llmjax chat` here.
CHAT: tuple[ForeignFlag, ...] = (
    *accepted("--stream", "", takes=NOTHING),
    *accepted("--frequency", "the answer is drawn as it comes", neutral="10"),
    *accepted("--context-cache", "prefixes are cached without being asked for", neutral="true false"),
)

NUMA_VARIABLE = "MAP_NUMA_NODE"


def mapped_nodes(given: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The NUMA nodes that ``MAP_NUMA_NODE`` names, one for each device, which candle-vLLM binds its processes to.

    Args:
        given: settings that a command line, or a file, has.
        environment: environment variables of the process.

    Returns:
        The setting ``numa`` and the line to print; nothing and an empty line where the variable is not set, there is
        one device, or ``numa`` is given.

    Raises:
        ConfigError: it is not a list of nodes, or a device has none.
    """
    text = environment.get(NUMA_VARIABLE, "").strip()
    named = given.get("device_ids")
    devices = len(parse_device_ids(named)) if named else given.get("tensor_parallel_size") or 1
    if not text or devices < 2 or given.get("numa"):
        return {}, ""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", part, re.ASCII) for part in parts):
        raise ConfigError(f"{NUMA_VARIABLE} must be NUMA nodes such as 0,0,1,1, not {text!r}")
    if len(parts) < devices:
        raise ConfigError(f"{NUMA_VARIABLE} names {len(parts)} NUMA nodes for {devices} devices: name one for each")
    nodes = [int(part) for part in parts[:devices]]
    return {"numa": nodes}, f"{NUMA_VARIABLE}: devices have NUMA nodes {','.join(map(str, nodes))} (--numa)"


def manners(argv: Sequence[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What a server that was started by a command line of candle-vLLM does as that one: it takes requests by any name
    of the model, and cuts ``max_tokens`` to what fits.

    Args:
        argv: the command line.
        given: settings that it, or a file, has.

    Returns:
        Settings beside these, and the line to print; nothing and an empty line for other command lines.
    """
    ends = argv.index("--") if "--" in argv else len(argv)
    names = (argument.partition("=")[0].replace("_", "-") for argument in argv[:ends])
    flag = next((name for name in names if name in MODEL_FLAGS), None)
    asked = {
        "served_model_name": ((ANY_NAME,), "requests may name any model (--served-model-name NAME: only that one)"),
        "cut_max_tokens": (
            True,
            "a max_tokens beyond what fits means what fits (--no-cut-max-tokens: it is an error)",
        ),
    }
    missing = {name: found for name, found in asked.items() if flag is not None and name not in given}
    notes = ", ".join(line for _, line in missing.values())
    return {name: value for name, (value, _) in missing.items()}, f"{flag}: as in candle-vLLM, {notes}" if notes else ""
