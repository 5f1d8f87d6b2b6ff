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
# Before the name of a repository, and before that of each of its files, for models that were trained with several.
REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FILE = "<|file_sep|>"
REPOSITORY_NAME, UNNAMED, WITH_GAP = "myproject", "tmp", "filename"  # where a request names none, as llama.cpp has it
SNIPPET = "\n\n--- snippet ---\n\n"  # before each file, where there are no tokens for it
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
        repository: comes before the name of a repository; None: there is no such token.
        file: comes before the name of a file, likewise.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None

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
                names = (tokenizer.token_to_id(text) for text in REPOSITORIES)
                return cls(
                    prefix,
                    suffix,
                    middle[0] if middle else None,
                    frozenset(id for id in ends if id is not None),
                    repository=next((id for id in names if id is not None), None),
                    file=tokenizer.token_to_id(FILE),
                )
        raise InvalidRequest(
            "the model's vocabulary has no tokens for filling a gap (fill-in-the-middle)", field="suffix"
        )

    def prompt(
        self,
        tokenizer: Tokenizer,
        before: str,
        suffix_ids: Sequence[int],
        *,
        add_special_tokens: bool = True,
        extra: Sequence[tuple[str | None, str]] = (),
    ) -> list[int]:
        """Token ids of a prompt for which a model writes what belongs between two texts.

        Args:
            before: the first text.
            suffix_ids: ids of the second text, from `encode_suffix`.
            add_special_tokens: begin with the token that begins a text, where texts have one.
            extra: names and texts of files that come before the one with the gap.
        """
        begin = tokenizer.encode("")[:1] if add_special_tokens else []
        start = begin if begin == [tokenizer.bos_token_id] else []
        start = start + self._files(tokenizer, extra)
        prefix = [self.prefix, *tokenizer.encode(before, add_special_tokens=False)]
        suffix = [self.suffix, *suffix_ids]
        return start + (suffix + prefix if self.middle is None else [*prefix, *suffix, self.middle])

    def _files(self, tokenizer: Tokenizer, files: Sequence[tuple[str | None, str]]) -> list[int]:
        """Ids of files before the one with the gap, as llama.cpp writes them (tools/server/server-common.cpp)."""

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        if self.file is None:
            return [id for _, text in files for id in (*ids(SNIPPET), *ids(text))]
        begun = [self.repository, *ids(f"{REPOSITORY_NAME}\n")] if files and self.repository is not None else []
        named = [id for name, text in files for id in (self.file, *ids(f"{name or UNNAMED}\n"), *ids(text))]
        return [*begun, *named, *((self.file, *ids(f"{WITH_GAP}\n")) if files else ())]


def encode_suffix(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that continues another, without the space that SentencePiece puts before a text."""
    alone = tokenizer.encode(SENTINEL, add_special_tokens=False)
    if not alone or not tokenizer.id_to_token(alone[0]).startswith("▁"):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(SENTINEL + text, add_special_tokens=False)[len(alone) :]
