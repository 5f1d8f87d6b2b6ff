"""Whole models with random weights on a GPU: decode, prefill, start; and the same points by transformers."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_figures import Figure, Sizes, Work
from benchmarks.random_gguf import write_random_gguf
from benchmarks.random_model import SHAPES, MoEShape, Shape, write_random_model
from benchmarks.scaling import first_token_seconds, step_seconds
from llmjax import LLM, SamplingParams
from llmjax.errors import LLMJaxError

# Embeddings are tied here, which changes nothing of what a step reads.
MODELS = MappingProxyType(
    {
        "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256),
        "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 151936),
        "qwen3-30b-a3b": MoEShape(2048, 768, 48, 32, 4, 151936, experts=128, experts_per_token=8, size_of_head=128),
        **SHAPES,
    }
)


@dataclass(frozen=True)
class Setup:
    """What of one model is measured.

    Attributes:
        shape: a key of MODELS.
        format: bfloat16, what ``--quantization`` takes, or after ``gguf:`` the type of a file's matrices.
        graphs: what ``--cuda-graphs`` takes.
        offloaded: experts of each layer in the host's memory.
    """

    shape: str
    format: str
    graphs: str = "auto"
    offloaded: int = 0

    @property
    def stored(self) -> str:
        """The type of a GGUF file's matrices; empty: there is none."""
        return self.format.partition("gguf:")[2]

    def file(self, folder: Path) -> Path:
        """The model, in a folder of models."""
        return folder / (f"{self.shape}-{self.stored}.gguf" if self.stored else self.shape)

    def __str__(self) -> str:
        graphs = "" if self.graphs == "auto" else f", graphs {self.graphs}"
        return f"{self.shape}, {self.format}{graphs}{f', {self.offloaded} experts offloaded' if self.offloaded else ''}"


@dataclass(frozen=True)
class Reads:
    """Bytes and numbers of a model's weights, those of experts apart."""

    shape: Shape
    dense_bytes: int
    expert_bytes: int

    @classmethod
    def of(cls, llm: LLM, shape: Shape) -> Reads:
        """Sizes of the weights as they lie in memory; the embedding of an untied model is not read."""
        params = dict(llm.engine.model.params)
        if any(name.startswith("lm_head") for name in params):
            params = {name: value for name, value in params.items() if not name.startswith("model.embed_tokens")}
        experts = sum(value.nbytes for name, value in params.items() if ".experts." in name)
        return cls(shape, sum(value.nbytes for value in params.values()) - experts, experts)

    def work(self, rows: int, kv_bytes: int = 0) -> Work:
        """The least that a step of ``rows`` tokens takes; every expert is as likely as any other."""
        share = 1 - (1 - self.shape.share_of_experts) ** rows
        return Work(self.dense_bytes + share * self.expert_bytes + kv_bytes, 2 * self.shape.active_numbers * rows)


def model_figures(folder: Path, setup: Setup, sizes: Sizes, extra: dict[str, Any]) -> Iterator[Figure]:
    """Decode of one stream and of many, prefill, and a start with a warm compile cache."""
    shape = MODELS[setup.shape]
    file = setup.file(folder)
    if not setup.stored:
        write_random_model(file, shape, max_position_embeddings=1 << 20)
    elif not file.exists():
        write_random_gguf(file, shape, type_name=setup.stored)
    llm = _open(folder, setup, sizes, extra)
    try:
        llm.warm_up()
        yield from speeds(llm, str(setup), MODELS[setup.shape], sizes)
    finally:
        llm.close()
    # Nothing of the first engine may stay, in memory or compiled, but for the cache on disk.
    del llm
    gc.collect()
    jax.clear_caches()
    start = time.perf_counter()
    llm = _open(folder, setup, sizes, extra)
    try:
        llm.generate([1] * 16, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        seconds = time.perf_counter() - start - llm.info.load_seconds
        yield Figure(f"{setup}: weights loaded", "engine", llm.info.load_seconds, Work(0, 0))
        yield Figure(f"{setup}: weights loaded to first token", "engine", seconds, Work(0, 0))
    finally:
        llm.close()


def _open(folder: Path, setup: Setup, sizes: Sizes, extra: dict[str, Any]) -> LLM:
    return LLM(
        str(setup.file(folder)),
        skip_tokenizer_init=True,
        quantization=None if setup.stored or setup.format == "bfloat16" else setup.format,
        dtype="bfloat16",
        cuda_graphs=setup.graphs,
        num_experts_offload_per_rank=setup.offloaded,
        max_model_len=max(*sizes.context, *sizes.prefill) + 40,
        enable_prefix_caching=False,
        **extra,
    )


def speeds(llm: LLM, name: str, shape: Shape, sizes: Sizes) -> Iterator[Figure]:
    """Decode of one stream at each context and of many at the first one, and prefill; names begin with ``name``."""
    rng = np.random.default_rng(0)
    reads = Reads.of(llm, shape)
    kv_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2

    def outputs(streams: int, length: int, new: int) -> list[Any]:
        prompts = [rng.integers(1, shape.vocab_size, length).tolist() for _ in range(streams)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        return llm.generate(prompts, params, use_tqdm=False)

    for streams, context in [*((1, n) for n in sizes.context), *((n, sizes.context[0]) for n in sizes.streams)]:
        seconds = min(step_seconds(outputs(streams, context - 32, 32)) for _ in range(3))
        work = reads.work(streams, streams * context * kv_token)
        yield Figure(f"{name}: decode, {streams} x {context}", "engine", seconds, work, streams)
    for length in sizes.prefill:
        seconds = min(first_token_seconds(outputs(1, length, 1)[0]) for _ in range(3))
        yield Figure(f"{name}: prefill of {length}", "engine", seconds, reads.work(length), length)


def of_transformers(interpreter: str, shape_name: str, sizes: Sizes) -> list[Figure]:
    """The same points by transformers, in bfloat16.

    Raises:
        LLMJaxError: the interpreter cannot run it.
    """
    shape = MODELS[shape_name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {name: getattr(shape, name) for name in (*names, "vocab_size")} | {"tie_word_embeddings": True}
    # -P: the folder of the script has modules whose names transformers looks for.
    command = [interpreter, "-P", str(Path(__file__).with_name("gpu_transformers.py")), json.dumps(config)]
    for name, values in (("context", sizes.context), ("streams", sizes.streams), ("prefill", sizes.prefill)):
        command += [f"--{name}", *map(str, values)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LLMJaxError(f"--compare: {interpreter} ended with {done.returncode}; what it printed is above")
    numbers = shape.active_numbers
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        Figure(
            f"{shape_name}: {entry['name']}",
            "transformers",
            entry["seconds"],
            Work(2 * numbers, 2 * numbers * entry["tokens"]),
            entry["tokens"],
        )
        for entry in records
    ]
