"""The APIs that a benchmark can measure: how each is asked, and what its answers hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.bench.dataset import Sample


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One API.

    Args:
        path: path of the endpoint.
        fields: a request's own fields.
        only_texts: token ids are not taken.
        sees: pictures are taken.
        streams: answers come as events; else whole, and are not texts.
        text_of: the new text of an event; None: it is about something else.
        usage_of: the number of tokens read and written that an event or answer tells, if it does.
        last: types of events of which one ends a stream, where ``[DONE]`` does not.
    """

    path: str
    fields: Callable[[Sample], dict[str, Any]]
    only_texts: bool = False
    sees: bool = False
    streams: bool = True
    text_of: Callable[[Mapping[str, Any]], str | None] = lambda event: None
    usage_of: Callable[[Mapping[str, Any]], tuple[int, int] | None]
    last: frozenset[str] = frozenset()


def _text_of_choice(event: Mapping[str, Any]) -> str | None:
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""


def _text_of_item(event: Mapping[str, Any]) -> str | None:
    kind = event.get("type", "")
    return event.get("delta") or "" if kind.startswith("response.") and kind.endswith("_text.delta") else None


def _usage(event: Mapping[str, Any]) -> tuple[int, int] | None:
    usage = event.get("usage")
    return None if not usage else (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def _usage_of_response(event: Mapping[str, Any]) -> tuple[int, int] | None:
    usage = (event.get("response") or {}).get("usage")
    return None if not usage else (usage.get("input_tokens", 0), usage.get("output_tokens", 0))


def _usage_of_vectors(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    usage = answer.get("usage") or {}
    return usage.get("prompt_tokens", usage.get("total_tokens", 0)), 0


def _generating(sample: Sample) -> dict[str, Any]:
    return {"max_tokens": sample.output_tokens, "stream": True, "stream_options": {"include_usage": True}}


def _message(sample: Sample) -> list[dict[str, Any]]:
    if not sample.pictures:
        return [{"role": "user", "content": sample.prompt}]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in sample.pictures]
    return [{"role": "user", "content": [{"type": "text", "text": sample.prompt}, *pictures]}]


def _input(sample: Sample) -> Any:
    if not sample.pictures:
        return sample.prompt
    pictures = [{"type": "input_image", "image_url": url} for url in sample.pictures]
    return [{"role": "user", "content": [{"type": "input_text", "text": sample.prompt}, *pictures]}]


def _vectors(sample: Sample) -> dict[str, Any]:
    return {"input": [sample.prompt, *sample.more] if sample.more else sample.prompt, "truncate_prompt_tokens": -1}


def _ranked(sample: Sample) -> dict[str, Any]:
    return {"query": sample.prompt, "documents": list(sample.more), "truncate_prompt_tokens": -1}


BACKENDS: Mapping[str, Backend] = {
    "openai": Backend(
        path="/v1/completions",
        fields=lambda sample: {"prompt": sample.prompt, **_generating(sample)},
        text_of=_text_of_choice,
        usage_of=_usage,
    ),
    "openai-chat": Backend(
        path="/v1/chat/completions",
        fields=lambda sample: {"messages": _message(sample), **_generating(sample)},
        only_texts=True,
        sees=True,
        text_of=_text_of_choice,
        usage_of=_usage,
    ),
    "openai-responses": Backend(
        path="/v1/responses",
        fields=lambda sample: {
            "input": _input(sample), "max_output_tokens": sample.output_tokens, "stream": True, "store": False
        },
        only_texts=True,
        sees=True,
        text_of=_text_of_item,
        usage_of=_usage_of_response,
        last=frozenset({"response.completed", "response.incomplete", "response.failed"}),
    ),
    "openai-embeddings": Backend(
        path="/v1/embeddings",
        fields=_vectors,
        streams=False,
        usage_of=_usage_of_vectors,
    ),
    "vllm-pooling": Backend(
        path="/pooling",
        fields=_vectors,
        streams=False,
        usage_of=_usage_of_vectors,
    ),
    "vllm-rerank": Backend(
        path="/v1/rerank",
        fields=_ranked,
        only_texts=True,
        streams=False,
        usage_of=_usage_of_vectors,
    ),
}  # fmt: skip


def inputs_of(sample: Sample, backend: str) -> int:
    """How many texts a request has; of one that ranks, the documents."""
    return len(sample.more) if backend == "vllm-rerank" else 1 + len(sample.more)
