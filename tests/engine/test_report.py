"""The table of a start, as people see it."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from llmjax.engine.info import EngineInfo
from llmjax.engine.report import startup_table

INFO = EngineInfo(
    model_name="m",
    model_path="/m",
    architecture="LlamaForCausalLM",
    num_layers=2,
    vocab_size=10,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=512,
    eos_token_ids=frozenset(),
    default_sampling_params={},
    device="cpu:0",
    platform="cpu",
    dtype="bfloat16",
    kernels="portable XLA operations",
    weight_bytes=2**20,
    offloaded_bytes=0,
    load_seconds=0.1,
    kv_bytes=2**20,
    kv_tokens=64,
    kv_dtype="bfloat16",
    kv_calibrated=False,
    page_size=16,
    longest_contexts={1: 64},
    sampler_bytes=2**10,
)


def lines(info: EngineInfo) -> list[str]:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(startup_table(info, []))
    return [line for line in capture.get().splitlines() if line[:1] == "│"]


def test_what_makes_a_cpu_slow_comes_first() -> None:
    first, second, *_ = lines(replace(INFO, slow="there was no compiler; install one"))
    assert "slow" in first and "there was no compiler; install one" in first
    assert "LlamaForCausalLM, 2 layers" in second


def test_a_cpu_that_is_as_fast_as_it_can_be_has_no_such_line() -> None:
    assert "LlamaForCausalLM, 2 layers" in lines(INFO)[0]


def test_what_is_rounded_is_said_of_quantized_weights_alone() -> None:
    assert not any("activations" in line for line in lines(INFO))
    assert any("activations" in line and "int8" in line for line in lines(replace(INFO, activations="int8")))


def test_the_sizes_of_a_step_are_shown() -> None:
    shown = lines(replace(INFO, max_num_seqs=256, max_num_batched_tokens=8192))
    assert any("one step" in line and "at most 256 sequences and 8,192 tokens" in line for line in shown)
