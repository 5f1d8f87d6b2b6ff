"""A smaller model that makes drafts changes when tokens come, not which tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.device.batch import StepBatch
from llmjax.engine.device.device_state import NO_TOKEN, DeviceState
from llmjax.engine.device.heads import verify
from llmjax.engine.drafts.draft_model import check_draft
from llmjax.engine.drafts.drafter import ModelDrafter
from llmjax.engine.drafts.proposal import DraftGraph, propose
from llmjax.engine.drafts.speculation import Speculation
from llmjax.errors import ConfigError
from llmjax.models.decoder import Hidden
from llmjax.models.layers.state import AllTokens, PagedKV, make_stacks
from llmjax.speculative import SpeculativeConfig
from tests.checkpoints import GOLDEN
from tests.engine.conftest import CHARACTERS
from tests.engine.drafts.test_speculation import (
    PROMPTS,
    VOCAB,
    AlwaysWorthIt,
    greedy,
    outputs_of,
    rows_of,
    softmax,
)


def drafts_by(family: str) -> dict[str, Any]:
    return {"model": str(GOLDEN / family), "num_speculative_tokens": 3}


@pytest.fixture
def drafted_of(engine_of: Callable[..., LLM]) -> Callable[..., LLM]:
    """``drafted_of(family, draft, **settings)``: an engine that always verifies what another model guesses."""

    def get(family: str, draft: str, **settings: Any) -> LLM:
        llm = engine_of(family, **settings, speculative_config=drafts_by(draft))
        llm.engine.runner.programs.wait_all()  # there are no drafts before
        llm.engine._speculation = AlwaysWorthIt(SpeculativeConfig.of(drafts_by(draft)))
        return llm

    return get


@pytest.mark.parametrize(
    ("family", "draft"),
    [("mistral", "deepseek-v2-lite"), pytest.param("llama", "qwen2", marks=pytest.mark.slow)],
)
def test_greedy_tokens_are_those_of_the_plain_model(
    drafted_of: Callable[..., LLM], plain: Callable[[str], Any], family: str, draft: str
) -> None:
    """Draft models whose layers have other spans and sizes than the target model's."""
    llm = drafted_of(family, draft, max_num_seqs=1, decode_steps=1)
    expected = [plain(family).greedy(prompt, 40) for prompt in PROMPTS]
    assert [tokens for tokens, *_ in outputs_of(llm, PROMPTS, greedy())] == expected
    assert 0 < llm.stats.accepted_tokens < llm.stats.draft_tokens


@pytest.fixture
def twins(engine_of: Callable[..., LLM], drafted_of: Callable[..., LLM]) -> tuple[LLM, LLM]:
    """A model that decodes plainly, and one whose drafts come from a copy of itself. All drafts are right as long as
    the copy has computed all tokens of the target model. There are pages for less than two full contexts."""
    plain = engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)
    settings = {"kv_cache_memory_bytes": 40 * 1536, "max_num_seqs": 2, "decode_steps": 1}
    return plain, drafted_of("llama", "llama", **settings)


@pytest.mark.slow
def test_the_draft_model_keeps_in_step(twins: tuple[LLM, LLM]) -> None:
    """Chunks of prompts, preemptions, cached prefixes, plain steps between, accepted drafts to the last."""
    plain, drafted = twins
    rng = np.random.default_rng(0)
    prompts = [*PROMPTS, *[rng.integers(3, 9, 30).tolist() for _ in range(5)]]
    expected = outputs_of(plain, prompts, greedy(24))
    preempted = drafted.stats.preemptions
    assert outputs_of(drafted, prompts, greedy(24)) == expected
    assert drafted.stats.preemptions > preempted
    outputs_of(drafted, prompts[:1], greedy(24))
    longer, hits = [prompts[0] + expected[0][0]], drafted.stats.prefix_cache_hits
    assert outputs_of(drafted, longer, greedy(8)) == outputs_of(plain, longer, greedy(8))
    assert drafted.stats.prefix_cache_hits > hits
    # All are accepted except where logits tie, and after the end of an output.
    assert drafted.stats.accepted_tokens > 0.9 * drafted.stats.draft_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {5: 6.0, 6: 5.0}, "min_tokens": 9, "stop_token_ids": [6], "ignore_eos": False},
        {"logprobs": 2, "n": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_sampled_tokens_are_those_of_plain_decoding(twins: tuple[LLM, LLM], options: dict[str, Any]) -> None:
    """The draft model samples the same tokens, because its noise and its edits of logits are the same."""
    plain, drafted = twins
    params = greedy(**{"temperature": 0.7, "seed": 11, "max_tokens": 20, **options})
    drafts, accepted = drafted.stats.draft_tokens, drafted.stats.accepted_tokens
    assert outputs_of(drafted, PROMPTS[:1], params) == outputs_of(plain, PROMPTS[:1], params)
    assert drafted.stats.accepted_tokens - accepted > 0.6 * (drafted.stats.draft_tokens - drafts) > 0


def test_memory_is_planned_for_both(twins: tuple[LLM, LLM]) -> None:
    plain, drafted = (llm.engine for llm in twins)
    ((own,), (others,)) = drafted.kv_plan.groups, plain.kv_plan.groups
    assert drafted.kv_plan.num_bytes == 40 * 1536
    assert drafted.kv_plan.num_bytes // own.num_pages == 2 * (plain.kv_plan.num_bytes // others.num_pages)
    kept = jax.tree.leaves((drafted.runner.executor.state.kv, drafted.runner.executor.state.draft_kv))
    assert sum(array.nbytes for array in kept) == drafted.kv_plan.num_bytes


# --- the distribution -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A model whose logits after a token are a row of a table."""

    rows: np.ndarray  # f32 [VOCAB, VOCAB]

    @property
    def config(self) -> Any:
        return SimpleNamespace(spans=(AllTokens(),))

    def __call__(self, tokens: jax.Array, positions: jax.Array, kv: Any, batches: Any, prompt_len: Any) -> Hidden:
        return Hidden(hidden=jnp.asarray(self.rows)[tokens], kv=kv)

    def logits(self, hidden: jax.Array, used: jax.Array | None = None, places: jax.Array | None = None) -> jax.Array:
        return hidden


def drawn(target: Table, draft: Table, params: SamplingParams, *, count: int, drafts: int) -> np.ndarray:
    """Tokens that one step samples after token 0 for ``count`` rows with different seeds, i32 [drafts + 1, count]."""
    state, batch = rows_of(params, [[0] * (1 + drafts)] * count)
    stacks = make_stacks(
        [PagedKV(kv_heads=1, head_dim=8)], num_pages={AllTokens(): 1}, page_size=32, dtype=jnp.dtype("float32")
    )
    state = replace(state, kv=stacks, draft_kv=stacks)
    batch = replace(batch, page_tables=(jnp.zeros((count, 1), jnp.int32),))
    static: Any = DraftGraph(graph=SimpleNamespace(), names=(), spans=(AllTokens(),))

    @jax.jit
    def run(state: DeviceState, batch: StepBatch) -> jax.Array:
        state, batch = propose((), state, batch, merged=lambda _: draft, drafts=drafts, draft=static)  # type: ignore[arg-type, return-value]
        hidden = jnp.asarray(target.rows)[batch.tokens]
        return verify(target, state, hidden, batch, drafts=drafts, max_logprobs=0)[1].tokens  # type: ignore[arg-type]

    return np.asarray(run(state, batch))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.slow
def test_tokens_have_the_distribution_of_the_first_model(temperature: float) -> None:
    count, rng = 8_000, np.random.default_rng(1)
    target, draft = (Table(rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)) for _ in range(2))
    tokens = drawn(target, draft, SamplingParams(temperature=temperature), count=count, drafts=2)
    before, alive = np.zeros(count, int), np.ones(count, bool)
    for place in range(3):
        assert (tokens[place, ~alive] == NO_TOKEN).all()
        for token in range(VOCAB):
            own = tokens[place, alive & (before == token)]
            if len(own) < 50:
                continue
            expected = softmax(target.rows[token].astype(np.float64) / temperature)
            assert stats.chisquare(np.bincount(own, minlength=VOCAB), expected * len(own)).pvalue > 1e-4
        before, alive = tokens[place], tokens[min(place + 1, 2)] != NO_TOKEN
    # At least as many are accepted as a coupling by common noise promises, (1 - d) / (1 + d) for total variation d.
    one, other = (softmax(model.rows[0].astype(np.float64) / temperature) for model in (target, draft))
    distance = np.abs(one - other).sum() / 2
    assert (tokens[1] != NO_TOKEN).mean() > (1 - distance) / (1 + distance) - 4 / np.sqrt(count)


def test_a_model_that_guesses_like_the_first_is_always_right() -> None:
    table = Table(np.random.default_rng(2).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32))
    assert (drawn(table, table, SamplingParams(temperature=1), count=200, drafts=3) != NO_TOKEN).all()


@pytest.mark.slow
def test_a_vocabulary_with_other_padding() -> None:
    table = np.random.default_rng(3).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
    table[:, -1] = -1e9  # no text has it
    for draft in (Table(table[:, :-1]), Table(np.pad(table, ((0, 0), (0, 4)), constant_values=9.0))):
        assert (drawn(Table(table), draft, SamplingParams(temperature=1), count=50, drafts=2) != NO_TOKEN).all()


# --- settings ---------------------------------------------------------------------------------------------------------


def test_acceptance_is_learned_from_what_was_verified() -> None:
    drafter = Speculation(SpeculativeConfig.of(drafts_by("llama"))).drafter([1, 2])
    assert isinstance(drafter, ModelDrafter) and len(drafter.drafts()) == 3
    for _ in range(12):
        drafter.verified(right=3, of=3)
    assert drafter.acceptance > 0.95
    for _ in range(12):
        drafter.verified(right=0, of=3)
    assert drafter.acceptance < 0.3


def checkpoint(folder: Path, *, vocab_size: int = 96, swap: tuple[str, str] | None = None) -> str:
    """A folder with the configuration of a golden checkpoint and a tokenizer, but no weights."""
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    (folder / "model.safetensors").symlink_to(GOLDEN / "llama" / "model.safetensors")
    for file in CHARACTERS.iterdir():
        shutil.copy(file, folder)
    if swap is not None:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab[swap[0]], vocab[swap[1]] = vocab[swap[1]], vocab[swap[0]]
        path.write_text(json.dumps(tokenizer))
    return str(folder)


def test_vocabularies_that_differ_are_refused(tmp_path: Path) -> None:
    for name, changes, text, message in (
        ("size", {"vocab_size": 80}, False, "theirs have 80 and 96 tokens"),
        ("tokens", {"swap": ("a", "b")}, True, r"token \d+ is '[ab]' in one and '[ab]' in the other"),
    ):
        (tmp_path / name).mkdir()
        draft = checkpoint(tmp_path / name, **changes)
        options = {"tokenizer": str(CHARACTERS)} if text else {"skip_tokenizer_init": True}
        with pytest.raises(ConfigError, match=f"draft model {draft} and the model {GOLDEN / 'llama'} .*{message}"):
            LLM(
                str(GOLDEN / "llama"),
                dtype="float32",
                speculative_config={"model": draft, "num_speculative_tokens": 2},
                **options,
            )


@pytest.mark.parametrize(
    ("settings", "devices", "message"),
    [
        ({}, 2, r"the draft model small runs on one device .* this engine on 2 devices \(tensor_parallel_size\)"),
        ({"multi_process": True, "tensor_parallel_size": 2}, 1, "draft model small .* on several processes"),
        ({"kv_offloading_size": 1}, 1, "kv_offloading_size: what the draft model small keeps"),
    ],
)
def test_where_a_draft_model_cannot_run_is_said_before_anything_is_loaded(
    settings: dict[str, Any], devices: int, message: str
) -> None:
    platform: Any = SimpleNamespace(devices=(None,) * devices)
    config = EngineConfig(model="large", speculative_config={"model": "small", "num_speculative_tokens": 2}, **settings)
    assert config.speculative is not None
    with pytest.raises(ConfigError, match=message):
        check_draft(config, config.speculative, platform)


def test_a_recurrent_draft_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(
            str(GOLDEN / "llama"),
            skip_tokenizer_init=True,
            dtype="float32",
            speculative_config={"model": str(GOLDEN / "mamba2"), "num_speculative_tokens": 2},
        )
