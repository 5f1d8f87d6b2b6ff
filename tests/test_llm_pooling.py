"""``LLM``'s methods for models that make vectors: texts, pairs, prompts, scores, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, AsyncLLM, PoolingParams, TextPair
from llmjax.async_llm import LONG_TEXT
from llmjax.errors import InvalidRequest
from tests.checkpoints import GOLDEN
from tests.pooled_models import RERANKER, golden, pair, split_prompt, words, write_with_tokenizer


def start(name: str, folder: Path, cache: str, *, ends: bool, **settings: Any) -> LLM:
    return LLM(
        str(write_with_tokenizer(name, folder, ends=ends)),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        compilation_cache_dir=cache,
        compile_threads=1,
        **settings,
    )


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[LLM]:
    llm = start("qwen3-embedding", tmp_path_factory.mktemp("models"), compile_cache_dir, ends=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[LLM]:
    llm = start("bert-reranker", tmp_path_factory.mktemp("models"), compile_cache_dir, ends=True)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[LLM]:
    """A language model that scores pairs by two of its tokens."""
    settings = {"runner": "pooling", "hf_overrides": RERANKER}
    llm = start("qwen3-reranker", tmp_path_factory.mktemp("models"), compile_cache_dir, ends=False, **settings)
    yield llm
    llm.close()


def test_embed(embedder: LLM) -> None:
    found = golden("qwen3-embedding")
    texts = [words(found[f"{case}/tokens"]) for case in ("long", "short")]
    for case, output in zip(("long", "short"), embedder.embed(texts, use_tqdm=False), strict=True):
        assert output.outputs.hidden_size == 32 and output.finished and output.error is None
        assert output.prompt_token_ids == found[f"{case}/tokens"].tolist()
        assert np.dot(output.outputs.embedding, found[f"{case}/vector"]) >= 0.99999


def test_dimensions_are_cut_and_normalized_again(embedder: LLM) -> None:
    found = golden("qwen3-embedding")
    params = PoolingParams(dimensions=7)
    (output,) = embedder.embed(words(found["long/tokens"]), pooling_params=params, use_tqdm=False)
    head = found["long/vector"][:7]
    np.testing.assert_allclose(output.outputs.embedding, head / np.linalg.norm(head), atol=1e-4)
    with pytest.raises(InvalidRequest, match="dimensions is 33; the model's vectors have 32"):
        embedder.embed("w3", pooling_params=PoolingParams(dimensions=33), use_tqdm=False)


def test_a_prompt_stands_before_the_text_that_asks_for_it(embedder: LLM) -> None:
    prompted, plain = (
        embedder.embed(text, pooling_params=params, use_tqdm=False)[0].prompt_token_ids
        for text, params in (("w3 w4", PoolingParams(prompt_name="query")), ("w3 w4", PoolingParams()))
    )
    assert len(prompted) == 3 and prompted[1:] == plain == [3, 4]  # "Query: " is one word
    with pytest.raises(InvalidRequest, match="no prompt 'passage'; it has: document, query"):
        embedder.embed("w3", pooling_params=PoolingParams(prompt_name="passage"), use_tqdm=False)


def test_texts_without_special_tokens(embedder: LLM, reranker: LLM) -> None:
    def ids(llm: LLM, text: str, **asked: Any) -> list[int]:
        return llm._frontend.pooling.tokens(text, PoolingParams(**asked), add_special_tokens=False).token_ids

    assert reranker._frontend.pooling.tokens("w3", PoolingParams()).token_ids == [1, 3, 2]
    assert ids(reranker, "w3") == [3]
    prompted = ids(embedder, "w3", prompt_name="query")
    assert len(prompted) == 2 and prompted[1:] == [3]
    text = "w3 " * 100_000
    with pytest.raises(InvalidRequest, match="the context of"):
        ids(embedder, text)
    with pytest.raises(InvalidRequest, match="no prompt 'passage'"):
        ids(embedder, "w3", prompt_name="passage")
    for keep in (-1, 2):
        assert ids(embedder, text, truncate_prompt_tokens=keep) == [3] * (
            embedder.info.max_model_len if keep < 0 else keep
        )


@pytest.mark.parametrize(
    "asked", [{"add_special_tokens": False}, {"tokenization_kwargs": {"add_special_tokens": False}}], ids=str
)
def test_methods_leave_special_tokens_out(embedder: LLM, reranker: LLM, asked: dict[str, Any]) -> None:
    texts = ["w3 w4", {"prompt": "w5"}]
    for method in (reranker.classify, reranker.reward, reranker.encode):
        plain, ids = method(texts, use_tqdm=False, **asked), method([[3, 4], [5]], use_tqdm=False)
        assert [output.prompt_token_ids for output in plain] == [[3, 4], [5]]
        for ours, wanted in zip(plain, ids, strict=True):
            values = [getattr(o.outputs, "probs", None) or o.outputs.data for o in (ours, wanted)]
            np.testing.assert_allclose(*values, atol=1e-5)
    assert embedder.embed("w3 w4", use_tqdm=False, **asked)[0].prompt_token_ids == [3, 4]
    assert reranker.classify("w3", use_tqdm=False, tokenization_kwargs={})[0].prompt_token_ids == [1, 3, 2]


def test_pairs_without_special_tokens(embedder: LLM, reranker: LLM, judge: LLM) -> None:
    def scored(llm: LLM, *pair: str, **asked: Any) -> Any:
        return llm.score(*pair, use_tqdm=False, **{"add_special_tokens": False, **asked})[0]

    whole, plain = (scored(reranker, "w3 w4", "w5", add_special_tokens=asked) for asked in (True, False))
    assert (whole.prompt_token_ids, plain.prompt_token_ids) == ([1, 3, 4, 2, 5, 2], [3, 4, 5])
    assert abs(whole.outputs.score - plain.outputs.score) > 1e-4
    # The second text is of the second segment still.
    assert (
        reranker._frontend.pooling.tokens(
            TextPair("w3 w4", "w5"), PoolingParams(), add_special_tokens=False
        ).second_start
        == 2
    )
    assert scored(reranker, "w3 w4", "w5 w6 w7", truncate_prompt_tokens=4).prompt_token_ids == [3, 4, 5, 6]
    assert scored(judge, "[CLS] w5", " w8").prompt_token_ids == [1, 5, 8]
    assert scored(embedder, "w3", "w3").outputs.score == pytest.approx(1.0, abs=1e-5)


async def test_texts_without_special_tokens_online(reranker: LLM) -> None:
    params = PoolingParams(truncate_prompt_tokens=4)
    long = "w3 " * LONG_TEXT  # which a thread tokenizes
    engine = AsyncLLM.from_config(reranker.config)
    try:
        for i, prompt in enumerate(("w3 w4", TextPair("w3", "w4"), long)):
            stream = engine.encode(prompt, params, str(i), add_special_tokens=False)
            ids = [output.prompt_token_ids async for output in stream]
            assert ids == ([[3] * 4] if prompt is long else [[3, 4]])
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("asked", "field", "says"),
    [
        ({"tokenization_kwargs": {"padding": True}}, "tokenization_kwargs", "only add_special_tokens .* not padding"),
        ({"tokenization_kwargs": {"add_special_tokens": 0}}, "add_special_tokens", "true or false, not 0"),
        ({"add_special_tokens": None}, "add_special_tokens", "true or false, not None"),
    ],
    ids=str,
)
def test_what_a_tokenizer_cannot_be_told(reranker: LLM, asked: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        reranker.score("w3", "w4", use_tqdm=False, **asked)
    assert caught.value.field == field


def test_a_prefix_that_is_known_is_not_computed_again(embedder: LLM) -> None:
    found = golden("qwen3-embedding")
    embedder.reset_prefix_cache()
    tokens = found["long/tokens"].tolist()
    first, second = (embedder.embed({"prompt_token_ids": tokens}, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 36
    for output in (first, second):
        assert np.dot(output.outputs.embedding, found["long/vector"]) >= 0.99999
    # Vectors of tokens need all of them.
    (every,) = embedder.encode({"prompt_token_ids": tokens}, pooling_task="token_embed", use_tqdm=False)
    assert every.num_cached_tokens == 0 and every.outputs.data.shape == (40, 32)
    np.testing.assert_allclose(every.outputs.data[-1], first.outputs.embedding, atol=1e-5)


def test_pairs_are_scored_as_the_model_was_trained(reranker: LLM) -> None:
    found = golden("bert-reranker")
    pairs = [pair(found[f"{case}/tokens"], found[f"{case}/types"]) for case in ("long", "short")]
    outputs = reranker.score(*zip(*pairs, strict=True), use_tqdm=False)
    logits = np.array([found[f"{case}/vector"][0] for case in ("long", "short")])
    np.testing.assert_allclose([output.outputs.score for output in outputs], 1 / (1 + np.exp(-logits)), atol=1e-4)
    assert outputs[0].prompt_token_ids == found["long/tokens"].tolist()
    raw = reranker.encode([TextPair(*texts) for texts in pairs], PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.data[0] for output in raw], logits, atol=1e-4)
    (reward,) = reranker.reward(TextPair(*pairs[0]), use_tqdm=False)
    np.testing.assert_allclose(reward.outputs.data, logits[:1], atol=1e-4)


@pytest.mark.parametrize("case", ["long", "short"])
def test_a_language_model_scores_pairs_by_two_of_its_tokens(judge: LLM, case: str) -> None:
    found = golden("qwen3-reranker")
    template, query, document = split_prompt(found[f"{case}/tokens"])
    (output,) = judge.score(query, document, chat_template=template, use_tqdm=False)
    assert output.prompt_token_ids == found[f"{case}/tokens"].tolist()
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-found[f"{case}/vector"][0])), abs=1e-5)
    told = judge.score(query, document, chat_template=template, instruction="w90 w91", use_tqdm=False)[0]
    assert told.prompt_token_ids[:4] == [found[f"{case}/tokens"][0], 90, 91, found[f"{case}/tokens"][2]]
    assert judge.info.pooler is not None and judge.info.pooler.pair_template == "qwen3-reranker"


def test_what_is_cut_of_a_pair_s_prompt_is_the_second_text_s_end(judge: LLM) -> None:
    tokens = golden("qwen3-reranker")["long/tokens"]
    template, query, document = split_prompt(tokens)
    for limit in (39, 20, 9):
        (output,) = judge.score(query, document, chat_template=template, truncate_prompt_tokens=limit, use_tqdm=False)
        assert output.prompt_token_ids == [*tokens[: limit - 2], *tokens[-2:]]
    with pytest.raises(InvalidRequest, match="has 9 tokens without the second text, not 8"):
        judge.score(query, document, chat_template=template, truncate_prompt_tokens=8, use_tqdm=False)


def test_a_finished_prompt_stays_as_it_is(judge: LLM) -> None:
    (output,) = judge.score("[CLS] w5 w6", " w8 [SEP]", use_tqdm=False)
    assert output.prompt_token_ids == [1, 5, 6, 8, 2]


def test_instructions_that_nobody_reads_are_refused(judge: LLM, reranker: LLM, embedder: LLM) -> None:
    for llm in (reranker, embedder):
        with pytest.raises(InvalidRequest, match="instruction"):
            llm.score("w3", "w4", instruction="w5", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="its template has no instruction"):
        judge.score("w3", "w4", instruction="w5", chat_template="{{ messages[0].content }}", use_tqdm=False)


def test_one_text_is_compared_with_many(reranker: LLM) -> None:
    alone = [reranker.score("w3 w4", other, use_tqdm=False)[0].outputs.score for other in ("w5", "w6 w7")]
    together = reranker.score("w3 w4", ["w5", "w6 w7"], use_tqdm=False)
    np.testing.assert_allclose([output.outputs.score for output in together], alone, atol=1e-6)
    with pytest.raises(InvalidRequest, match="2 and 3 texts"):
        reranker.score(["w3", "w4"], ["w5", "w6", "w7"], use_tqdm=False)


def test_embeddings_are_scored_by_their_cosine(embedder: LLM) -> None:
    texts = ["w3 w4 w5", "w6 w7"]
    first, second = (output.outputs.embedding for output in embedder.embed(texts, use_tqdm=False))
    (scored,) = embedder.score(*texts, use_tqdm=False)
    assert scored.outputs.score == pytest.approx(float(np.dot(first, second)), abs=1e-5)


def test_the_longer_text_of_a_pair_is_cut(reranker: LLM) -> None:
    short, long = "w3 w4", " ".join(f"w{i}" for i in range(5, 85))
    with pytest.raises(InvalidRequest, match="the text has 85 tokens; this model takes at most 64"):
        reranker.score(short, long, use_tqdm=False)
    (output,) = reranker.score(short, long, truncate_prompt_tokens=16, use_tqdm=False)
    assert output.prompt_token_ids == [1, 3, 4, 2, *range(5, 16), 2]


def test_labels(tmp_path: Path, compile_cache_dir: str) -> None:
    found = golden("xlm-roberta-labels")
    llm = start("xlm-roberta-labels", tmp_path, compile_cache_dir, ends=False)
    (output,) = llm.classify(words(found["long/tokens"]), use_tqdm=False)
    powers = np.exp(found["long/vector"] - found["long/vector"].max())
    np.testing.assert_allclose(output.outputs.probs, powers / powers.sum(), atol=1e-4)
    assert output.outputs.num_classes == 3 and llm.info.pooler is not None
    assert llm.info.pooler.labels == ["no", "maybe", "yes"]
    with pytest.raises(InvalidRequest, match="3 labels; one that scores pairs of texts has one"):
        llm.score("w3", "w4", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="'embed': this model is made to classify texts"):
        llm.embed("w3", use_tqdm=False)
    llm.close()


def test_a_model_that_generates_makes_vectors_if_it_is_told_to(compile_cache_dir: str) -> None:
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "compilation_cache_dir": compile_cache_dir}
    folder = str(GOLDEN / "llama")
    llm = LLM(folder, task="embed", max_num_seqs=2, compile_threads=1, **settings)  # type: ignore[arg-type]
    (output,) = llm.embed([[3, 4, 5]], use_tqdm=False)
    assert abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-5
    llm.close()
