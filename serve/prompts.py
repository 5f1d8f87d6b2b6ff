"""From what a request says to token ids: chat templates, truncation, and how many tokens may follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llmjax.config import TEMPLATE_FIELDS
from llmjax.errors import InvalidRequest
from llmjax.parsing.choice import reads, tools_variable
from llmjax.serve.context import Server
from llmjax.serve.described_tools import with_calls_as_text, with_tools
from llmjax.serve.documents import with_files_read
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.literal_texts import LiteralTexts
from llmjax.serve.protocol.chat import ChatMessage, ChatTemplateFields, num_parts, template_messages
from llmjax.serve.protocol.common import AS_MANY_AS_FIT, MAX_IGNORED, GenerationRequest
from llmjax.serve.protocol.pictures import TEXT_ONLY, Attachment
from llmjax.serve.protocol.tools import checked_tools
from llmjax.tokenizer.infill import InfillTokens, encode_suffix

if TYPE_CHECKING:
    from llmjax.engine.core.media import PromptMedia
    from llmjax.engine.front.images import Images
    from llmjax.media.image import PreparedImage, PreparedVideo

T = TypeVar("T")

# Work on longer texts would hold up every other request's stream; it goes to a thread.
INLINE_CHARS = 4096
TRUNCATED_PICTURES = "truncate_prompt_tokens does not go with images"
CHARS_PER_PART = 32  # the work that a message, or a part of one, is beside its text


@dataclass(frozen=True)
class EncodedPrompt:
    """What the engine gets, and what ``echo`` shows."""

    token_ids: list[int]
    text: str | None = None
    media: PromptMedia | None = None  # images; None: there are none
    moved_lines: int = 0  # volatile lines of the system prompt, which stand at the end of the conversation


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt are kept, on which side the others go, and how the rest is shown."""

    keep: int
    side: Literal["left", "right"]
    skip_special_tokens: bool

    @classmethod
    def of(cls, server: Server, body: GenerationRequest, *, room: int) -> Truncation | None:
        """``truncate_prompt_tokens``; -1 is what leaves room for ``room`` tokens, or for one where answers are cut.

        Raises:
            ApiError: more is to be kept than the context holds, or nothing.
        """
        keep, limit = body.truncate_prompt_tokens, server.engine.info.max_model_len
        if keep is None:
            return None
        if keep == 0:
            raise ApiError(
                "truncate_prompt_tokens must be at least 1, or -1 for what fits",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        if keep > limit:
            raise ApiError(
                f"truncate_prompt_tokens is {keep}, above the context of {limit}",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        if keep == -1:
            keep = limit - 1 if server.config.cut_max_tokens else max(limit - room, 0)
        return cls(keep, body.truncation_side or "left", body.skip_special_tokens is not False)

    def apply(self, server: Server, prompt: EncodedPrompt) -> EncodedPrompt:
        """The prompt with the tokens that are kept."""
        ids = prompt.token_ids
        if len(ids) <= self.keep:
            return prompt
        ids = ids[: self.keep] if self.side == "right" else ids[len(ids) - self.keep :]
        if prompt.text is None:
            return EncodedPrompt(ids)
        return EncodedPrompt(ids, server.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens))


def template_source(server: Server, body: ChatTemplateFields, *, with_tools: bool) -> str:
    """The chat template that a request's prompt is made by.

    Raises:
        ApiError: an untrusted template, or no tokenizer.
        TokenizerError: there is no template.
    """
    if body.chat_template is not None and not server.config.trust_request_chat_template:
        raise ApiError(
            "`chat_template` is refused: this server does not trust templates in requests "
            "(--trust-request-chat-template)",
            param="chat_template",
            code="unsupported_parameter",
        )
    return server.tokenizer.template_source(body.chat_template, with_tools=with_tools)


async def read_tools(body: ChatTemplateFields) -> list[dict[str, Any]]:
    """The functions of a request, checked; raises ``ApiError``."""
    if not body.tools:
        return []
    return await asyncio.to_thread(checked_tools, body.tools)  # their schemas may be large, however few they are


def unread_variables(body: ChatTemplateFields, source: str) -> list[str]:
    """Variables that a request sets and its template does not read, as many as are told."""
    names = (name for name in body.chat_template_kwargs or {} if name.isidentifier() and not reads(source, name))
    return [f"chat_template_kwargs.{cut(name)}" for name in islice(names, MAX_IGNORED)]


async def chat_prompt(
    server: Server,
    body: ChatTemplateFields,
    *,
    tools: Sequence[Mapping[str, Any]],
    owner: str,
    cache_salt: str | None,
    variables: Mapping[str, Any] | None = None,
    truncation: Truncation | None = None,
) -> EncodedPrompt:
    """Messages, rendered and encoded.

    Args:
        tools: checked; those of the request, if the model is to know them.
        owner: the request's API key, as ``owner_of`` has it.
        cache_salt: what `cache_salt_of` returns; parts of texts are not tokenized again under the same salt.
        variables: variables of the template that apply where the request sets no others.

    Raises:
        PromptTooLong: the text is longer than the context can hold, and not to be cut.
        ApiError: unsupported content, an untrusted template, or no tokenizer.
        InvalidRequest: the template refuses the messages, fails, or takes more than its limits.
        TokenizerError: there is no template.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(
            "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
        )
    source = template_source(server, body, with_tools=bool(tools))
    own = _template_kwargs(body.chat_template_kwargs)
    kwargs = {**server.config.default_chat_template_kwargs, **(variables or {}), **own}
    literal = server.literal_texts
    size = CHARS_PER_PART * (num_parts(body.messages) + len(tools))
    read = await with_files_read(body.messages, server.sources, owner=owner)
    found: list[Attachment] = []
    images = await _images(server, body.mm_processor_kwargs)
    placeholders = None if images is None else {"image": images.placeholder, "video": images.video_placeholder}
    messages, moved = await off_loop(lambda: _messages(server, read, source, tools, found, placeholders), size=size)
    if found and truncation is not None:
        raise ApiError(TRUNCATED_PICTURES, param="truncate_prompt_tokens", code="invalid_value")
    if literal is not None and "documents" in kwargs:
        kwargs["documents"] = literal.marked(kwargs["documents"])
    if tools and (name := tools_variable(source)) is not None:
        kwargs[name] = tools
    if body.continue_final_message and not messages[-1]["content"]:
        raise ApiError("continue_final_message needs a last message with content", param="continue_final_message")
    conversation = server.tokenizer.conversation(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        **kwargs,
    )
    prepared: Any = ([], [])
    if server.pictures is not None and images is not None:
        prepared = await server.pictures.prepared(found, images=images, owner=owner)
    text = await conversation.prompt_async()
    encode = partial(_encoded, add_special_tokens=body.add_special_tokens, truncation=truncation, literal=literal)
    prompt = await off_loop(lambda: encode(server, text, field="messages", kept_for=cache_salt or ""), size=len(text))
    prompt = replace(prompt, moved_lines=moved)
    return prompt if images is None else _with_images(prompt, prepared, images)


def text_beside(message: ChatMessage, pictures: list[Attachment] | None) -> str:
    """The text of a message, whose pictures are taken out of it; arguments and errors as for `template_messages`."""
    content = template_messages([message], pictures)[0]["content"] or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


async def page_or_text(server: Server, body: ChatTemplateFields, *, owner: str) -> str | EncodedPrompt:
    """A message to a model that reads each page and each text by itself: the prompt of its page, or its text.

    Args:
        owner: the request's API key, as ``owner_of`` has it.

    Raises:
        ApiError: there are several pictures, or a text beside one that does not stand in the prompt of every page.
    """
    images = await _images(server, body.mm_processor_kwargs)
    found: list[Attachment] = []
    read = await with_files_read(body.messages, server.sources, owner=owner)
    text = text_beside(read[0], None if images is None else found)
    if images is None or server.pictures is None or not found:
        return text
    path = "messages.0.content"
    if len(found) > 1:
        problem = f"`{path}`: this model reads one page at a time; there are {len(found)} pictures"
        raise ApiError(problem, param=path, code="invalid_value")
    if text.strip() not in images.page:
        problem = f"`{path}`: a page is a picture alone; beside it stands a text that this model reads by itself"
        raise ApiError(problem, param=path, code="invalid_value")
    prepared = await server.pictures.prepared(found, images=images, owner=owner)
    return _with_images(EncodedPrompt([]), prepared, images)


async def _images(server: Server, keywords: Mapping[str, Any] | None) -> Images | None:
    """What places a request's pictures; None: the model sees none. Raises ApiError if a keyword is not known."""
    if server.pictures is not None:
        images = server.pictures.images
        return await asyncio.to_thread(images.with_keywords, keywords) if keywords else images
    if keywords:
        raise ApiError(f"`mm_processor_kwargs`: {TEXT_ONLY}", param="mm_processor_kwargs", code="unsupported_parameter")
    return None


def with_placeholders(messages: Sequence[dict[str, Any]], placeholders: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages in which images and videos have the text that stands for them where a template takes no parts.

    Args:
        placeholders: by the types of parts.
    """

    def filled(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            {**part, "text": placeholders[kind]} if (kind := part["type"]) in placeholders else part for part in content
        ]

    return [{**message, "content": filled(message["content"])} for message in messages]


def _with_images(
    prompt: EncodedPrompt, found: tuple[Sequence[PreparedImage], Sequence[PreparedVideo]], images: Images
) -> EncodedPrompt:
    """The prompt with the tokens of its images and videos; raises ``ApiError`` if its placeholders are not theirs."""
    try:
        ids, media = images.placed(prompt.token_ids, *found)
    except InvalidRequest as error:
        raise ApiError(str(error), param="messages", code="invalid_value") from error
    return replace(prompt, token_ids=ids, media=media)


def _messages(
    server: Server,
    read: Sequence[ChatMessage],
    template: str,
    tools: Sequence[Mapping[str, Any]],
    pictures: list[Attachment],
    placeholders: Mapping[str, str] | None,
) -> tuple[list[dict[str, Any]], int]:
    """Messages with what the template does not know written out, what is literal marked, and volatile lines moved; and
    how many lines were moved.

    Args:
        read: messages whose files are read.
        pictures: takes the pictures, in order.
        placeholders: the texts that stand for pictures and videos; None: the model sees none.
    """
    messages = template_messages(read, None if placeholders is None else pictures)
    moved: list[str] = []
    if server.volatile_lines is not None:
        messages, moved = server.volatile_lines.moved(messages)
    if server.literal_texts is not None:
        messages = server.literal_texts.messages(messages)
    if placeholders is not None:
        messages = with_placeholders(messages, placeholders)
    if not reads(template, "tool_calls"):
        messages = with_calls_as_text(messages, tool_role=reads(template, "tool"))
    if tools and tools_variable(template) is None:
        messages = with_tools(messages, tools)
    return messages, len(moved)


def _encoded(
    server: Server,
    text: str,
    *,
    add_special_tokens: bool,
    truncation: Truncation | None,
    field: str,
    literal: LiteralTexts | None = None,
    kept_for: str | None = None,
) -> EncodedPrompt:
    tokenizer = server.tokenizer
    if truncation is None:
        tokenizer.check_length(text, max_tokens=server.engine.info.max_model_len, field=field)
    if literal is not None:
        prompt = EncodedPrompt(*literal.encode(text, add_special_tokens=add_special_tokens, kept_for=kept_for))
        return prompt if truncation is None else truncation.apply(server, prompt)
    if truncation is None:
        return EncodedPrompt(tokenizer.encode(text, add_special_tokens=add_special_tokens, kept_for=kept_for), text)
    ids = tokenizer.encode_end(
        text, tokens=truncation.keep, side=truncation.side, add_special_tokens=add_special_tokens
    )
    return truncation.apply(server, EncodedPrompt(ids, text))


def _with_gap(server: Server, texts: Sequence[str], suffix: str, *, add_special_tokens: bool) -> list[EncodedPrompt]:
    """Prompts that have each text, a gap to fill, and the suffix, which is encoded once."""
    tokenizer, limit = server.tokenizer, server.engine.info.max_model_len
    tokens = InfillTokens.of(tokenizer)
    tokenizer.check_length(suffix, max_tokens=limit, field="suffix")
    suffix_ids, prompts = encode_suffix(tokenizer, suffix), []
    for text in texts:
        tokenizer.check_length(text, max_tokens=limit, field="prompt")
        ids = tokens.prompt(tokenizer, text, suffix_ids, add_special_tokens=add_special_tokens)
        prompts.append(EncodedPrompt(ids, text))
    return prompts


async def completion_prompts(
    server: Server,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool,
    echo: bool = False,
    skip_special_tokens: bool = False,
    truncation: Truncation | None = None,
    suffix: str | None = None,
    kept_for: str | None = None,
) -> list[EncodedPrompt]:
    """Texts, encoded; token ids, checked (and decoded when ``echo`` will show them).

    Args:
        suffix: what follows the gap after each text; excludes truncation and token ids.
        kept_for: as for `Tokenizer.encode`.
        skip_special_tokens: leave special tokens out of the text of token ids.

    Raises:
        PromptTooLong: a text is longer than the context can hold, and not to be cut.
        InvalidRequest: ids outside the vocabulary.
        ApiError: no tokenizer.
    """
    for prompt in prompts:
        if not isinstance(prompt, str):
            server.request_limits.check_ids(prompt)
    texts = echo or any(isinstance(prompt, str) for prompt in prompts)
    tokenizer = server.tokenizer if texts else None
    literal = server.literal_texts

    def both(prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return _encoded(
                server,
                prompt if literal is None else literal.marked(prompt),
                add_special_tokens=add_special_tokens,
                truncation=truncation,
                field="prompt",
                literal=literal,
                kept_for=kept_for,
            )
        encoded = EncodedPrompt(prompt)
        if echo and tokenizer is not None:
            encoded = EncodedPrompt(prompt, tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens))
        if truncation is None:
            return encoded
        return replace(truncation, skip_special_tokens=skip_special_tokens).apply(server, encoded)

    size = sum(map(len, prompts)) if texts else 0
    if suffix:
        whole = [prompt for prompt in prompts if isinstance(prompt, str)]
        assert len(whole) == len(prompts), "the route refuses token ids beside a suffix"
        work = partial(_with_gap, server, whole, suffix, add_special_tokens=add_special_tokens)
        return await off_loop(work, size=size + len(suffix))
    return await off_loop(lambda: [both(prompt) for prompt in prompts], size=size)


def check_queue(server: Server, *, prompts: int, choices: int, field: str = "prompt") -> None:
    """Refuses a request that not even an idle server takes: its last prompt would find the queue full of the others."""
    config = server.engine.config
    limit = config.max_num_seqs + config.max_num_queued_reqs
    if (prompts - 1) * choices >= limit:
        raise ApiError(
            f"{prompts} prompts, each with n = {choices}, are more than this server takes: at most "
            f"{config.max_num_seqs} sequences run (--max-num-seqs) and {config.max_num_queued_reqs} wait "
            "(--max-num-queued-reqs)",
            param=field,
            code="invalid_value",
        )


def wanted_tokens(asked: int | None, default: int | None) -> tuple[int | None, int | None]:
    """What a request asks for, and what it gets without that, for `output_budget`; -1 asks for all that fit."""
    return (None, None) if asked == AS_MANY_AS_FIT else (asked, default)


def output_budget(
    server: Server,
    prompt: EncodedPrompt,
    *,
    asked: int | None,
    default: int | None,
    field: str,
    asked_field: str = "max_tokens",
) -> int:
    """How many tokens may be generated.

    Args:
        asked: the request's max_tokens.
        default: used where the request names none; None: the rest of the context. Lowered to what fits.
        field: the prompt's name in the request, for errors.
        asked_field: the name under which the request asked.

    Raises:
        InvalidRequest: the prompt has no tokens, or leaves room for none.
        ApiError: 400 ``context_length_exceeded``; what is asked for is cut to what fits where the server does that.
    """
    if asked is not None and asked < 1:
        raise ApiError(f"{asked_field} must be at least 1, not {asked}", param=asked_field, code="invalid_value")
    length = len(prompt.token_ids)
    room = server.request_limits.check_prompt(length, field=field)
    if asked is not None and asked > room and not server.config.cut_max_tokens:
        raise ApiError(
            f"{asked_field} is {asked}; after the prompt's {length} tokens only {room} fit the context of "
            f"{length + room} (a server with --cut-max-tokens generates as many as fit)",
            param=asked_field,
            code="context_length_exceeded",
        )
    wanted = default if asked is None else asked
    return room if wanted is None else min(wanted, room)


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Run ``work`` here when its input is short, in a thread when it may take long.

    Args:
        size: how much work the input is: characters of a text to encode, or what takes as long.
    """
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def _template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    clash = TEMPLATE_FIELDS & (kwargs or {}).keys()
    if clash:
        name = min(clash)
        raise ApiError(f"chat_template_kwargs may not hold `{name}`", param="chat_template_kwargs")
    return dict(kwargs or {})
