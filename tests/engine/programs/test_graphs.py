"""The test at start of CUDA graphs, between programs that a CPU compiles; marked ones need a card."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.build import build_engine
from llmjax.engine.core.layer_states import GroupSpec
from llmjax.engine.device.device_state import NO_TOKEN
from llmjax.engine.device.heads import few_rows
from llmjax.engine.programs.cache import ProgramCache
from llmjax.engine.programs.compiler import GRAPH_TOKENS, StepCompiler
from llmjax.engine.programs.graphs import _batches, _results, _tested, difference, with_graphs
from llmjax.errors import ConfigError
from llmjax.jax_settings import use_compilation_cache
from llmjax.models.layers.state import AllTokens
from llmjax.platforms import Platform
from llmjax.sampling.sampler import SamplingBatch
from llmjax.sampling.settings import Feature
from tests.checkpoints import GOLDEN
from tests.engine.compilers import compiler_of

pytestmark = pytest.mark.jax_api

OTHER = {"xla_llvm_disable_expensive_passes": "True"}


@dataclass(frozen=True, kw_only=True)
class Altered(StepCompiler):
    """A compiler whose programs change a field of their output."""

    change: Callable[[Any], Any]
    name: str = "tokens"
    only: dict[str, str] | None = None  # with these options; None: always

    def compile(self, bucket: Any) -> Any:
        program = super().compile(bucket)
        if self.only not in (None, self.options):
            return program

        def run(*arguments: Any) -> Any:
            state, output = program(*arguments)
            return state, replace(output, **{self.name: self.change(getattr(output, self.name))})

        return run


def altered(compiler: StepCompiler, change: Callable[[Any], Any], **how: Any) -> Altered:
    return Altered(**vars(replace(compiler)), change=change, **how)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(compile_cache_dir: str) -> Iterator[None]:
    """The same programs are asked for again and again: compilers of one model share them."""
    use_compilation_cache(compile_cache_dir)
    compiled: dict[Any, Any] = {}
    one_at_a_time, compile_anew = threading.Lock(), StepCompiler.compile

    def compile(self: StepCompiler, bucket: Any) -> Any:
        sizes = self.kv_plan, self.max_num_seqs, self.max_num_batched_tokens, self.max_logprobs
        key = id(self.model), *sizes, self.decode_steps, frozenset(self.options.items()), bucket
        with one_at_a_time:
            if key not in compiled:
                compiled[key] = self.model, compile_anew(self, bucket)  # no other model gets its id
            return compiled[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCompiler, "compile", compile)
        yield


@pytest.fixture(scope="module")
def compiler() -> StepCompiler:
    return compiler_of("llama", decode_steps=3)


@pytest.mark.slow
def test_two_ways_of_compiling_bring_the_same_tokens(compiler: StepCompiler) -> None:
    assert difference(replace(compiler, options=OTHER), compiler) is None


def test_a_wrong_token_is_found(compiler: StepCompiler) -> None:
    wrong = altered(compiler, lambda tokens: tokens.at[-1, 1].add(1))
    assert difference(wrong, compiler) == "24 of 160 tokens of the test at start were wrong"  # one a dispatch


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_wrong_log_probabilities_are_found(name: str, compiler: StepCompiler) -> None:
    def change(scores: Any) -> Any:
        return scores if scores is None else replace(scores, logprob=scores.logprob - 0.5)

    reason = "log-probabilities of the test at start were off by up to 0.5"
    assert difference(altered(compiler, change, name=name), compiler) == reason


@pytest.mark.parametrize("family", ["decode", "mixed"])
def test_a_single_row_takes_every_branch_and_leaves_it_out(family: str, compiler: StepCompiler) -> None:
    alone = replace(compiler, max_num_seqs=1)
    layout = next(layout for bucket, layout in alone.layouts.items() if bucket.decode is (family == "decode"))
    rows, batches, asked = alone.make_state().rows, [], []
    for packed in _batches(alone, layout):
        rows = layout.changes(jnp.asarray(packed)).made(rows)
        batches.append(layout.batch(jnp.asarray(packed), rows))
        slot, samples = batches[-1].slot, batches[-1].steps > 0
        words = rows.word("sampling", slot)
        sampling = SamplingBatch.from_words(words, slot=slot, samples=samples, position=batches[-1].kv_len)
        asked.append(Feature(int(sampling.features[0])))
    for feature in Feature:
        assert 0 < sum(feature in each for each in asked) < len(asked), feature
    scored = [bool(batch.any_prompt_logprobs) for batch in batches]
    assert scored == [family == "mixed"] + [False] * (len(batches) - 1)


@pytest.mark.slow
def test_mixed_steps_in_which_few_rows_sample_take_every_branch_too(compiler: StepCompiler) -> None:
    """All rows, as many as `sample` has a way of their own for, and none; the few ask for each feature and for none."""
    layout = next(layout for bucket, layout in compiler.layouts.items() if not bucket.decode)
    few = few_rows(layout.bucket.rows)
    rows, counts, asked = compiler.make_state().rows, [], []
    for packed in _batches(compiler, layout):
        rows = layout.changes(jnp.asarray(packed)).made(rows)
        batch = layout.batch(jnp.asarray(packed), rows)
        samples = batch.steps > 0
        counts.append(int(samples.sum()))
        words = rows.word("sampling", batch.slot)
        sampling = SamplingBatch.from_words(words, slot=batch.slot, samples=samples, position=batch.kv_len)
        if counts[-1] == few:
            asked.append(Feature(int(sampling.features[np.flatnonzero(samples)[0]])))
    assert few == 1
    assert {0, few, layout.bucket.rows} == set(counts)
    for feature in Feature:
        assert 0 < sum(feature in each for each in asked) < len(asked), feature


def test_wrong_tokens_of_steps_in_which_few_rows_sample_are_found(compiler: StepCompiler) -> None:
    def change(tokens: jax.Array) -> jax.Array:
        return tokens + ((tokens != NO_TOKEN) & ((tokens != NO_TOKEN).sum() == 1))

    found = difference(altered(compiler, change), compiler)
    assert found is not None
    assert re.fullmatch(r"7 of \d+ tokens of the test at start were wrong", found)


def test_the_test_has_more_rows_than_few_where_it_can(compiler: StepCompiler) -> None:
    """Otherwise the branch for all rows would never be taken: of 40 rows, up to five have their own branch."""
    many = compiler_of("llama", slots=40, max_num_seqs=40)
    layout = next(layout for bucket, layout in many.layouts.items() if not bucket.decode)
    counts = {int((layout.parts(packed)["steps"] > 0).sum()) for packed in _batches(many, layout)}
    assert counts == {0, few_rows(40), few_rows(40) + 5}


def test_the_last_dispatch_ends_early(compiler: StepCompiler) -> None:
    bucket = next(b for b in compiler.layouts if b.decode and b.rows == 4)
    *before, (tokens, _) = _results(compiler.compile(bucket), compiler, bucket)
    assert (tokens[0] == 0).all()
    assert (tokens[1:] == NO_TOKEN).all()
    assert all((tokens != NO_TOKEN).all() for tokens, _ in before)


def test_a_failure_is_a_reason(compiler: StepCompiler) -> None:
    def fail(tokens: jax.Array) -> jax.Array:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no graph\nmore lines")

    assert difference(altered(compiler, fail), compiler) == ("the test at start failed: RESOURCE_EXHAUSTED: no graph")


@pytest.mark.parametrize(
    "settings", [{"max_model_len": 3}, pytest.param({"kv_cache_memory_bytes": 4 * 1536}, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_small_caches_are_enough(settings: dict[str, int], compiler: StepCompiler) -> None:
    compiler = compiler_of("llama", decode_steps=3, **settings)
    assert difference(compiler, compiler) is None


@pytest.mark.slow
def test_sliding_windows_have_tables_of_their_own(compiler: StepCompiler) -> None:
    compiler = compiler_of("gemma3", decode_steps=3)
    assert len(compiler.kv_plan.groups) == 2
    assert difference(compiler, compiler) is None


def test_a_compiler_that_does_not_say_what_steps_take(compiler: StepCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramCache, "get", lambda *_: SimpleNamespace(memory_analysis=lambda: None))
    with pytest.raises(ConfigError, match="does not say how much memory steps take; set kv_cache_memory_bytes"):
        compiler.bytes_beside_kv()


@pytest.mark.slow
def test_what_steps_take_beside_pages(compiler: StepCompiler) -> None:
    taken = compiler.bytes_beside_kv()
    sampler = 4 * 96 * 7  # slots, tokens, bytes
    assert sampler < taken < sampler + (1 << 20)
    plan = compiler.kv_plan
    pages = plan.groups[0].num_pages
    half = replace(plan, groups=(GroupSpec(AllTokens(), pages // 2),), num_bytes=plan.num_bytes // pages * (pages // 2))
    assert replace(compiler, kv_plan=half).bytes_beside_kv() == taken


@dataclass(frozen=True)
class Card(Platform):
    """The CPU, taken for a card whose options it can compile."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def card(compiler: StepCompiler, monkeypatch: pytest.MonkeyPatch) -> StepCompiler:
    monkeypatch.setattr("llmjax.engine.programs.graphs.GRAPHS", OTHER)
    monkeypatch.setattr("llmjax.engine.programs.graphs.LAUNCHES", {})
    return replace(compiler, platform=Card(**vars(compiler.platform)), decode_steps=1)


def test_graphs_that_pass_are_used(card: StepCompiler, caplog: pytest.LogCaptureFixture) -> None:
    chosen = with_graphs(card, EngineConfig(), decode_steps=2)
    assert (chosen.options, chosen.decode_steps) == (OTHER, 2)
    assert not caplog.records


def test_steps_of_long_prompts_are_no_graphs(card: StepCompiler) -> None:
    large = replace(card, max_num_batched_tokens=4 * GRAPH_TOKENS)
    chosen = with_graphs(large, EngineConfig(cuda_graphs="on"), decode_steps=2)
    assert {b.tokens for b in chosen.layouts if b.tokens > GRAPH_TOKENS} == {2 * GRAPH_TOKENS, 4 * GRAPH_TOKENS}
    for bucket in chosen.layouts:
        graph = bucket.decode or bucket.tokens <= GRAPH_TOKENS
        assert chosen.spec(bucket).options == (OTHER if graph else {})
    assert all(chosen.options_of(bucket) == OTHER for bucket in _tested(chosen))
    full = with_graphs(large, EngineConfig(cuda_graphs="full"), decode_steps=2)
    assert {tuple(full.spec(bucket).options) for bucket in full.layouts} == {tuple(OTHER)}


def test_graphs_that_fail_are_given_up_with_one_warning(card: StepCompiler, caplog: pytest.LogCaptureFixture) -> None:
    wrong = altered(card, lambda tokens: tokens + 1, only=OTHER)
    chosen = with_graphs(wrong, EngineConfig(), decode_steps=2)
    assert (chosen.options, chosen.decode_steps) == ({}, 1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "CUDA graphs are off and decoding is slower: 128 of 128 tokens of the test at start were wrong"
    )
    assert with_graphs(wrong, EngineConfig(cuda_graphs="on"), decode_steps=2).options == OTHER
    assert with_graphs(wrong, EngineConfig(cuda_graphs="off"), decode_steps=2).options == {}


def test_a_test_that_has_passed_is_not_made_again(
    card: StepCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start with the same programs does not repeat it; a test that has failed is repeated."""
    made = []

    def difference(compiler: StepCompiler, reference: StepCompiler) -> str | None:
        made.append(compiler.max_num_seqs)
        return "they differ" if len(made) == 1 else None

    monkeypatch.setattr("llmjax.engine.programs.graphs.difference", difference)
    for slots, options in ((4, {}), (4, OTHER), (4, OTHER), (2, OTHER)):
        start = replace(card, cache=ProgramCache(tmp_path), max_num_seqs=slots)
        assert with_graphs(start, EngineConfig(), decode_steps=2).options == options
    assert made == [4, 4, 2]


@pytest.mark.slow
def test_what_steps_take_is_measured_once(compiler: StepCompiler, tmp_path: Path) -> None:
    first = replace(compiler, cache=ProgramCache(tmp_path))
    taken = first.bytes_beside_kv()
    again = replace(compiler, cache=ProgramCache(tmp_path))
    steps = [path for path in tmp_path.iterdir() if path.stat().st_size > 100_000]
    assert steps
    for path in steps:
        path.unlink()
    assert again.bytes_beside_kv() == taken == compiler.bytes_beside_kv()
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 100_000


def test_other_devices_have_none(compiler: StepCompiler) -> None:
    assert with_graphs(compiler, EngineConfig(), decode_steps=2) is compiler
    with pytest.raises(ConfigError, match=r"cuda_graphs on needs an NVIDIA GPU, and the device is (cpu:0|TFRT_CPU_0)"):
        build_engine(EngineConfig(model="not loaded", cuda_graphs="on"))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_bring_the_same_tokens_on_a_card(
    name: str, cuda_device: jax.Device, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[1, 5, 9], [3], list(range(3, 30))]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1, top_k=9, repetition_penalty=1.2, seed=4, logprobs=2, max_tokens=20),
    ]

    def tokens(graphs: str) -> list[list[int]]:
        llm = LLM(
            str(GOLDEN / name),
            device="cuda",
            cuda_graphs=graphs,
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=16,
            kv_cache_memory_bytes=1 << 20,
        )
        llm.warm_up()
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.close()
        return found

    assert tokens("auto") == tokens("off")
    assert not [record for record in caplog.records if "CUDA graphs are off" in record.getMessage()]
