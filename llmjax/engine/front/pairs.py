"""Prompts of text pairs, for models that score pairs, in the form that each model was trained with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmjax.engine.info import PoolerInfo
from llmjax.errors import InvalidRequest, PromptTooLong
from llmjax.parsing.choice import reads
from llmjax.tokenizer import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from llmjax.engine.front.requests import PromptInput

OWN = "default"


@dataclass(frozen=True, eq=False)
class Page:
    """A prompt with a picture, which has no text to be known by: each is itself alone."""

    prompt: PromptInput


@dataclass(frozen=True)
class TextPair:
    """Two texts that a cross-encoder reads together.

    Attributes:
        instruction: what the pair is judged by, for models that read one; None: the model's default.
        chat_template: makes the prompt in place of the model's template: Jinja source, or a built-in template's name.
    """

    first: str
    second: str
    instruction: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True)
class Side:
    """One side of a pair, where it is read by itself.

    Attributes:
        prompt_name: the model's prompt for texts of this side; None: the one for texts whose request names none.
    """

    content: str | Page
    prompt_name: str | None = None


@dataclass(frozen=True)
class PairPrompts:
    """Makes prompts of pairs.

    A template is given messages of the roles ``query`` and ``document``, as in vLLM, and before them the instruction,
    if there is one, as the message of ``system`` and as a variable. A template that nobody has asked for is not put
    around texts that already begin with one of the model's special tokens: such a text is already a whole prompt.

    Attributes:
        template: the model's template; None: the texts follow each other as the tokenizer joins them.
        chosen: whether the user has chosen the template.
        instruction: the instruction for pairs that have none.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    chosen: bool
    instruction: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, pooler: PoolerInfo, *, chosen: bool) -> PairPrompts:
        """Makes the prompts of a model.

        Args:
            chosen: whether the tokenizer's template is one that the user has set.
        """
        name = OWN if chosen and pooler.task == "classify" else pooler.pair_template
        template = None
        if name is not None:
            template = tokenizer.chat_template if name == OWN else ChatTemplate.from_text(name)
        return cls(tokenizer, template, chosen, pooler.instruction)

    def text(self, pair: TextPair) -> str | None:
        """The prompt; None: the tokenizer puts the texts together.

        Raises:
            InvalidRequest: there is an instruction, and no template that reads it, or the template fails.
        """
        template, chosen = self.template, self.chosen
        if pair.chat_template is not None:
            template, chosen = ChatTemplate.from_text(pair.chat_template, of_request=True), True
        if template is not None and not chosen and pair.first.startswith(self._special):
            return pair.first + pair.second
        instruction = self.instruction if pair.instruction is None else pair.instruction
        if pair.instruction is not None:
            self._check_reads_instruction(template)
        if template is None:
            return None
        messages = [{"role": "query", "content": pair.first}, {"role": "document", "content": pair.second}]
        variables = {**self.tokenizer.special.texts, "tools": None, "documents": None, "add_generation_prompt": True}
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
            variables["instruction"] = instruction
        return template.conversation(messages, variables=variables).prompt()

    def tokens(
        self, pair: TextPair, *, limit: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], int | None]:
        """Token ids, ``limit`` of them at most, and where the second text begins, if the model tells texts apart.

        What is cut to the limit is the end of the second text.

        Args:
            add_special_tokens: those of the tokenizer, around and between the texts, or around the template's prompt.

        Raises:
            InvalidRequest: see `text`.
            PromptTooLong: there are more tokens than the limit without the second text.
        """
        if limit is not None:  # text beyond this cannot be within the limit
            pair = replace(pair, second=pair.second[: (limit + 1) * self.tokenizer.max_token_bytes])
        text = self.text(pair)
        if text is None:
            return self.tokenizer.encode_texts(
                pair.first, pair.second, limit=limit, add_special_tokens=add_special_tokens
            )
        ids = self.tokenizer.encode_texts(text, add_special_tokens=add_special_tokens)
        if limit is None or len(ids[0]) <= limit:
            return ids
        second = self.tokenizer.encode(pair.second, add_special_tokens=False)
        kept = len(second)
        while kept and len(ids[0]) > limit:
            kept = max(0, kept - (len(ids[0]) - limit))
            cut = self.tokenizer.decode(second[:kept], skip_special_tokens=False).rstrip("\ufffd")
            text = self.text(replace(pair, second=cut))
            assert text is not None
            ids = self.tokenizer.encode_texts(text, add_special_tokens=add_special_tokens)
        if len(ids[0]) > limit:
            raise PromptTooLong(
                f"the prompt has {len(ids[0])} tokens without the second text, not {limit}",
                field="prompt",
                tokens=len(ids[0]),
                limit=limit,
            )
        return ids

    @property
    def _special(self) -> tuple[str, ...]:
        """Texts of the model's special tokens."""
        found = (self.tokenizer.id_to_token(token) for token in self.tokenizer.all_special_ids)
        return tuple(text for text in found if text)

    def _check_reads_instruction(self, template: ChatTemplate | None) -> None:
        source = "" if template is None else template.source(with_tools=False)
        if not any(reads(source, name) for name in ("instruction", "system")):
            raise InvalidRequest(
                "the model is not told what to judge by: its template has no instruction", field="instruction"
            )
