"""Drafts change when tokens come, not which tokens: engines with and without drafts, and the distribution itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from llmjax import LLM, SamplingParams
from llmjax.engine.core.request import EngineRequest, Sequence, SequenceTimes
from llmjax.engine.device.batch import StepBatch
from llmjax.engine.device.device_state import NO_TOKEN, NOT_FINITE, DeviceState
from llmjax.engine.device.heads import Sampled, verify
from llmjax.engine.device.rows import ENDED, RowState, row_words
from llmjax.engine.drafts.drafter import Drafter
from llmjax.engine.drafts.speculation import Speculation
from llmjax.errors import ConfigError
from llmjax.sampling.settings import request_sampling
from llmjax.sampling.state import add_output_tokens, make_sampler_state
from llmjax.speculative import SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SMALL: dict[str, Any] = {"max_num_seqs": 2, "decode_steps": 1}  # few programs
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [11, 12, 13] * 4, [40, 41, 42, 43, 44, 45, 46, 47, 48]]
Engines = tuple[LLM, LLM]


def greedy(max_tokens: int = 40, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **options})


def outputs_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason)
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for choice in output.outputs
    ]


@pytest.fixture
def drafted_of(engine_of: Callable[..., LLM]) -> Callable[..., LLM]:
    """``drafted_of(family, **settings)``: an engine that always verifies its drafts."""

    def get(family: str, **settings: Any) -> LLM:
        llm = engine_of(family, **settings, speculative_config=NGRAM)
        llm.engine.runner.programs.wait_all()  # there are no drafts before
        llm.engine._speculation = AlwaysWorthIt(SpeculativeConfig.of(NGRAM))
        return llm

    return get


@pytest.fixture
def engines(engine_of: Callable[..., LLM], drafted_of: Callable[..., LLM]) -> Engines:
    """An engine that decodes plainly, and one with drafts. They have pages for less than two full contexts, so that
    many long requests at once preempt each other."""
    plain = engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)
    return plain, drafted_of("llama", text=True, kv_cache_memory_bytes=20 * 1536, **SMALL)


class AlwaysWorthIt(Speculation):
    """Speculation that always verifies drafts, so that tests do not depend on how long steps take."""

    def _length(self, found: object, *, rows: int, most: int) -> int:
        return most


class OfAnyLength(Speculation):
    """Speculation that changes the number of drafts at each step: all there are, fewer, none."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self.lengths: list[int] = []

    def _length(self, found: object, *, rows: int, most: int) -> int:
        self.lengths.append((most, 1, 2, 0)[len(self.lengths) % 4])
        return self.lengths[-1]


@pytest.mark.parametrize("family", ["mistral", pytest.param("deepseek-v2-lite", marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_the_plain_model(
    drafted_of: Callable[..., LLM], plain: Callable[[str], Any], family: str
) -> None:
    """Covers sliding windows and latent attention; the tests below cover full attention."""
    llm = drafted_of(family, max_num_seqs=1, decode_steps=1)
    drafts, accepted = llm.stats.draft_tokens, llm.stats.accepted_tokens
    expected = [plain(family).greedy(prompt, 40) for prompt in PROMPTS]
    for count in (1, 3):
        assert [tokens for tokens, *_ in outputs_of(llm, PROMPTS[:count], greedy())] == expected[:count]
    assert llm.stats.accepted_tokens > accepted, "no draft was right, so nothing was shown"
    assert llm.stats.draft_tokens - drafts > llm.stats.accepted_tokens - accepted


def test_drafts_change_no_token_of_quantized_models(
    engine_of: Callable[..., LLM], drafted_of: Callable[..., LLM]
) -> None:
    """Activations are rounded to int8, so a sum in another order would show."""
    settings = {**SMALL, "dtype": "auto", "quantization": "int8", "batch_invariant": True}
    plain, drafted = engine_of("llama", **settings), drafted_of("llama", **settings)
    params = [greedy(logprobs=0), greedy(temperature=0.8, seed=3, logprobs=0)]
    found = []
    for llm in (plain, drafted):
        # One by one: else the time that steps take decides where prompts are cut, and so how attention is added up.
        outputs = [llm.generate([prompt], one, use_tqdm=False) for one in params for prompt in PROMPTS]
        choices = [output.outputs[0] for some in outputs for output in some]
        scores = [[entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)] for c in choices]
        found.append(([list(choice.token_ids) for choice in choices], np.array(scores)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=0, atol=1e-5)
    assert drafted.stats.accepted_tokens > 0


@pytest.mark.slow
def test_greedy_tokens_with_an_int8_cache(engine_of: Callable[..., LLM], drafted_of: Callable[..., LLM]) -> None:
    settings = {**SMALL, "kv_cache_dtype": "int8", "kv_cache_memory_bytes": 2**19}
    plain, drafted = engine_of("llama", **settings), drafted_of("llama", **{**settings, "max_num_seqs": 1})
    assert outputs_of(drafted, PROMPTS, greedy()) == outputs_of(plain, PROMPTS, greedy())
    assert drafted.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 0, "frequency_penalty": 0.2},
        {"logit_bias": {5: 6.0, 6: 5.0}, "min_tokens": 9, "stop_token_ids": [6], "ignore_eos": False},
        {"temperature": 0, "min_tokens": 5, "stop_token_ids": [7, 8]},
        {"allowed_token_ids": [5, 6, 7]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"n": 3},
    ],
    ids=lambda options: " ".join(options) or "temperature",
)
def test_sampled_tokens_are_those_of_plain_decoding(engines: Engines, options: dict[str, Any]) -> None:
    """Sampled tokens with a seed are the same too: noise depends on seed, position and token."""
    plain, drafted = engines
    params = greedy(**{"temperature": 0.7, "seed": 11, "max_tokens": 20, **options})
    prompt = list(range(3, 47))  # most tokens stand in it, so there is often something to guess
    before = drafted.stats.draft_tokens
    assert outputs_of(drafted, [prompt], params) == outputs_of(plain, [prompt], params)
    assert drafted.stats.draft_tokens > before
    if "logprobs" in options:
        prompt: Any = [{"prompt_token_ids": PROMPTS[0]}]
        ((found,), (expected,)) = (llm.generate(prompt, params, use_tqdm=False)[0].outputs for llm in (drafted, plain))
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token].rank == other[token].rank
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.4}], ids=str)
def test_tokens_do_not_follow_from_the_number_of_drafts(engines: Engines, options: dict[str, Any]) -> None:
    plain, drafted = engines
    speculation = drafted.engine._speculation = OfAnyLength(SpeculativeConfig.of(NGRAM))
    params = greedy(**{"max_tokens": 30, **options})
    assert outputs_of(drafted, PROMPTS, params) == outputs_of(plain, PROMPTS, params)
    assert set(speculation.lengths) == {0, 1, 2, 3}


def test_bad_words_of_two_tokens_hold_behind_drafts(engines: Engines) -> None:
    plain, drafted = engines
    text = plain.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    assert plain.tokenizer is not None
    words = [plain.tokenizer.decode(text[at : at + 2]) for at in (2, 5)]
    params = greedy(bad_words=words)
    assert outputs_of(drafted, PROMPTS[:1], params) == outputs_of(plain, PROMPTS[:1], params)


def test_stop_strings_end_within_accepted_tokens(engines: Engines) -> None:
    plain, drafted = engines
    prompt: Any = [{"prompt_token_ids": PROMPTS[0]}]
    text = plain.generate(prompt, greedy(), use_tqdm=False)[0].outputs[0].text
    stop = text[17:20]
    for include in (False, True):
        params = greedy(stop=[stop], include_stop_str_in_output=include)
        found, expected = (llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for llm in (drafted, plain))
        assert (found.text, found.token_ids, found.stop_reason) == (
            expected.text,
            expected.token_ids,
            expected.stop_reason,
        )
        assert found.finish_reason == "stop"


def test_chunked_prompts_preemption_and_cached_prefixes_beside_drafts(engines: Engines) -> None:
    plain, drafted = engines
    rng = np.random.default_rng(0)
    prompts = [*PROMPTS, *[rng.integers(3, 9, 30).tolist() for _ in range(5)]]
    before, preempted = drafted.stats.accepted_tokens, drafted.stats.preemptions
    expected = outputs_of(plain, prompts, greedy(24))
    for _ in range(2):
        assert outputs_of(drafted, prompts, greedy(24)) == expected
    assert drafted.stats.accepted_tokens > before
    assert drafted.stats.preemptions > preempted
    # What was generated is found again, and nothing that was rejected is.
    outputs_of(drafted, prompts[:2], greedy(24))
    longer = [prompt + tokens for prompt, (tokens, *_) in zip(prompts[:2], expected, strict=False)]
    hits = drafted.stats.prefix_cache_hits
    assert outputs_of(drafted, longer, greedy(8)) == outputs_of(plain, longer, greedy(8))
    assert drafted.stats.prefix_cache_hits > hits


def test_an_aborted_request_leaves_the_others_alone(engines: Engines) -> None:
    plain, drafted = engines
    (expected, *_) = outputs_of(plain, PROMPTS[:1], greedy())
    engine = drafted.engine
    for number, prompt in enumerate((PROMPTS[1], PROMPTS[0])):
        engine.add(
            EngineRequest(
                request_id=10**6 + number,
                prompt_token_ids=prompt,
                params=greedy(),
                max_tokens=40,
                stop_token_ids=frozenset(),
            )
        )
    tokens: list[int] = []
    aborted = False
    while not engine.idle:
        found = engine.step()
        tokens += [token for output in found if output.request_id == 10**6 + 1 for token in output.new_token_ids]
        if tokens and not aborted:
            engine.abort(10**6)
            aborted = True
    assert tokens == expected[0]


def test_grammars_are_decoded_plainly(engines: Engines) -> None:
    from llmjax.sampling.structured import StructuredOutputsParams

    plain, drafted = engines
    params = greedy(20, structured_outputs=StructuredOutputsParams(regex="(ab)+c"))
    before = drafted.stats.draft_tokens
    assert outputs_of(drafted, PROMPTS[:1], params) == outputs_of(plain, PROMPTS[:1], params)
    assert drafted.stats.draft_tokens == before


def test_more_rows_than_allowed_are_decoded_plainly(engines: Engines) -> None:
    _, drafted = engines
    drafted.engine._speculation = AlwaysWorthIt(SpeculativeConfig.of(NGRAM | {"disable_by_batch_size": 1}))
    before = drafted.stats.draft_tokens
    outputs_of(drafted, [PROMPTS[0], PROMPTS[0]], greedy(20))
    assert drafted.stats.draft_tokens == before
    outputs_of(drafted, [PROMPTS[0]], greedy(20))
    assert drafted.stats.draft_tokens > before


def test_recurrent_models_are_refused() -> None:
    from tests.checkpoints import GOLDEN

    with pytest.raises(ConfigError, match="speculative_config: the model has recurrent layers"):
        LLM(str(GOLDEN / "mamba2"), skip_tokenizer_init=True, dtype="float32", speculative_config=NGRAM)


# --- the head alone ---------------------------------------------------------------------------------------------------

VOCAB = 6


def sequence_of(
    tokens: list[int], params: SamplingParams, *, stops: frozenset[int] = frozenset(), drafter: Drafter | None = None
) -> Sequence:
    request = EngineRequest(
        request_id=0, prompt_token_ids=tokens[:1], params=params, max_tokens=50, stop_token_ids=stops
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=0, seed=0, tokens=tokens, times=times, drafter=drafter)


def rows_of(
    params: SamplingParams, fed: list[list[int]], *, stops: frozenset[int] = frozenset(), output: tuple[int, ...] = ()
) -> tuple[DeviceState, StepBatch]:
    """A slot for each row, with a seed of its own, as a step with drafts finds them: 10 tokens stand before ``fed``."""
    count = len(fed)
    sampling = request_sampling(params, vocab_size=VOCAB, seed=0)
    sequence = sequence_of([0], params, stops=stops)
    words = [row_words(sequence, sampling.with_seed(seed)) for seed in range(count)]
    rows = RowState(
        last_token=jnp.full(count, -7, jnp.int32),
        length=jnp.full(count, 10, jnp.int32),
        words=jnp.asarray(np.stack(words)),
        page_tables=jnp.zeros((1, count, 1), jnp.int32),
    )
    sampler = make_sampler_state(num_slots=count, vocab_size=VOCAB)
    for slot in range(count if output else 0):
        sampler = add_output_tokens(sampler, jnp.int32(slot), jnp.asarray(output, jnp.int32))
    lengths = [len(tokens) for tokens in fed]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    padding = 3
    batch = StepBatch(
        tokens=jnp.asarray([*np.concatenate(fed).tolist(), *[0] * padding], jnp.int32),
        query_start=jnp.asarray(starts),
        kv_len=jnp.asarray([10 + length for length in lengths], jnp.int32),
        slot=jnp.arange(count, dtype=jnp.int32),
        steps=jnp.asarray(lengths, jnp.int32),
        prompt_len=jnp.ones(count, jnp.int32),
        second_start=jnp.zeros(count, jnp.int32),
        page_tables=(),
        targets=None,
        any_prompt_logprobs=jnp.bool_(False),
        waits=jnp.bool_(False),
        decode=False,
    )
    return DeviceState(kv=(), rows=rows, sampler=sampler), batch


def verified(state: DeviceState, batch: StepBatch, logits: np.ndarray, *, drafts: int) -> tuple[DeviceState, Sampled]:
    """``verify`` where hidden states are the logits."""
    model: Any = SimpleNamespace(logits=lambda hidden, used, places: hidden)
    hidden = jnp.zeros((len(batch.tokens), VOCAB), jnp.float32).at[: len(logits)].set(logits)
    run = jax.jit(lambda state, batch, hidden: verify(model, state, hidden, batch, drafts=drafts, max_logprobs=0))
    state, sampled = run(state, batch, hidden)
    return state, sampled


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    found: np.ndarray = weights / weights.sum()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.slow
def test_tokens_have_the_distribution_of_the_model(temperature: float) -> None:
    """Compares tokens after the known one, and after a draft that was right, with the exact probabilities."""
    count, rng = 5_000, np.random.default_rng(1)
    logits = rng.normal(0, 1.5, (3, VOCAB)).astype(np.float32)
    draft = logits[:2].argmax(axis=1).tolist()  # else few rows would come to the last place
    state, batch = rows_of(SamplingParams(temperature=temperature), [[0, *draft]] * count)
    _, sampled = verified(state, batch, np.tile(logits, (count, 1)), drafts=2)
    tokens = np.asarray(sampled.tokens)  # [3, rows]
    alive = np.ones(count, bool)
    for place, right in enumerate([*draft, None]):
        expected = softmax(logits[place].astype(np.float64) / temperature)
        found = np.bincount(tokens[place, alive], minlength=VOCAB)
        assert stats.chisquare(found, expected * alive.sum()).pvalue > 1e-3
        assert (tokens[place, ~alive] == NO_TOKEN).all()
        if right is not None:
            # A draft is accepted with its probability; what comes in its place is distributed as without it.
            share = (tokens[place, alive] == right).mean()
            assert share == pytest.approx(expected[right], abs=4 * np.sqrt(expected[right] / alive.sum()))
            rejected = np.delete(found, right)
            rest = np.delete(expected, right)
            assert stats.chisquare(rejected, rest / rest.sum() * rejected.sum()).pvalue > 1e-3
            alive &= tokens[place] == right
    assert 50 < alive.sum() < count


def test_the_state_is_that_behind_the_last_token_kept() -> None:
    fed = [[0, 1, 2], [0, 3, 2], [0], [0, 1, 2]]
    likely = [1, 2, 3, 1, 2, 3, 4, 1, 2, 5]  # by token of the batch
    logits = np.eye(VOCAB, dtype=np.float32)[likely] * 9
    state, batch = rows_of(greedy(presence_penalty=0.1), fed, stops=frozenset({2}))
    state, sampled = verified(state, batch, logits, drafts=2)
    # All right but for what ends; a wrong draft; no drafts; a stop id that would have been the next draft.
    none = NO_TOKEN
    assert np.asarray(sampled.tokens).T.tolist() == [[1, 2, none], [1, none, none], [4, none, none], [1, 2, none]]
    assert state.rows.length.tolist() == [12, 11, 11, 12]
    assert state.rows.last_token.tolist() == [ENDED, 1, 4, ENDED]
    counted = np.zeros((4, VOCAB), int)
    counted[[0, 0, 1, 2, 3, 3], [1, 2, 1, 4, 1, 2]] = 1
    assert np.asarray(state.sampler.output_count).tolist() == counted.tolist()


def test_penalties_see_the_drafts_before_them() -> None:
    """The logits of a place are those that plain decoding would penalize, with every token before it counted."""
    logits = np.tile(np.asarray([0.0, 1.0, 0.9, 0.2, 0.1, 0.0], np.float32), (4, 1))
    params = greedy(frequency_penalty=0.5, presence_penalty=0.3)
    state, batch = rows_of(params, [[1, 2, 1, 3]], output=(1,))
    _, sampled = verified(state, batch, logits, drafts=3)
    history, expected = [1], []
    for draft in (2, 1, 3, None):
        penalized = [x - 0.5 * history.count(i) - 0.3 * (i in history) for i, x in enumerate(logits[0])]
        token = int(np.argmax(penalized))
        expected.append(token)
        if token != draft:
            break
        history.append(token)
    assert len(expected) > 1
    found = np.asarray(sampled.tokens)[:, 0].tolist()
    assert found == expected + [NO_TOKEN] * (4 - len(expected))


def test_what_is_not_finite_ends_the_row_there() -> None:
    logits = np.eye(VOCAB, dtype=np.float32)[[1, 2, 3]]
    logits[1, 0] = np.nan
    state, batch = rows_of(greedy(), [[0, 1, 2]])
    state, sampled = verified(state, batch, logits, drafts=2)
    assert np.asarray(sampled.tokens)[:, 0].tolist() == [1, NOT_FINITE, NO_TOKEN]
    assert state.rows.last_token.tolist() == [ENDED]


def test_a_row_that_has_ended_gives_nothing() -> None:
    logits = np.eye(VOCAB, dtype=np.float32)[[1, 2, 3]]
    state, batch = rows_of(greedy(), [[ENDED, 1, 2]])
    state, sampled = verified(state, batch, logits, drafts=2)
    assert (np.asarray(sampled.tokens) == NO_TOKEN).all()
    assert (state.rows.length.tolist(), state.rows.last_token.tolist()) == ([10], [-7])


# --- whether it pays --------------------------------------------------------------------------------------------------


def costs(speculation: Speculation, seconds: dict[int, float], *, times: int = 8) -> None:
    """Sets how long steps of one row take, by their number of drafts."""
    for drafts, its in seconds.items():
        for _ in range(times):
            speculation.record(rows=1, seconds=its, drafts=drafts)


def guesses(share: float, *, config: dict[str, Any] | None = None) -> tuple[Speculation, Sequence]:
    """Drafts of eight tokens, each right with probability ``share`` if all before it are."""
    speculation = Speculation(SpeculativeConfig.of(config or NGRAM | {"num_speculative_tokens": 8}))
    drafter: Any = SimpleNamespace(acceptance=share, drafts=lambda: tuple(range(8)))
    return speculation, sequence_of([1], greedy(), drafter=drafter)


def test_every_number_of_drafts_is_measured_first() -> None:
    speculation, sequence = guesses(0.9)
    for drafts in (8, 4, 2):
        for _ in range(2):  # the first one may have read its program from disk
            assert len(speculation.drafts([sequence], most=8)[sequence]) == drafts
            speculation.record(rows=1, seconds=0.01, drafts=drafts)
    for _ in range(5):
        assert speculation.drafts([sequence], most=8) == {}
        speculation.record(rows=1, seconds=0.01, drafts=0)
    assert speculation.drafts([sequence], most=8)


@pytest.mark.parametrize(("share", "expected"), [(0.97, 8), (0.6, 2), (0.75, 4), (0.1, 0)])
def test_there_are_as_many_drafts_as_bring_most_tokens_a_second(share: float, expected: int) -> None:
    """A step costs that of a plain one, and 0.11 of it for each draft: (1 + s + s^2 + ...) / (1 + 0.11 d)."""
    speculation, sequence = guesses(share)
    costs(speculation, {0: 0.0100, 2: 0.0122, 4: 0.0144, 8: 0.0188})
    brought = {d: sum(share**i for i in range(d + 1)) / (1 + 0.11 * d) for d in (0, 2, 4, 8)}
    assert max(brought, key=lambda d: brought[d]) == expected
    found = speculation.drafts([sequence], most=8)
    assert len(found.get(sequence, ())) == expected
    assert len(speculation.drafts([sequence], most=2).get(sequence, ())) == min(expected, 2)  # no larger program yet


def test_what_does_not_pay_is_tried_again_ever_more_rarely() -> None:
    speculation, sequence = guesses(0.1)
    costs(speculation, {0: 0.0100, 2: 0.0122, 4: 0.0144, 8: 0.0188})
    tried = [len(speculation.drafts([sequence], most=8).get(sequence, ())) for _ in range(5000)]
    assert sorted(set(tried)) == [0, 2, 4, 8]
    first, later = tried[:1000], tried[-1000:]
    assert 3 <= sum(map(bool, first)) <= 15
    assert sum(map(bool, later)) <= 3
    # Nothing to lose: then even few right ones are worth it.
    costs(speculation, {8: 0.0101, 4: 0.0101, 2: 0.0101})
    assert speculation.drafts([sequence], most=8)


def test_plain_steps_are_measured_again_too() -> None:
    speculation, sequence = guesses(0.97)
    costs(speculation, {0: 0.0100, 2: 0.0122, 4: 0.0144, 8: 0.0188})
    tried = [len(speculation.drafts([sequence], most=8).get(sequence, ())) for _ in range(500)]
    assert tried.count(8) > 480
    assert tried.count(0) >= 1


def test_plainly_decoded_text_shows_how_good_guesses_are() -> None:
    config = SpeculativeConfig.of(NGRAM)
    tokens = [1, 2, 3, 4, 5, 6, 7] * 2
    drafter = Speculation(config).drafter(tokens)
    before = drafter.acceptance
    for _ in range(10):
        assert drafter.drafts()
        tokens.extend([tokens[-7], tokens[-6]])
    _ = drafter.drafts()
    assert drafter.acceptance > max(before, 0.9)
