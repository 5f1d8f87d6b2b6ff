"""From what a request says to token ids: chat templates, truncation, and how many tokens may follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llmjax.serve.context import Server
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import ChatTemplateFields, template_messages
from llmjax.serve.protocol.common import GenerationRequest

T = TypeVar("T")

# Work on longer texts would hold up every other request's stream; it goes to a thread.
INLINE_CHARS = 4096

RESERVED_KWARGS = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


@dataclass(frozen=True)
class Prompt:
    """What the engine gets, and what ``echo`` shows."""

    token_ids: list[int]
    text: str | None = None


def truncated(server: Server, prompt: Prompt, body: GenerationRequest, *, room: int) -> Prompt:
    """The prompt cut to ``truncate_prompt_tokens`` (-1: to what leaves room for ``room`` tokens)."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(server.engine.max_model_len - room, 0)
    ids = prompt.token_ids
    if len(ids) <= keep:
        return prompt
    ids = ids[:keep] if body.truncation_side == "right" else ids[len(ids) - keep :]
    text = None if prompt.text is None else server.tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(ids, text)


async def chat_prompt(server: Server, body: ChatTemplateFields) -> Prompt:
    """Messages, rendered and encoded.

    Raises:
        ApiError: unsupported content, an untrusted template, or no tokenizer.
        TokenizerError: the template refuses the messages.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(
            "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
        )
    if body.chat_template is not None and not server.config.trust_request_chat_template:
        raise ApiError(
            "`chat_template` is refused: this server does not trust templates in requests "
            "(--trust-request-chat-template)",
            param="chat_template",
            code="unsupported_parameter",
        )
    kwargs = _template_kwargs(body.chat_template_kwargs)
    messages = template_messages(body.messages)
    if body.continue_final_message and not messages[-1]["content"]:
        raise ApiError("continue_final_message needs a last message with content", param="continue_final_message")
    tokenizer = server.tokenizer

    def render() -> Prompt:
        text = tokenizer.apply_chat_template(
            messages,
            tools=None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            **kwargs,
        )
        return Prompt(tokenizer.encode(text, add_special_tokens=body.add_special_tokens), text)

    return await off_loop(render, size=sum(len(m["content"]) for m in messages))


async def completion_prompts(
    server: Server, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, echo: bool
) -> list[Prompt]:
    """Texts, encoded; token ids, checked (and decoded when ``echo`` will show them).

    Raises:
        ApiError: more prompts than the engine would queue, ids outside the vocabulary, or no tokenizer.
    """
    config = server.engine.config
    most = config.max_num_queued_reqs + config.max_num_seqs
    if len(prompts) > most:
        raise ApiError(f"{len(prompts)} prompts in one request; at most {most} are possible", param="prompt")
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_ids(server, prompt, field="prompt")
    if not echo and not any(isinstance(prompt, str) for prompt in prompts):
        return [Prompt(prompt) for prompt in prompts if not isinstance(prompt, str)]
    tokenizer = server.tokenizer

    def both(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
        return Prompt(prompt, tokenizer.decode(prompt, skip_special_tokens=False) if echo else None)

    return await off_loop(lambda: [both(prompt) for prompt in prompts], size=sum(map(len, prompts)))


def check_ids(server: Server, ids: list[int], *, field: str) -> None:
    vocab_size = server.engine.model_config.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ApiError(
            f"{field} holds the token id {bad}; the vocabulary has {vocab_size}", param=field, code="invalid_value"
        )


def output_budget(server: Server, prompt: Prompt, *, asked: int | None, default: int | None, field: str) -> int:
    """How many tokens may be generated.

    Args:
        asked: the request's max_tokens.
        default: for requests that do not say; None: the rest of the context. Cut to what fits.
        field: the prompt's name in the request, for errors.

    Raises:
        ApiError: 400 ``context_length_exceeded``.
    """
    length, limit = len(prompt.token_ids), server.engine.max_model_len
    if not length:
        raise ApiError(f"`{field}` has no tokens", param=field, code="invalid_value")
    if length >= limit:
        raise ApiError(
            f"the prompt has {length} tokens; the context of {limit} must also hold at least one output token",
            param=field,
            code="context_length_exceeded",
        )
    if asked is not None and length + asked > limit:
        raise ApiError(
            f"max_tokens is {asked}; after the prompt's {length} tokens {limit - length} fit the context of {limit}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    return limit - length if default is None else min(default, limit - length)


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Run ``work`` here when its input is short, in a thread when it may take long."""
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def _template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    clash = RESERVED_KWARGS & (kwargs or {}).keys()
    if clash:
        name = min(clash)
        raise ApiError(f"chat_template_kwargs may not hold `{name}`", param="chat_template_kwargs")
    return dict(kwargs or {})
