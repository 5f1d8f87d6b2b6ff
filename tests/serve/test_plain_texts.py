"""Texts without special tokens: behind the model's prompts, in its case, and no longer than is read."""

from __future__ import annotations

import pytest

from llmjax.engine.info import PoolerInfo
from llmjax.errors import PromptTooLong
from llmjax.pooling_params import PoolingParams
from llmjax.serve.plain_texts import plain_ids
from llmjax.tokenizer import Tokenizer, load_tokenizer
from tests.pooled_models import write_with_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """[CLS] (1) stands before a text, [SEP] (2) behind it; w17 is token 17."""
    return load_tokenizer(write_with_tokenizer("bert", tmp_path_factory.mktemp("models"), ends=True))


def ids(
    tokenizer: Tokenizer, text: str, *, default: str | None = None, lowercase: bool = False, **asked: object
) -> list[int] | None:
    pooler = PoolerInfo(
        kind="mean",
        task="embed",
        size=8,
        normalize=True,
        activation="sigmoid",
        labels=[],
        whole=False,
        matryoshka_dimensions=[],
        prompts={"query": "w7 ", "document": "W8 "},
        default_prompt=default,
        lowercase=lowercase,
    )
    params = PoolingParams(**asked)  # type: ignore[arg-type]
    return plain_ids(text, params, tokenizer=tokenizer, pooler=pooler, max_tokens=6)


def test_texts_stand_behind_prompts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("w3") == [1, 3, 2]
    assert ids(tokenizer, "w3") == [3]
    assert ids(tokenizer, "w3", prompt_name="query") == [7, 3]
    assert ids(tokenizer, "w3", default="query") == [7, 3]
    assert ids(tokenizer, "W3", default="query", prompt_name="document", lowercase=True) == [8, 3]
    assert ids(tokenizer, "w3", prompt_name="other") is None


def test_as_much_is_read_as_is_kept(tokenizer: Tokenizer) -> None:
    text = "w3 " * 100_000
    with pytest.raises(PromptTooLong):
        ids(tokenizer, text)
    for keep, least in ((-1, 6), (2, 2), (10**12, 6)):
        found = ids(tokenizer, text, truncate_prompt_tokens=keep)
        assert found is not None and found[:least] == [3] * least and len(found) < 1000
