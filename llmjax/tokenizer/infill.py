"""Prompts for fill-in-the-middle: a prefix, a gap and a suffix, marked by the tokens with which models were trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmjax.errors import InvalidRequest
from llmjax.tokenizer.tokenizer import Tokenizer

# Tokens before the prefix, the suffix and the text to write, as in llama.cpp (src/llama-vocab.cpp). Without a third one
# the prefix comes last, and the model continues it.
SPELLINGS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# Tokens that a model may write after the gap's text instead of an end token.
ENDS = (
    "▁<EOT>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
)
# A token of its own in every vocabulary; SentencePiece puts no space before a text that follows it.
SENTINEL = "☺"


@dataclass(frozen=True)
class InfillTokens:
    """Ids of the tokens that mark a prompt with a gap.

    Attributes:
        prefix: comes before the text before the gap.
        suffix: comes before the text after the gap.
        middle: comes after both; None: the text before the gap comes last.
        ends: end what is written, in addition to the tokens that end every text.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens:
        """The tokens of a vocabulary.

        Raises:
            InvalidRequest: the vocabulary has none.
        """
        for spelling in SPELLINGS:
            ids = [tokenizer.token_to_id(text) for text in spelling if text is not None]
            if None not in ids:
                ends = (tokenizer.token_to_id(text) for text in ENDS)
                prefix, suffix, *middle = (id for id in ids if id is not None)
                return cls(
                    prefix, suffix, middle[0] if middle else None, frozenset(id for id in ends if id is not None)
                )
        raise InvalidRequest(
            "the model's vocabulary has no tokens for filling a gap (fill-in-the-middle)", field="suffix"
        )

    def prompt(
        self, tokenizer: Tokenizer, before: str, suffix_ids: Sequence[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt for which a model writes what belongs between two texts.

        Args:
            before: the first text.
            suffix_ids: ids of the second text, from `encode_suffix`.
            add_special_tokens: begin with the token that begins a text, where texts have one.
        """
        begin = tokenizer.encode("")[:1] if add_special_tokens else []
        start = begin if begin == [tokenizer.bos_token_id] else []
        prefix = [self.prefix, *tokenizer.encode(before, add_special_tokens=False)]
        suffix = [self.suffix, *suffix_ids]
        return start + (suffix + prefix if self.middle is None else [*prefix, *suffix, self.middle])


def encode_suffix(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that continues another, without the space that SentencePiece puts before a text."""
    alone = tokenizer.encode(SENTINEL, add_special_tokens=False)
    if not alone or not tokenizer.id_to_token(alone[0]).startswith("▁"):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(SENTINEL + text, add_special_tokens=False)[len(alone) :]
