"""POST /v1/embeddings, /rerank, /score, /classify and /pooling: the request bodies, in vLLM's, Jina's and Cohere's
shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from llmjax.engine.front.pairs import Page
from llmjax.engine.front.scores import Compared, compared
from llmjax.pooling_params import PoolingParams, PoolingTask
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import MAX_CONVERSATIONS, ChatTemplateFields, Messages
from llmjax.serve.protocol.common import ApiModel, Ints, Strings, at_most, object_of
from llmjax.serve.vector_forms import EmbedType, EncodingFormat, Endianness

MOST_TEXTS = 2**14  # in one request
MOST_INSTRUCTION = 2**14  # characters
IntLists = Annotated[list[Ints], Field(fail_fast=True)]
Texts = Annotated[Strings, at_most(MOST_TEXTS)]
Inputs = str | Strings | Ints | IntLists


class PooledBody(ApiModel):
    """What all requests for vectors may carry."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: str | None = None

    # Known, not supported.
    padding: Any = None
    truncation_side: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "padding": ("do_not_pad",),
        "truncation_side": ("right",),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "padding": "is not supported: texts are computed as long as they are",
        "truncation_side": 'must be "right": what is cut is the end',
    }

    def params(self, **own: Any) -> PoolingParams:
        """The engine's parameters: what the body has of them, and in place of that what ``own`` has."""
        given = {field.name: getattr(self, field.name) for field in fields(PoolingParams) if hasattr(self, field.name)}
        return PoolingParams(**{**given, **own})


class TextsBody(PooledBody):
    """Texts that no template is for; special tokens are those that the tokenizer puts around them."""

    add_special_tokens: bool | None = None  # None: true
    mm_processor_kwargs: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PooledBody.neutral_values,
        "mm_processor_kwargs": ({},),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **PooledBody.reasons,
        "mm_processor_kwargs": "is about pictures, which stand in `messages`",
    }


class InputBody(TextsBody):
    """Texts or token ids, one or many."""

    input: Inputs

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each of them."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise ApiError("`input` is empty", param="input", code="invalid_value")
        if isinstance(self.input[0], int):
            return [self.input]
        if len(self.input) > MOST_TEXTS:
            problem = f"`input` has {len(self.input)} entries; at most {MOST_TEXTS} are allowed"
            raise ApiError(problem, param="input", code="invalid_value")
        return list(self.input)


def _number(messages: Any) -> str:
    """Which form of ``messages`` a value means to have, so that an error is about that one."""
    several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
    return "several conversations" if several else "one conversation"


Conversations = Annotated[list[Messages], Field(fail_fast=True, min_length=1), at_most(MAX_CONVERSATIONS)]
OneOrSeveral = Annotated[
    Annotated[Messages, Tag("one conversation")] | Annotated[Conversations, Tag("several conversations")],
    Discriminator(_number),
]


class ConversationBody(ChatTemplateFields, PooledBody):
    """A conversation or several, of each of which a chat template makes the text."""

    messages: OneOrSeveral  # type: ignore[assignment]
    add_generation_prompt: bool = False

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = PooledBody.neutral_values
    reasons: ClassVar[Mapping[str, str]] = PooledBody.reasons

    def chats(self) -> dict[str, ChatTemplateFields]:
        """Each conversation, by what it is called in the request."""
        shared = {name: getattr(self, name) for name in ChatTemplateFields.model_fields if name != "messages"}
        if isinstance(self.messages[0], list):
            named = {f"messages.{i}": messages for i, messages in enumerate(self.messages)}
        else:
            named = {"messages": self.messages}
        return {name: ChatTemplateFields.model_construct(**shared, messages=found) for name, found in named.items()}


class VectorFields(ApiModel):
    """An answer of vectors."""

    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    embed_dtype: EmbedType | None = None
    endianness: Endianness | None = None

    def without_effect(self) -> list[str]:
        """Fields that ask for something of bytes, where there are none."""
        fields = ("embed_dtype", "endianness") if self.encoding_format == "float" else ()
        return [name for name in fields if getattr(self, name) is not None]


class EmbeddingRequest(VectorFields, InputBody):
    """POST /v1/embeddings."""

    prompt_name: Annotated[str, Field(max_length=1024)] | None = None


class EmbeddingChatRequest(VectorFields, ConversationBody):
    """POST /v1/embeddings, of conversations."""


class PoolingRequest(VectorFields, InputBody):
    """POST /pooling."""

    prompt_name: Annotated[str, Field(max_length=1024)] | None = None
    task: PoolingTask | None = None


class PoolingChatRequest(VectorFields, ConversationBody):
    """POST /pooling, of conversations."""

    task: PoolingTask | None = None


class ClassifyRequest(InputBody):
    """POST /classify."""


class ClassifyChatRequest(ConversationBody):
    """POST /classify, of conversations."""


# Why the fields that cut one side alone are not taken.
LENGTHS: Mapping[str, str] = dict.fromkeys(
    ("max_tokens_per_query", "max_tokens_per_doc"),
    "is not supported; truncate_prompt_tokens cuts pairs, at the end of the second text",
)


class PairsBody(TextsBody):
    """Pairs of texts."""

    instruction: Annotated[str, Field(max_length=MOST_INSTRUCTION)] | None = None
    instruct: Annotated[str, Field(max_length=MOST_INSTRUCTION)] | None = None  # SGLang's name of it

    def pairs_of(self, first: Sequence[str | Page], second: Sequence[str | Page]) -> list[Compared]:
        """One text with each of the others, or pair by pair, with the instruction."""
        return compared(first, second, instruction=self.instruct if self.instruction is None else self.instruction)


# What vLLM calls the two sides of pairs, newer names last.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"), ("queries", "documents"))


Content = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class PageContent(ApiModel):
    """What is compared, where it is a picture: parts of a message, in vLLM's form."""

    content: Content


def _kind_of(value: Any) -> str:
    """Which form of a side, or of one of its entries, a value means to have, so that an error is about that one."""
    if isinstance(value, list):
        return "several texts"
    if not isinstance(value, dict | BaseModel):
        return "one text"
    return "a document" if isinstance(value, dict) and "content" not in value else "a page"


def _kind_of_side(value: Any) -> str:
    """The same where an object is always a page."""
    return "a page" if isinstance(value, dict | BaseModel) else _kind_of(value)


TextOrPage = Annotated[
    Annotated[str, Tag("one text")] | Annotated[PageContent, Tag("a page")], Discriminator(_kind_of_side)
]
TextsOrPages = Annotated[list[TextOrPage], Field(fail_fast=True), at_most(MOST_TEXTS)]
Side = Annotated[
    Annotated[str, Tag("one text")]
    | Annotated[PageContent, Tag("a page")]
    | Annotated[TextsOrPages, Tag("several texts")],
    Discriminator(_kind_of_side),
]


class ScoreRequest(PairsBody):
    """POST /score. Both sides are there, under one of the pairs of names in ``SIDES``."""

    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    queries: Side | None = None
    items: Side | None = None
    documents: Side | None = None
    max_tokens_per_query: Any = None
    max_tokens_per_doc: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextsBody.neutral_values,
        "max_tokens_per_query": (0,),
        "max_tokens_per_doc": (0,),
    }
    reasons: ClassVar[Mapping[str, str]] = {**TextsBody.reasons, **LENGTHS}

    @property
    def sides(self) -> tuple[str, str]:
        """The names of the two sides."""
        names = {name for pair in SIDES for name in pair}
        names_given = [name for name in names if getattr(self, name) is not None]
        for pair in SIDES:
            if sorted(pair) == sorted(names_given):
                return pair
        missing = [name for pair in SIDES if {*pair} > {*names_given} for name in pair if name not in names_given]
        wanted = ", or ".join(f"`{first}` and `{second}`" for first, second in SIDES)
        raise ApiError(
            f"the texts to compare are {wanted}; the request has {', '.join(sorted(names_given)) or 'none of them'}",
            param=missing[0] if missing else min(names_given),
            code="missing_required_parameter" if missing else "invalid_value",
        )


Document = Annotated[
    Annotated[str, Tag("one text")]
    | Annotated[Annotated[dict[str, str], object_of(str)], Tag("a document")]
    | Annotated[PageContent, Tag("a page")],
    Discriminator(_kind_of),
]


class RerankRequest(PairsBody):
    """POST /rerank."""

    query: TextOrPage
    documents: Annotated[list[Document], Field(fail_fast=True), at_most(MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True
    max_tokens_per_query: Any = None
    max_tokens_per_doc: Any = None
    rank_fields: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextsBody.neutral_values,
        "max_tokens_per_query": (0,),
        "max_tokens_per_doc": (0,),
        "rank_fields": (["text"],),
    }
    reasons: ClassVar[Mapping[str, str]] = {**TextsBody.reasons, **LENGTHS}

    @property
    def contents(self) -> list[str | PageContent]:
        """The documents: of each its text, or its parts."""
        if not self.documents:
            raise ApiError("`documents` is empty", param="documents", code="invalid_value")
        contents: list[str | PageContent] = []
        for number, document in enumerate(self.documents):
            if isinstance(document, PageContent):
                contents.append(document)
                continue
            text: Any = document.get("text") if isinstance(document, dict) else document
            if text is None:
                raise ApiError(f"`documents.{number}` has no text", param=f"documents.{number}", code="invalid_value")
            contents.append(text)
        return contents


EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class CohereInput(ApiModel):
    """One input of Cohere's; of its parts one, a text."""

    content: Content


class CohereEmbedRequest(ApiModel):
    """POST /v2/embed: the request body, in Cohere's shape."""

    model: str | None = None
    texts: Texts | None = None
    inputs: Annotated[list[CohereInput], Field(fail_fast=True), at_most(MOST_TEXTS)] | None = None
    input_type: Annotated[str, Field(max_length=128)] | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(fail_fast=True, min_length=1), at_most(8)] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: int | None = None
    images: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}
    reasons: ClassVar[Mapping[str, str]] = {
        "images": "is not supported: pictures stand in `messages` of /v1/embeddings"
    }

    @property
    def given(self) -> tuple[str, list[str]]:
        """The field that the texts are in, and the texts.

        Raises:
            ApiError: there are none, or an input is something else than one text.
        """
        if (self.texts is None) == (self.inputs is None):
            raise ApiError("give one of `texts` and `inputs`", param="texts", code="missing_required_parameter")
        if self.texts is not None:
            values, field = self.texts, "texts"
        else:
            values, field = [_one_text(one, f"inputs.{i}") for i, one in enumerate(self.inputs or ())], "inputs"
        if not values:
            raise ApiError(f"`{field}` is empty", param=field, code="invalid_value")
        return field, values

    @property
    def types(self) -> list[EmbeddingType]:
        """Each of them once."""
        return list(dict.fromkeys(self.embedding_types or ("float",)))

    def body(self) -> EmbeddingRequest:
        """The request of OpenAI's shape that this comes to.

        Raises:
            ApiError: as in ``given``, or `max_tokens` limits texts that must not be cut.
        """
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise ApiError('`max_tokens` needs truncate "END"', param="max_tokens", code="invalid_value")
        keep = None if self.truncate == "NONE" else self.max_tokens or -1
        _, texts = self.given
        return EmbeddingRequest.model_construct(
            model=self.model, input=texts, truncate_prompt_tokens=keep, priority=self.priority
        )


def _one_text(one: CohereInput, path: str) -> str:
    match one.content:
        case [{"type": "text", "text": str(text)}]:
            return text
    message = f"`{path}.content` must be one text: models read nothing else, and have no template for several"
    raise ApiError(message, param=f"{path}.content", code="unsupported_parameter")
