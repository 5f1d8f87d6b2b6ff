"""Prompts with a gap: the texts before and behind it, between the tokens by which models were taught to fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmjax.errors import InvalidRequest
from llmjax.tokenizer.tokenizer import Tokenizer

# What stands before the two texts and before what is to be written, as llama.cpp (src/llama-vocab.cpp) knows them.
# Without a third one the text before the gap is the last, and is gone on with.
SPELLINGS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# What a model may write behind the gap's text instead of the end of a text.
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
# Stands for itself in every vocabulary: behind it SentencePiece puts no space before a text.
SENTINEL = "☺"


@dataclass(frozen=True)
class InfillTokens:
    """Ids of the tokens around a gap.

    Attributes:
        before, behind: stand before the text before the gap, and before the one behind it.
        middle: behind both; None: the text before the gap is the last.
        ends: end what is written, beside the tokens that end every text.
    """

    before: int
    behind: int
    middle: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens:
        """Those of a vocabulary.

        Raises:
            InvalidRequest: it has none.
        """
        for spelling in SPELLINGS:
            ids = [tokenizer.token_to_id(text) for text in spelling if text is not None]
            if None not in ids:
                ends = (tokenizer.token_to_id(text) for text in ENDS)
                before, behind, *middle = (id for id in ids if id is not None)
                return cls(
                    before, behind, middle[0] if middle else None, frozenset(id for id in ends if id is not None)
                )
        raise InvalidRequest("the model's vocabulary has no tokens that tell it of a gap to fill", field="suffix")

    def prompt(
        self, tokenizer: Tokenizer, before: str, behind: Sequence[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids behind which a model writes what belongs between two texts.

        Args:
            behind: ids of the second text, from `behind_gap`.
            add_special_tokens: begin with the token that begins a text, where texts have one.
        """
        begin = tokenizer.encode("")[:1] if add_special_tokens else []
        start = begin if begin == [tokenizer.bos_token_id] else []
        prefix = [self.before, *tokenizer.encode(before, add_special_tokens=False)]
        suffix = [self.behind, *behind]
        return start + (suffix + prefix if self.middle is None else [*prefix, *suffix, self.middle])


def behind_gap(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on with another: without the space that SentencePiece puts before a text."""
    alone = tokenizer.encode(SENTINEL, add_special_tokens=False)
    if not alone or not tokenizer.id_to_token(alone[0]).startswith("▁"):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(SENTINEL + text, add_special_tokens=False)[len(alone) :]
