"""Prompts of pairs of texts."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from llmjax.engine.front.pairs import PairPrompts, TextPair
from llmjax.engine.info import PoolerInfo
from llmjax.tokenizer import ChatTemplate, Tokenizer
from llmjax.tokenizer.backend import HuggingFaceBackend
from llmjax.tokenizer.pieces import ByteLevelPieces
from llmjax.tokenizer.tokenizer import SpecialTokens

POOLER: dict[str, Any] = {
    "kind": "last",
    "task": "classify",
    "size": 1,
    "normalize": False,
    "activation": "sigmoid",
    "labels": ["LABEL_0"],
    "whole": False,
    "matryoshka_dimensions": [],
    "prompts": {},
    "default_prompt": None,
    "lowercase": False,
}
# vLLM's examples/pooling/score/template/qwen3_reranker.jinja in other words: messages by role, variables first.
TEMPLATE = (
    "<I>{{ instruction | default(messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('as usual', true), true) }}<Q>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') "
    "| first }}<D>{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)


def tokenizer(chat_template: ChatTemplate | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|im_start|>": 0, "a": 1}, unk_token="a"))
    special = SpecialTokens(all_ids=frozenset([0]))
    return Tokenizer(HuggingFaceBackend(backend), ByteLevelPieces(), special=special, chat_template=chat_template)


def prompts(template: str | None = None, **changes: Any) -> PairPrompts:
    own = None if template is None else ChatTemplate.from_text(template)
    return PairPrompts.of(tokenizer(own), PoolerInfo(**POOLER, **changes), chosen=template is not None)


@pytest.mark.parametrize("instruction", [None, "Find the author"], ids=["usual instruction", "a request's instruction"])
def test_qwen3_reranker_s_prompt(instruction: str | None) -> None:
    """The prompt is that of the model card."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    told = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    query, document = " Who?\n{{ 1 }}", "He <b>did</b>.\n"
    expected = f"{prefix}<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}{suffix}"
    assert prompts(pair_template="qwen3-reranker").text(TextPair(query, document, instruction)) == expected


def test_templates_of_vllm_s_form() -> None:
    chosen = prompts(TEMPLATE)
    assert chosen.text(TextPair("q", "d")) == "<I>as usual<Q>q<D>d"
    assert chosen.text(TextPair("q", "d", "so")) == "<I>so<Q>q<D>d"
    assert prompts(TEMPLATE, instruction="thus").text(TextPair("q", "d")) == "<I>thus<Q>q<D>d"
    # A template that the user has chosen is used whatever the texts begin with.
    assert chosen.text(TextPair("<|im_start|>q", "d")) == "<I>as usual<Q><|im_start|>q<D>d"
    assert prompts().text(TextPair("q", "d")) is None
    assert prompts().text(TextPair("q", "d", chat_template=TEMPLATE)) == "<I>as usual<Q>q<D>d"


def test_prompts_of_templates_get_the_tokenizer_s_special_tokens_unless_they_are_left_out() -> None:
    pairs = prompts("{{ messages[0].content }} {{ messages[1].content }}")
    assert isinstance(pairs.tokenizer.backend, HuggingFaceBackend)
    pipeline = pairs.tokenizer.backend.tokenizer
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    pair = TextPair("a", "a a a")
    for special, whole, cut in ((True, [0, 1, 1, 1, 1], [0, 1, 1]), (False, [1, 1, 1, 1], [1, 1])):
        assert pairs.tokens(pair, limit=None, add_special_tokens=special) == (whole, None)
        assert pairs.tokens(pair, limit=len(cut), add_special_tokens=special) == (cut, None)
