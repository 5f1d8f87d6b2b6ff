"""The one tokenizer type that the rest of llmjax sees."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llmjax.characters import whole_characters
from llmjax.errors import InvalidRequest, PromptTooLong, TokenizerError
from llmjax.host_memory import give_back
from llmjax.tokenizer.backend import LONG_TEXT, Backend
from llmjax.tokenizer.chat_template import ChatTemplate, Conversation
from llmjax.tokenizer.detokenizer import IncrementalDetokenizer, PieceTable
from llmjax.tokenizer.pieces import PieceDecoder
from llmjax.tokenizer.segments import SegmentCache, safe_cuts

# A text whose tokens would have to be longer than this on average (English has 4 or 5 characters a token) is counted
# in slices first, because encoding takes some 300 bytes of memory a token.
PLAUSIBLE_CHARS = 8
SLICE_CHARS = 2**16
# A normalizer may compose or simplify characters: three bytes of a full-width letter, or four of a mathematical one,
# become one.
NORMALIZED = 4


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens with a meaning of their own.

    Args:
        bos: id that begins a text; None: there is none. Likewise eos and pad.
        end_ids: ids that end generation.
        all_ids: ids that ``skip_special_tokens`` leaves out of text.
        texts: names that templates know (``bos_token`` …) to token text.
    """

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    end_ids: frozenset[int] = frozenset()
    all_ids: frozenset[int] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back, whatever kind of file the vocabulary came from. Thread-safe.

    Args:
        backend: vocabulary and algorithm.
        decoder: what a token's string stands for in text.
        special: special tokens.
        chat_template: the model's, or None.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: PieceDecoder,
        *,
        special: SpecialTokens,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self.special = special
        self.chat_template = chat_template
        self.vocab_size = backend.vocab_size
        self.bos_token_id = special.bos
        self.eos_token_id = special.eos
        self.pad_token_id = special.pad
        self.eos_token_ids = special.end_ids
        self.all_special_ids = special.all_ids
        self._table = PieceTable(backend.id_to_token, decoder, special.all_ids)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True, kept_for: str | None = None
    ) -> list[int]:
        """Token ids of ``text``. Lone surrogates, which no UTF-8 can hold, count as U+FFFD.

        Args:
            text: any string.
            add_special_tokens: add what the model expects around a text (BOS, EOS, CLS …).
            parse_special: control tokens spelled out in ``text`` become those tokens; otherwise they are plain text.
            kept_for: parts of a long text are kept, and found again for texts of the same; None: they are not.
        """
        text = whole_characters(text)
        if kept_for is not None and len(text) >= LONG_TEXT and parse_special and not add_special_tokens:
            return self._segments.ids(text, kept_for=kept_for)
        return self._encoded(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def _encoded(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
        if len(text) > SLICE_CHARS:
            give_back()
        return ids

    @functools.cached_property
    def _segments(self) -> SegmentCache:
        """Divides texts at the special tokens that chat templates write."""
        sources = [] if self.chat_template is None else list(self.chat_template.sources.values())
        cut_out = self.backend.cut_out()
        named = {*self.special.texts.values(), *map(self.id_to_token, self.special.end_ids)}
        wanted = [token.content for token in cut_out if token.content in named or _in_any(token.content, sources)]
        encode = functools.partial(self._encoded, add_special_tokens=False, parse_special=True)
        return SegmentCache(safe_cuts(cut_out, wanted), encode)

    def encode_texts(
        self, first: str, second: str | None = None, *, limit: int | None = None, add_special_tokens: bool = True
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of a pair of texts that a cross-encoder reads together.

        Args:
            limit: tokens that are kept, special ones included, the longer text being cut first; None: all.
            add_special_tokens: those around a text, and around and between the texts of a pair.

        Returns:
            The ids, and where the second segment begins, if the model tells segments apart.
        """
        texts = [whole_characters(text) for text in (first, second) if text is not None]
        if limit is not None:  # what lies further back cannot be within the limit
            texts = [text[: (limit + 1) * self.max_token_bytes] for text in texts]
        ids, types = self.backend.encode_texts(
            texts[0], texts[1] if len(texts) > 1 else None, limit=limit, add_special_tokens=add_special_tokens
        )
        return ids, types.index(1) if 1 in types else None

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Bytes of a text, in UTF-8, that become one token at most."""
        return max(1, self._table.longest(self.vocab_size)) * (NORMALIZED if self.backend.normalizes else 1)

    def check_length(self, text: str, *, max_tokens: int, field: str = "prompt") -> None:
        """Refuses a text that surely has more than ``max_tokens`` tokens, at a cost that ``max_tokens`` bounds.

        What passes may still have somewhat more: it can be encoded and counted.

        Args:
            field: the request field that the text came in.

        Raises:
            PromptTooLong: names the field and how many tokens there are at least.
        """
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if size <= max_tokens:  # a token is a byte at least; to look at the whole vocabulary takes a tenth of a second
            return
        least = -(-size // self.max_token_bytes)
        if least <= max_tokens < len(text) // PLAUSIBLE_CHARS:
            least = self._count(text, enough=max_tokens)
        if least > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, at least {least} tokens: more than the "
                f"context of {max_tokens} holds",
                field=field,
                tokens=least,
                limit=max_tokens,
            )

    def encode_end(
        self, text: str, *, tokens: int, side: Literal["left", "right"], add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids whose last ``tokens`` are the text's, or whose first; no more of it than that takes is encoded.

        Args:
            side: "left": what is left out, if anything, is the beginning; "right": the end.
        """
        needed = tokens + self.max_token_bytes  # a cut changes tokens beside it
        chars = PLAUSIBLE_CHARS * needed
        while chars < len(text):
            part = text[-chars:] if side == "left" else text[:chars]
            ids = self.encode(part, add_special_tokens=add_special_tokens)
            if len(ids) >= needed:
                return ids
            chars *= 2
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _count(self, text: str, *, enough: int) -> int:
        """A lower bound on the tokens of ``text``, counted slice by slice until it is more than ``enough``."""
        least = 0
        for start in range(0, len(text), SLICE_CHARS):
            ids = self.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
            # A token that a slice cuts in two may become as many as it has bytes.
            least += max(0, len(ids) - self.max_token_bytes)
            if least > enough:
                break
        return least

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of ``ids``. Bytes that are not UTF-8 become U+FFFD; ids without a token are empty."""
        detokenizer = self.detokenizer(
            skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
        )
        return detokenizer.add(ids) + detokenizer.finish()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """A fresh stream decoder; see ``IncrementalDetokenizer``."""
        return IncrementalDetokenizer(
            self._table,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            shown=shown,
            prompt_ids=prompt_ids,
        )

    def special_ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Special tokens whose text is in one of ``texts``."""
        texts = tuple(texts)
        tokens = ((id, self.id_to_token(id)) for id in self.all_special_ids)
        return frozenset(id for id, token in tokens if token and any(token in text for text in texts))

    def template_source(self, chat_template: str | None, *, with_tools: bool) -> str:
        """The source of the chat template that ``conversation`` takes; raises what that raises."""
        return self._template(chat_template).source(with_tools=with_tools)

    def id_to_token(self, id: int) -> str:
        """The vocabulary's own string of a token; empty where the id has none (padding rows of an embedding)."""
        return self.backend.id_to_token(id) or ""

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary string; None if there is no such token."""
        return self.backend.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token adds inside a text; may be part of a character; empty where the id has no token."""
        return self._table[id]

    def bytes_of_all(self, vocab_size: int) -> list[bytes]:
        """``token_bytes`` of all ids below ``vocab_size``, which may be more than there are."""
        return self._table.all(vocab_size)

    def apply_chat_template(self, /, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt of a conversation, under Hugging Face's name: ``conversation(…).prompt()``."""
        return self.conversation(messages, **options).prompt()

    def conversation(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Conversation:
        """Messages under a chat template, to be made a prompt.

        Args:
            messages: OpenAI's form: role, content (a string or text parts), tool_calls …
            tools: functions in OpenAI's form.
            documents: for templates that know them.
            add_generation_prompt: end with the start of an assistant's answer.
            continue_final_message: end inside the last message, to be continued; no generation prompt then.
            chat_template: instead of the model's default: Jinja source, or the name of a built-in template or of
                another one of the model's.
            kwargs: further variables of the template (``enable_thinking`` …).

        Raises:
            InvalidRequest: tools or documents are not lists of objects, or a variable cannot be set.
            TokenizerError: there is no template.
        """
        if reserved := kwargs.keys() & {"messages", "raise_exception", "self", "strftime_now"}:
            raise InvalidRequest(
                f"chat_template_kwargs: {sorted(reserved)[0]} cannot be set", field="chat_template_kwargs"
            )
        variables = {
            **self.special.texts,
            "tools": _objects(tools, "tools"),
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **kwargs,
        }
        template = self._template(chat_template)
        return template.conversation(messages, variables=variables, continue_final_message=continue_final_message)

    def _template(self, chat_template: str | None) -> ChatTemplate:
        if chat_template is not None:
            if self.chat_template is not None and chat_template in self.chat_template.sources:
                return ChatTemplate({"default": self.chat_template.sources[chat_template]})
            return ChatTemplate.from_text(chat_template, of_request=True)
        if self.chat_template is not None:
            return self.chat_template
        raise TokenizerError(
            "the model has no chat template: pass one as chat_template (Jinja, a file, or a name as 'chatml')"
        )


def _in_any(text: str, sources: Sequence[str]) -> bool:
    return any(text in source for source in sources)


def _objects(values: Sequence[Mapping[str, Any]] | None, field: str) -> list[dict[str, Any]] | None:
    if not values:
        return None
    if not isinstance(values, Sequence) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequest(f"{field} is not a list of objects", field=field)
    return [dict(value) for value in values]
