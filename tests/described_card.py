"""NVIDIA cards that are described and not there: programs are lowered for them on any machine, and compiled where
JAX's CUDA plug-in is (``pip install 'llmjax[test-cuda]'``)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import triton

from llmjax.kernels.cuda import mosaic_prefill
from llmjax.kernels.cuda.lowering import MOSAIC_ON_AMPERE
from tests.hangs import SLOW_SECONDS

# Llama-3.1-8B with two layers.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs JAX's CUDA plug-in"
)

# XLA compiles a whole step in one call, which nothing interrupts: on a busy machine it takes some minutes.
whole_step = pytest.mark.timeout(SLOW_SECONDS)


@dataclass(frozen=True)
class Card:
    name: str
    capability: str
    shared_memory: int  # bytes that a program may have
    target: str = ""  # more of what XLA wants to know

    def __str__(self) -> str:
        return self.name


A100 = Card(
    "NVIDIA A100",
    "8.0",
    163 << 10,
    "core_count: 108 fpus_per_core: 64 shared_memory_per_core: 167936 memory_bandwidth: 2039000000000"
    " l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 84942979072",
)
H100 = Card(
    "NVIDIA H100",
    "9.0",
    227 << 10,
    "core_count: 132 fpus_per_core: 128 shared_memory_per_core: 233472 memory_bandwidth: 3352320000000"
    " l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072",
)
B200 = Card(
    "NVIDIA B200",
    "10.0",
    227 << 10,
    "core_count: 148 fpus_per_core: 128 shared_memory_per_core: 233472 memory_bandwidth: 8000000000000"
    " l2_cache_size: 132644864 clock_rate_ghz: 1.965 device_memory_size: 191496192000",
)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", "8.9", 99 << 10)
RTX_5090 = Card("NVIDIA GeForce RTX 5090", "12.0", 99 << 10)

# What XLA wants to know; the versions decide which CUDA graphs it may make.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
"""


def target_of(card: Card) -> str:
    """A card that has a ``target``, as XLA describes it."""
    assert card.target, f"{card.name} is not described to XLA"
    major, minor = card.capability.split(".")
    extension = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""{TARGET}
  {card.target} shared_memory_per_block_optin: {card.shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{card.name}"
"""


@dataclass(frozen=True)
class ForCard:
    """A program as XLA would run it.

    Attributes:
        memory: what ``memory_analysis`` says.
        text: optimized HLO.
        thunks: what is started one after another: lines as ``kCommandBuffer ...``, a line each at the top, and what
            lies inside of them indented.
    """

    memory: Any
    text: str
    thunks: tuple[str, ...]

    @property
    def started(self) -> list[str]:
        """Kinds of the thunks that the host starts."""
        return [line.split()[1] for line in self.thunks if re.match(r"\d+: ", line)]

    def count(self, kind: str) -> int:
        """Thunks of a kind, wherever they lie."""
        return sum(f" {kind} " in line for line in self.thunks)


def lower_for(
    card: Card, call: Callable[..., Any], *arguments: Any, donated: int | tuple[int, ...] = ()
) -> jax.stages.Lowered:
    """The program of a call as JAX lowers it for a card.

    Args:
        arguments: arrays or ``ShapeDtypeStruct``s.
        donated: positions of donated ones.
    """
    # A function of its own: JAX would keep what it traced of `call` for another card.
    with _present(card):
        own = jax.jit(lambda *given: call(*given), donate_argnums=donated)
        return own.trace(*arguments).lower(lowering_platforms=("cuda",))


# Those that kernels of `Threads` are compiled for, by their names here.
MOSAIC_CARDS = {"A100": A100, "H100": H100, "B200": B200}
on_mosaic_cards = pytest.mark.parametrize(
    "name",
    [
        pytest.param("A100", marks=pytest.mark.skipif(not MOSAIC_ON_AMPERE, reason="needs JAX 0.12")),
        "H100",
        "B200",
    ],
)


def dumped(program: str, name: str) -> list[str]:
    """What a program prints after each ``CASE ``, with the PTX of Mosaic's kernels and what ptxas says of it.

    In a process of its own: what Mosaic calls to assemble keeps the first card that it was called for.

    Args:
        program: its text; the card's name is its argument.
        name: one of `MOSAIC_CARDS`.
    """
    environment = {**os.environ, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-c", program, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("CASE ")[1:]
    major, minor = MOSAIC_CARDS[name].capability.split(".")
    assert all(f".target sm_{major}{minor}" in text for text in parts)
    return parts


def compile_for_card(
    call: Callable[..., Any],
    *arguments: Any,
    donated: int | tuple[int, ...],
    options: Mapping[str, str],
    folder: Path,
    card: Card = H100,
) -> ForCard:
    """Compiles for a card.

    Args:
        arguments: arrays or ``ShapeDtypeStruct``s; their memory kinds count, and not where they are.
        donated: positions of donated ones.
        options: XLA's.
        folder: for XLA's files; empty.
        card: one that has a ``target``.
    """
    from jax._src import compiler
    from jaxlib import _jax

    lowered = lower_for(card, call, *arguments, donated=donated)
    described = topologies.get_topology_desc("a card", "cuda", target_config=target_of(card), topology="1x1x1")
    device = described.devices[0]
    # JAX itself drops memory kinds for devices that are described only.
    given = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[0]]),
        env_options_overrides={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": "True"},
        backend=device.client,
    )
    compiled = device.client.compile(lowered.compiler_ir(), _jax.DeviceList((device,)), given)
    # The second is written where a pass has changed something.
    dumps = [*folder.glob("*thunk_sequence.txt"), *folder.glob("*thunk_sequence_after_thunk_passes.txt")]
    return ForCard(
        memory=compiled.get_compiled_memory_stats(),
        text=compiled.get_hlo_text() if hasattr(compiled, "get_hlo_text") else compiled.hlo_modules()[0].to_string(),
        thunks=tuple(dumps[-1].read_text().splitlines()),
    )


@contextlib.contextmanager
def _present(card: Card) -> Iterator[None]:
    """While tracing and lowering: an abstract device where JAX takes one, a pretended one before (JAX 0.10)."""
    with pytest.MonkeyPatch.context() as patch:
        holder = mosaic_utils if hasattr(mosaic_utils, "_infer_arch") else mosaic_core
        patch.setattr(holder, "_infer_arch", lambda: tuple(map(int, card.capability.split("."))))
        present = SimpleNamespace(compute_capability=card.capability)
        patch.setattr(mosaic_prefill, "default_device", lambda: present)
        with _present_to_triton(card):
            yield


@contextlib.contextmanager
def _present_to_triton(card: Card) -> Iterator[None]:
    if hasattr(triton, "get_gpu_info"):
        known = {"device_kind": card.name, "num_cores": None, "platform": "gpu"}
        kind = jax.sharding.AbstractDevice
        abstract = kind(**{name: value for name, value in known.items() if name in kind.__annotations__})
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
            yield
        return
    device = SimpleNamespace(compute_capability=card.capability, shared_memory_per_block_optin=card.shared_memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda backend=None: [device])
        yield
