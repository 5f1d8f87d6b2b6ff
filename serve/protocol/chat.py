"""POST /v1/chat/completions: the request body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.common import ApiModel, at_most, object_of
from llmjax.serve.protocol.llama_cpp import LlamaCppGeneration
from llmjax.serve.protocol.pictures import PICTURE_PARTS, Attachment, picture_of
from llmjax.serve.protocol.pictures import TEXT_ONLY as READS_TEXT
from llmjax.serve.protocol.tools import MAX_TOOLS, template_calls

TEXT_PARTS = frozenset({"text", "input_text"})
MAX_MESSAGES = 8192
MAX_DOCUMENTS = 1024
# Roles that the templates of open models do not know, with what they know: "developer" is OpenAI's newer word for
# "system", "function" its older one for "tool".
ROLES = {"developer": "system", "function": "tool"}
TEXT_ONLY = "is not supported: models read and write text only"
PREPARED = "is not supported: pictures are prepared as the model's own files say"


def unread_part(kind: Any) -> str:
    """What stands in a result in place of a part that is not text."""
    return f"[{cut(str(kind))}: not shown, this model reads text only]"


Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ChatMessage(ApiModel):
    """One turn.

    An answer can be sent back as it came: what servers add to theirs (``annotations``, ``reasoning_details`` …) has no
    effect; what would change the prompt, and is not supported yet, is accepted only empty.
    """

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    tool_calls: Any = None
    tool_call_id: str | None = None
    function_call: Any = None
    refusal: str | None = None
    audio: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": ()}


class Thinking(ApiModel):
    """Anthropic's switch of thinking, which other servers' chats have too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def wanted(self) -> bool:
        return self.type != "disabled"


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]


class ChatTemplateFields(ApiModel):
    """How messages become a prompt; shared with /tokenize."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


Documents = Annotated[list[Annotated[dict[str, str], object_of(str)]], Field(fail_fast=True), at_most(MAX_DOCUMENTS)]


class ChatRequest(LlamaCppGeneration, ChatTemplateFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    conversation_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    record_conversation: bool | None = None

    tool_choice: str | dict[str, Any] | None = None
    functions: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: Any = None
    audio: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    verbosity: Any = None
    web_search_options: Any = None
    echo: bool | None = None
    documents: Documents | None = None
    media_io_kwargs: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: ok for name, ok in LlamaCppGeneration.neutral_values.items() if name != "thinking_token_budget"},
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "web_search_options": (),
        "media_io_kwargs": ({},),
    }
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **LlamaCppGeneration.hints,
        "prediction": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "verbosity": ("medium",),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **LlamaCppGeneration.reasons,
        "media_io_kwargs": PREPARED,
        "modalities": TEXT_ONLY,
        "audio": TEXT_ONLY,
        "web_search_options": "is not supported: the server does not search; give it a tool that does",
        "moderation": "is not supported: answers are not judged",
    }

    @property
    def switches_thinking(self) -> bool | None:
        """candle-vLLM's switch, under either of its names, or Anthropic's."""
        if isinstance(self.thinking, Thinking):
            return self.thinking.wanted
        return self.enable_thinking if self.thinking is None else self.thinking

    @property
    def hinted_budget(self) -> int | None:
        """Reasoning tokens that Anthropic's switch of thinking gives, to models that are known to reason."""
        thinking = self.thinking if isinstance(self.thinking, Thinking) else None
        return thinking.budget_tokens if thinking is not None and thinking.wanted else None

    @property
    def echoed(self) -> str:
        """What stands before each answer: with ``echo``, the last message, if it is the assistant's own."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        if isinstance(last.content, list):
            return "\n".join(part["text"] for part in last.content)
        return last.content or ""

    @property
    def max_tokens_field(self) -> str:
        """The name under which the request says how many tokens it wants."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_tokens(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                f"max_completion_tokens {both[0]} contradicts max_tokens {both[1]}", param="max_completion_tokens"
            )
        return self.max_tokens if both[0] is None else both[0]

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None


MAX_CONVERSATIONS = 128  # of one request
ONE_ANSWER = "is not supported here: each conversation gets one answer, and it comes whole"
UNKEPT = "is not supported here: /v1/chat/completions keeps conversations"


class BatchChatRequest(ChatRequest):
    """POST /v1/chat/completions/batch: the fields of a chat, and several conversations."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Field(fail_fast=True, min_length=1), at_most(MAX_CONVERSATIONS)
    ]

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatRequest.neutral_values,
        "n": (1,),
        "best_of": (1,),
        "stream": (False,),
        "use_beam_search": (False,),
        "prompt_logprobs": (),
        "conversation_id": (),
        "record_conversation": (False,),
        "kv_transfer_params": ({},),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **ChatRequest.reasons,
        **dict.fromkeys(("n", "best_of", "stream", "use_beam_search"), ONE_ANSWER),
        **dict.fromkeys(("conversation_id", "record_conversation"), UNKEPT),
        "prompt_logprobs": "is not supported here; /v1/chat/completions has it",
        "kv_transfer_params": "is not supported here: it belongs to one prompt",
    }

    def chats(self) -> list[ChatRequest]:
        """A request for each conversation."""
        shared = {name: getattr(self, name) for name in self.model_fields_set if name != "messages"}
        return [ChatRequest.model_construct(**shared, messages=messages) for messages in self.messages]


def num_parts(messages: Sequence[ChatMessage]) -> int:
    """How many texts the messages hold, of which one alone is a part too."""
    return sum(len(m.content) if isinstance(m.content, list) else 1 for m in messages)


def template_messages(
    messages: Sequence[ChatMessage], pictures: list[Attachment] | None = None
) -> list[dict[str, Any]]:
    """Messages as chat templates know them: no empty extras, of content parts the text, and where pictures stand.

    The result of a call gets the name of the tool, which some templates want and the API does not ask for.

    Args:
        pictures: takes the pictures, in order; None: the model sees none.

    Raises:
        ApiError: a message needs something other than that.
    """
    turns = [_template_message(message, f"messages.{i}", pictures) for i, message in enumerate(messages)]
    names: dict[str, str] = {}
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ()) if "id" in call}
        if turn["role"] == "tool" and (name := names.get(turn.get("tool_call_id", ""))) is not None:
            turn.setdefault("name", name)
    return turns


def _template_message(message: ChatMessage, path: str, pictures: list[Attachment] | None) -> dict[str, Any]:
    for field, neutral in ChatMessage.neutral_values.items():
        if getattr(message, field) not in (None, *neutral):
            raise ApiError(
                f"`{path}.{field}` is not supported yet", param=f"{path}.{field}", code="unsupported_parameter"
            )
    role = ROLES.get(message.role, message.role)
    content = message.content
    if message.role == "assistant":
        content = content or message.refusal or content  # what it said instead
    elif message.role == "tool":
        content = content or ""  # a tool may have nothing to say
    elif content is None or content == []:
        raise ApiError(
            f"`{path}.content` is required in a message of role {message.role}",
            param=f"{path}.content",
            code="missing_required_parameter",
        )
    turn: dict[str, Any] = {"role": role, "content": _content(content, f"{path}.content", role, pictures)}
    for field in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, field)) is not None:
            turn[field] = value
    if message.function_call is not None:
        call = [{"type": "function", "function": message.function_call}]
        turn["tool_calls"] = template_calls(call, f"{path}.function_call")
    if message.tool_calls:
        turn["tool_calls"] = template_calls(message.tool_calls, f"{path}.tool_calls")
    return turn


def _content(
    content: str | list[dict[str, Any]] | None, path: str, role: str, pictures: list[Attachment] | None
) -> str | list[dict[str, str]] | None:
    """Content as templates know it. A tool's result cannot be asked for again; in it a note stands for parts that
    cannot be read.

    Args:
        pictures: as for `template_messages`.
    """
    result = role == "tool"
    if not isinstance(content, list):
        return content
    parts: list[dict[str, str]] = []
    for i, part in enumerate(content):
        kind = part.get("type", "text")
        if isinstance(kind, str) and kind in PICTURE_PARTS and (pictures is not None or not result):
            if pictures is None:
                raise ApiError(
                    f"`{path}.{i}.type`: {READS_TEXT}", param=f"{path}.{i}.type", code="unsupported_parameter"
                )
            if role not in ("user", "tool"):
                raise ApiError(
                    f"`{path}.{i}`: {PICTURE_PARTS[kind]}s cannot stand in a message of role {role}",
                    param=f"{path}.{i}.type",
                    code="unsupported_parameter",
                )
            pictures.append(picture_of(part, f"{path}.{i}"))
            parts.append({"type": PICTURE_PARTS[kind]})
            continue
        if result and isinstance(kind, str) and kind not in TEXT_PARTS:
            parts.append({"type": "text", "text": unread_part(kind)})
            continue
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise ApiError(
                f"`{path}.{i}.type`: {str(kind)[:40]!r} parts are not supported yet",
                param=f"{path}.{i}.type",
                code="unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise ApiError(f"`{path}.{i}.text` must be a string", param=f"{path}.{i}.text", code="invalid_type")
        parts.append({"type": "text", "text": part["text"]})
    return parts
