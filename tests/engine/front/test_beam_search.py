"""Beam search compared with a plain one, over the logits of a model in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from llmjax import LLM, BeamSearchParams
from llmjax.engine.front.beam_search import BeamSearch
from llmjax.errors import GenerationFailed, InvalidRequest
from llmjax.outputs import Logprob
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"
CHARACTERS = Path(__file__).parents[1] / "golden" / "characters"
VOCAB, EOS = 96, 2

Tokens = tuple[int, ...]
Logprobs = Callable[[Tokens], npt.NDArray[np.float64]]


def plain_search(
    prompt: Tokens, logprobs: Logprobs, *, width: int, max_tokens: int, penalty: float, ignore_eos: bool = False
) -> list[tuple[Tokens, float]]:
    """All tokens and log-probability of the best, by the definition: nothing is left out early."""

    def score(beam: tuple[Tokens, float]) -> float:
        return beam[1] / (len(beam[0]) - (beam[0][-1] == EOS)) ** penalty

    beams, ended = [(prompt, 0.0)], []
    for _ in range(max_tokens):
        grown = []
        for tokens, so_far in beams:
            found = logprobs(tokens)
            for token in np.argsort(-found, kind="stable")[: 2 * width].tolist():
                beam = ((*tokens, token), so_far + float(found[token]))
                (ended if token == EOS and not ignore_eos else grown).append(beam)
        beams = sorted(grown, key=score, reverse=True)[:width]
    return sorted(ended + beams, key=score, reverse=True)[:width]


@cache
def weights() -> dict[str, npt.NDArray[np.float64]]:
    found = load_file(LLAMA / "model.safetensors")
    return {name: np.asarray(array, np.float32).astype(np.float64) for name, array in found.items()}


@cache
def llama(tokens: Tokens) -> npt.NDArray[np.float64]:
    """Log-probabilities of what follows (Touvron et al. 2023), by the numbers in the model's config.json."""
    params, heads, kv_heads, size = weights(), 4, 2, 8

    def norm(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params[name]

    def rotated(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        angles = np.arange(len(tokens))[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["model.embed_tokens.weight"][list(tokens)]
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            (y @ params[f"{prefix}.self_attn.{part}_proj.weight"].T).reshape(len(tokens), -1, size) for part in "qkv"
        )
        q, k = rotated(q), np.repeat(rotated(k), heads // kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(v, heads // kv_heads, 1)).reshape(len(tokens), -1)
        x = x + mixed @ params[f"{prefix}.self_attn.o_proj.weight"].T
        y = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate = y @ params[f"{prefix}.mlp.gate_proj.weight"].T
        up = y @ params[f"{prefix}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ params[f"{prefix}.mlp.down_proj.weight"].T
    logits = norm(x[-1], "model.norm.weight") @ params["lm_head.weight"].T
    found: npt.NDArray[np.float64] = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    return found


@pytest.fixture(scope="module")
def llm(compile_cache_dir: str) -> Iterator[LLM]:
    llm = LLM(
        str(LLAMA),
        tokenizer=str(CHARACTERS),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=56 * 1536,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
    )
    yield llm
    assert llm.kv_stats().used == 0
    llm.close()


PROMPTS: list[Tokens] = [(5, 9, 33, 60, 7), (1,), (40, 41, 42, 43, 44, 45, 46, 47, 48)]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (5, 0.0), (4, 2.5), (3, -1.0)])
def test_the_best_are_those_of_a_plain_search(llm: LLM, width: int, penalty: float) -> None:
    params = BeamSearchParams(width, max_tokens=9, length_penalty=penalty)
    found = llm.beam_search([list(prompt) for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = plain_search(prompt, llama, width=width, max_tokens=9, penalty=penalty)
        assert [tuple(sequence.tokens) for sequence in output.sequences] == [tokens for tokens, _ in expected]
        assert [sequence.cum_logprob for sequence in output.sequences] == pytest.approx(
            [logprob for _, logprob in expected], abs=2e-4
        )
        for sequence in output.sequences:
            own = sequence.tokens[len(prompt) :]
            chosen = [entry[token].logprob for entry, token in zip(sequence.logprobs, own, strict=True)]
            assert sum(chosen) == pytest.approx(sequence.cum_logprob, abs=1e-6)
            ended = sequence.tokens[-1] == EOS
            assert (sequence.finish_reason, sequence.stop_reason) == (("stop", EOS) if ended else ("length", None))
            assert llm.tokenizer is not None
            assert sequence.text == llm.tokenizer.decode(sequence.tokens, skip_special_tokens=False)


def test_some_of_those_end_early(llm: LLM) -> None:
    """Checks that the test above has cases with ends."""
    params = BeamSearchParams(5, max_tokens=9, length_penalty=0.0)
    reasons = [
        s.finish_reason for output in llm.beam_search([list(p) for p in PROMPTS], params) for s in output.sequences
    ]
    assert {"stop", "length"} == set(reasons)


def test_the_end_of_a_text_is_ignored(llm: LLM) -> None:
    prompt = PROMPTS[0]
    params = BeamSearchParams(4, max_tokens=8, ignore_eos=True, length_penalty=0.5)
    (output,) = llm.beam_search({"prompt_token_ids": list(prompt)}, params)
    expected = plain_search(prompt, llama, width=4, max_tokens=8, penalty=0.5, ignore_eos=True)
    assert [tuple(sequence.tokens) for sequence in output.sequences] == [tokens for tokens, _ in expected]
    assert all(sequence.finish_reason == "length" for sequence in output.sequences)


def test_one_after_another_is_the_same(llm: LLM) -> None:
    params = BeamSearchParams(2, max_tokens=5)
    prompts = [list(prompt) for prompt in PROMPTS]
    together, alone = llm.beam_search(prompts, params), llm.beam_search(prompts, params, concurrency_limit=1)
    assert [[s.tokens for s in output.sequences] for output in together] == [
        [s.tokens for s in output.sequences] for output in alone
    ]


def test_a_text_and_the_end_of_the_context(llm: LLM) -> None:
    (output,) = llm.beam_search("Hello", BeamSearchParams(2, max_tokens=1000, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in output.sequences] == [64, 64]
    assert all("Hello" in (sequence.text or "") for sequence in output.sequences)


def test_forks_find_what_was_computed(llm: LLM) -> None:
    prompt = list(range(3, 43))
    llm.reset_prefix_cache()
    before = llm.stats.prefix_cache_hits
    llm.beam_search([prompt], BeamSearchParams(3, max_tokens=4, ignore_eos=True))
    assert llm.stats.prefix_cache_hits - before >= 3 * 3 * 36  # all but what is in the last page, after the first step


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (lambda: BeamSearchParams(0, max_tokens=4), "beam_width"),
        (lambda: BeamSearchParams(2, max_tokens=0), "max_tokens"),
        (lambda: BeamSearchParams(2, max_tokens=4, length_penalty=float("nan")), "length_penalty"),
        (lambda: BeamSearchParams(2, max_tokens=4, length_penalty=100), "length_penalty"),
        (lambda: BeamSearchParams(11, max_tokens=4), "beam_width"),
    ],
)
def test_what_cannot_be_searched(llm: LLM, params: Callable[[], BeamSearchParams], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        llm.beam_search("Hello", params())
    assert raised.value.field == field


def test_errors_are_of_their_search_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One search fails, as it does where logits are not finite."""
    finished = llm._finished

    def failing(requests, kind, *, progress):  # type: ignore[no-untyped-def]
        outputs = finished(requests, kind, progress=progress)
        for output in outputs:
            if output.prompt_token_ids[0] == 1:
                output.error = GenerationFailed("not finite")
        return outputs

    monkeypatch.setattr(llm, "_finished", failing)
    good, bad = llm.beam_search([[5, 9], [1, 9]], BeamSearchParams(2, max_tokens=3))
    assert len(good.sequences) == 2 and good.error is None
    assert bad.sequences == [] and str(bad.error) == "not finite"


@pytest.mark.parametrize("penalty", [-3.0, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(12))
def test_stopping_early_leaves_nothing_out(penalty: float, seed: int) -> None:
    """Where ends of texts are likely, a search is over long before its last step."""
    rng = np.random.default_rng(seed)
    vocab, width, max_tokens = 7, 3, 30
    known: dict[Tokens, npt.NDArray[np.float64]] = {}

    def logprobs(tokens: Tokens) -> npt.NDArray[np.float64]:
        if tokens not in known:
            logits = rng.normal(0, 2, vocab)
            logits[EOS] += 1.5
            known[tokens] = logits - np.log(np.exp(logits).sum())
        return known[tokens]

    prompt = (1, 1)
    params = BeamSearchParams(width, max_tokens=max_tokens, length_penalty=penalty)
    search = BeamSearch(list(prompt), params, max_tokens=max_tokens, eos=frozenset({EOS}))
    while not search.done:
        scores = []
        for ids in search.prompts:
            found = logprobs(tuple(ids))
            order = np.argsort(-found, kind="stable")[: params.candidates].tolist()
            scores.append({token: Logprob(float(found[token]), rank) for rank, token in enumerate(order, start=1)})
        search.take(scores)
    expected = plain_search(prompt, logprobs, width=width, max_tokens=max_tokens, penalty=penalty)
    assert [tuple(found.tokens) for found in search.sequences(None)] == [tokens for tokens, _ in expected]
    if penalty == 0.0:
        assert search.steps < max_tokens
