"""What recurrent mixers cost beside attention: a prompt through models of one size, and what compiling them takes.

    python -m benchmarks.hybrids [--tokens 2048] [--hidden 1024] [--layers 4] [--rounds 5] [--only mamba,kimi-linear]

The models have random bfloat16 weights, about as many as `--layers` Llama layers. They take turns, and the time of each
is the least that the process has computed (CPU time), which other processes on the machine hardly change. `of
attention's rate` compares products a second: tokens times weights, so that sizes cancel out.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.cli.parser import Parser
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.attention import RaggedBatch
from llmjax.models import ModelConfig, abstract_model, init_random, merge, model_config
from llmjax.models.layers.state import LastState, make_stacks
from llmjax.platforms import Platform, select_platform

ATTENTION = "attention"
PAGE = 16  # tokens
VOCAB = 1024


def configs(hidden: int, layers: int) -> dict[str, dict[str, Any]]:
    """config.json of each model.

    Args:
        hidden: a multiple of 128.
        layers: layers of models with attention; models whose layers are one sublayer have twice as many.
    """
    common = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "tie_word_embeddings": True,
        "max_position_embeddings": 1 << 17,
    }
    alone = {"num_hidden_layers": 2 * layers, "intermediate_size": 2 * hidden}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {
        ATTENTION: common | {"architectures": ["LlamaForCausalLM"]},
        "mamba": common | alone | {"architectures": ["MambaForCausalLM"]},
        "mamba2": common
        | alone
        | {"architectures": ["Mamba2ForCausalLM"], "num_heads": hidden // 32, "n_groups": 1, "state_size": 128},
        "qwen3-next": common
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "layer_types": kinds,
            "head_dim": 64,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "linear_num_key_heads": hidden // 128,
            "linear_num_value_heads": hidden // 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "kimi-linear": common
        | {
            "architectures": ["KimiLinearForCausalLM"],
            "layer_types": kinds,
            "num_key_value_heads": hidden // 64,
            "kv_lora_rank": hidden // 4,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "linear_head_dim": 128,
            "linear_num_heads": hidden // 128,
            "first_k_dense_replace": layers,
            "n_shared_experts": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    }


@dataclass
class Prompt:
    """A prompt through a model from beginning to end, compiled.

    Attributes:
        weights: numbers in matrices that each token meets.
        functions: functions of layers that the program consists of.
        compile_seconds: CPU time of tracing, lowering and compiling.
        seconds: CPU time of each run.
    """

    config: ModelConfig
    tokens: int
    platform: Platform
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        platform, tokens = self.platform, self.tokens
        graph, _ = abstract_model(self.config, dtype=platform.dtype, activation_dtype=platform.activation_dtype)
        params = init_random(self.config, jax.random.key(0), dtype=platform.dtype)
        self.weights = sum(prod(x.shape) for name, x in params.items() if len(x.shape) == 2 and "embed" not in name)
        count = -(-tokens // PAGE)
        entries = {LastState(): np.ones(count)}  # of a single state
        tables = [entries.get(span, 1 + np.arange(count)) for span in self.config.spans]
        batches = tuple(alone(tokens, table) for table in tables)
        pages = {span: 2 if span in entries else 1 + count for span in self.config.spans}
        kv = make_stacks(self.config.states, num_pages=pages, page_size=PAGE, dtype=platform.cache_dtype, as_bits=True)

        def step(params: Any, kv: Any, tokens: jax.Array, batches: Any) -> Any:
            model = merge(graph, params)
            result = model(tokens, jnp.arange(len(tokens), dtype=jnp.int32), kv, batches)
            return model.logits(result.hidden[-1:]), result.kv

        ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, tokens), jnp.int32)
        before = cpu_seconds()
        lowered = jax.jit(step, donate_argnums=1).lower(params, kv, ids, batches)
        self.functions = lowered.as_text().count("func.func private @decoder_layer")
        compiled = lowered.compile()
        self.compile_seconds = cpu_seconds() - before
        self._kv = kv

        def once() -> None:
            logits, self._kv = jax.block_until_ready(compiled(params, self._kv, ids, batches))
            assert np.isfinite(np.asarray(logits, np.float32)).all()

        self._once: Callable[[], None] = once
        once()

    def run(self) -> None:
        """Once more."""
        before = cpu_seconds()
        self._once()
        self.seconds.append(cpu_seconds() - before)

    @property
    def rate(self) -> float:
        """Tokens a second of CPU time."""
        return self.tokens / min(self.seconds)


def alone(tokens: int, pages: np.ndarray) -> RaggedBatch:
    """A single row that begins here, with its pages."""
    table = pages.astype(np.int32)
    position = np.arange(tokens)
    return RaggedBatch(
        query_start=jnp.array([0, tokens], jnp.int32),
        kv_len=jnp.array([tokens], jnp.int32),
        page_table=jnp.asarray(table[None]),
        kv_index=jnp.asarray(table[position // PAGE] * PAGE + position % PAGE),
    )


def cpu_seconds() -> float:
    """CPU time of this process in all threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(shapes: Mapping[str, Mapping[str, Any]], *, tokens: int, rounds: int) -> dict[str, Prompt]:
    """All models, in turns."""
    platform = select_platform(EngineConfig(device="cpu", dtype="bfloat16"))
    prompts = {name: Prompt(model_config(shape), tokens, platform) for name, shape in shapes.items()}
    for _ in range(rounds):
        for prompt in prompts.values():
            prompt.run()
    return prompts


def table(prompts: Mapping[str, Prompt]) -> str:
    """The figures as a table in Markdown."""
    base = prompts[ATTENTION]
    lines = [
        "| model | layers | functions | weights, M | compiling, CPU s | prompt, CPU ms | tokens a CPU second "
        "| of attention's rate |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, prompt in prompts.items():
        ratio = prompt.rate * prompt.weights / (base.rate * base.weights)
        lines.append(
            f"| {name} | {prompt.config.num_layers} | {prompt.functions} | {prompt.weights / 1e6:.1f} | "
            f"{prompt.compile_seconds:.1f} | {1000 * min(prompt.seconds):.0f} | {prompt.rate:,.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = Parser(prog="python -m benchmarks.hybrids", description="What recurrent mixers cost beside attention.")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (default: 2048)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size, a multiple of 128 (default: 1024)")
    parser.add_argument("--layers", type=int, default=4, help="of the attention model (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each model (default: 5)")
    parser.add_argument("--only", default="", help="some of the models, by name, beside attention (default: all)")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.layers, options.rounds) < 1 or options.hidden < 128 or options.hidden % 128:
        raise ConfigError("--tokens, --layers and --rounds must be at least 1, --hidden a multiple of 128")
    shapes = configs(options.hidden, options.layers)
    names = [name for name in options.only.split(",") if name] or list(shapes)
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r} is none of {', '.join(shapes)}")
    chosen = {name: shape for name, shape in shapes.items() if name in (ATTENTION, *names)}
    print(table(measure(chosen, tokens=options.tokens, rounds=options.rounds)))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"hybrids: error: {error}")
