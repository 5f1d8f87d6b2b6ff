"""Devices of a plug-in, here a stand-in called gcu, give what jaxlib's CPU gives; steps for them avoid what compilers
of such devices do not take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from benchmarks.random_model import MoEShape, Shape, write_random_model
from llmjax import quantize
from llmjax.kernels.devices import take_donations
from tests.checkpoints import GOLDEN, POOLED
from tests.engine.compilers import compiler_of
from tests.engine.device.test_pooling import ENCODERS
from tests.levels import at_levels
from tests.stand_in_plugin import build, library, needs_stand_in, registered, run

pytestmark = pytest.mark.jax_api

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
BYTES = ("i1", "i8", "ui8", "f8E4M3FN", "f8E5M2")


def compare(reference: Any, found: Any) -> None:
    """Tokens are the same, log-probabilities nearly so. Where the cache has bytes, whose rounding may fall either way,
    only those of prompts are looked at."""
    first, limit = (2, 2e-2) if reference["settings"].get("kv_cache_dtype") else (0, 1e-3)
    assert first or found["tokens"] == reference["tokens"]
    for ours, theirs in list(zip(found["logprobs"], reference["logprobs"], strict=True))[first:]:
        assert first or [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], atol=limit)


@needs_stand_in
@pytest.mark.slow
def test_a_plugin_gives_what_the_cpu_gives(tmp_path: Path) -> None:
    """The model is a q4_k_m checkpoint, which is dequantized, on three devices."""
    write_random_model(tmp_path / "three", Shape(576, 512, 1, 9, 3, 515), max_position_embeddings=64)
    quantize(str(tmp_path / "three"), tmp_path / "three.gguf", scheme="q4_k_m", skip_tokenizer_init=True)
    case = {
        "model": str(tmp_path / "three.gguf"),
        "greedy": [[1, 5, 9, 2, 7, 3, 8, 4, 6, 11], [3, 2, 1]],
        "runs": [
            {"device": "cpu", "devices": 1, "settings": {"quantization": "none"}},
            {"device": "GCU", "devices": 3},
        ],
    }
    environment = registered(tmp_path, build(tmp_path))
    ((cpu, three),) = run("tests.engine.on_plugin", case, environment=environment)
    assert three["tokens"] == cpu["tokens"]
    assert (cpu["platform"], cpu["dequantized_from"]) == ("cpu", "")
    assert (three["platform"], three["dequantized_from"]) == ("gcu", "gguf")


# Each kind of layer on one device or on several: what sums over devices adds is the same for all of them.
CASES: dict[str, dict[str, Any]] = {
    "dequantized, three keys": {"model": "three.gguf", "devices": [1]},
    "gguf as stored": {"model": "three.gguf", "settings": {"quantization": "stored"}, "devices": [1, 3]},
    "experts, quantized as stored": {"model": "experts", "settings": {"quantization": "q4k"}, "devices": [3]},
    "gptq as stored": {"model": "gptq", "settings": {"quantization": "stored"}, "devices": [3]},
    "latent pages": {"model": str(GOLDEN / "deepseek-v3"), "devices": [3]},
    "windows, int8 cache": {"model": str(GOLDEN / "gemma3"), "settings": {"kv_cache_dtype": "int8"}, "devices": [3]},
    "recurrent layers": {"model": str(GOLDEN / "qwen3-next"), "devices": [4]},
    "convolutions": {"model": str(GOLDEN / "lfm2"), "devices": [1]},
    "slopes": {"model": str(GOLDEN / "bloom"), "devices": [1]},
    "drafts, fp8 cache": {
        "model": str(GOLDEN / "llama"),
        "settings": {"speculative_config": NGRAM, "kv_cache_dtype": "fp8"},
        "devices": [1],
    },
    "several steps in a dispatch": {"model": str(GOLDEN / "llama"), "settings": {"decode_steps": 4}, "devices": [3]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    experts = MoEShape(256, 256, 1, 4, 2, 515, experts=4, experts_per_token=2, size_of_head=64)
    write_random_model(folder / "experts", experts, max_position_embeddings=64)
    write_random_model(folder / "eight", Shape(256, 384, 1, 8, 8, 515), max_position_embeddings=64)
    write_random_model(folder / "three", Shape(576, 512, 1, 9, 3, 515), max_position_embeddings=64)
    quantize(str(folder / "three"), folder / "three.gguf", scheme="q4_k_m", skip_tokenizer_init=True)
    gptq: dict[str, Any] = {"scheme": "int4", "format": "gptq", "group_size": 64, "skip_tokenizer_init": True}
    quantize(str(folder / "eight"), folder / "gptq", **gptq)
    return folder


@needs_stand_in
@pytest.mark.parametrize("name", at_levels(CASES, slow=("windows, int8 cache",)))
def test_models_and_features(models: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    plain = {"quantization": "none"} if case["model"].endswith(".gguf") else {}
    runs = [{"device": "cpu", "devices": 1, "settings": plain}]
    runs += [{"device": "gcu", "devices": number} for number in case["devices"]]
    given = {**case, "model": str(models / case["model"]), "runs": runs}  # absolute paths stay as they are
    ((cpu, *others),) = run("tests.engine.on_plugin", given, environment=registered(tmp_path, build(tmp_path)))
    for found in others:
        compare(cpu, found)
        assert found["page_mentions"] and not found["page_copies"]  # what is donated is changed in place


@needs_stand_in
@pytest.mark.slow
def test_answers_in_a_form(tmp_path: Path) -> None:
    """Through the plug-in as it comes, whose client says that it is a CPU."""
    runs = [{"device": device, "devices": number} for device, number in (("cpu", 1), ("gcu", 1), ("gcu", 3))]
    environment = registered(tmp_path, library(), devices=3)
    ((cpu, *others),) = run("tests.engine.on_plugin", {"model": "structured", "runs": runs}, environment=environment)
    assert others == [cpu, cpu]


VECTORS = ("qwen3-embedding", *ENCODERS)
VECTORS_TOGETHER = [" ".join(VECTORS[i::4]) for i in range(4)]


@needs_stand_in
@pytest.mark.parametrize("names", at_levels(VECTORS_TOGETHER, slow=VECTORS_TOGETHER[:1]))
def test_vectors(names: str, tmp_path: Path) -> None:
    runs = [{"device": device, "devices": 1} for device in ("cpu", "gcu")]
    cases = [{"model": str(POOLED / name), "texts": [[1, 5, 9, 2, 7], [3, 2]], "runs": runs} for name in names.split()]
    made = run("tests.engine.on_plugin", *cases, environment=registered(tmp_path, library(), devices=1))
    for cpu, gcu in made:
        for expected, found in zip(cpu, gcu, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def operations(module: ir.Module) -> Iterator[Any]:
    """All operations of a lowered program, including those in functions and loops."""
    waiting = [module.operation]
    while waiting:
        operation = waiting.pop()
        yield operation
        waiting += [inner for region in operation.regions for block in region for inner in block.operations]


def has_fixed_length(loop: Any) -> bool:
    """Whether a ``stablehlo.while`` compares its counter with a constant."""
    (condition,) = loop.regions[0].blocks[0].operations[-1].operands
    compared = condition.owner
    if compared.name != "stablehlo.compare":
        return False
    limit = compared.operands[1].owner
    return not isinstance(limit, ir.Block) and limit.name == "stablehlo.constant"


MODELS = ("llama", "gemma3", "mixtral", "deepseek-v3", "qwen3-next", "lfm2", "minimax")


@pytest.mark.parametrize(
    ("model", "platform"),
    at_levels(
        [*((model, "gcu") for model in MODELS), ("lfm2", "cpu")],
        fast=[("llama", "gcu"), ("mixtral", "gcu"), ("lfm2", "gcu"), ("lfm2", "cpu")],
        slow=[(model, "gcu") for model in ("gemma3", "deepseek-v3", "qwen3-next", "minimax")],
    ),
)
def test_what_steps_are_lowered_to(model: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_of(model, kv_cache_dtype="int8")
    monkeypatch.setattr("llmjax.engine.programs.cache.platform_of", lambda device: platform)
    monkeypatch.setattr(mlir, "_platforms_with_donation", [*mlir._platforms_with_donation])
    take_donations(platform)
    compiler = replace(compiler, platform=replace(compiler.platform, name=platform))
    decode = next(bucket for bucket in compiler.layouts if bucket.decode)
    dynamic = scattered = called = 0
    for bucket in (decode, compiler.largest):
        for operation in operations(compiler.spec(bucket).lower("step").compiler_ir()):
            if operation.name == "stablehlo.while":
                dynamic += not has_fixed_length(operation)
            elif operation.name == "stablehlo.scatter":
                scattered += str(ir.RankedTensorType(operation.operands[0].type).element_type) in BYTES
            elif operation.name == "stablehlo.custom_call":
                called += 1
    if platform == "gcu":
        assert (dynamic, scattered, called) == (0, 0, 0)
    else:  # which shows that what is looked for would be found
        assert called or (dynamic and scattered)
