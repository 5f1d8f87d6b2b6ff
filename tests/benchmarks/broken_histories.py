"""Histories as agents leave them when something went wrong, in each API's own form: changes of a request's body."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

Body = dict[str, Any]


def _field(body: Body) -> str:
    return "input" if "input" in body else "messages"


def _is_result(item: Mapping[str, Any]) -> bool:
    """Whether an item or a message brings what tools have found."""
    blocks = item["content"] if isinstance(item.get("content"), list) else []
    return (
        item.get("role") == "tool"
        or str(item.get("type", "")).endswith("_call_output")
        or any(block.get("type") == "tool_result" for block in blocks)
    )


def _results(body: Body) -> list[int]:
    """Places of results in the history."""
    return [place for place, item in enumerate(body[_field(body)]) if _is_result(item)]


def repeated(body: Body) -> Body:
    """The same again, as after a broken connection."""
    return body


def compacted(body: Body) -> Body:
    """Without the middle of the conversation, from an answer to an answer."""
    body = copy.deepcopy(body)
    items = body[_field(body)]
    answers = [place for place, item in enumerate(items) if item.get("role") == "assistant"]
    del items[answers[len(answers) // 3] : answers[2 * len(answers) // 3]]
    return body


def without_result(body: Body) -> Body:
    """The last call was interrupted: its result is missing, and the user goes on."""
    body = copy.deepcopy(body)
    items = body[_field(body)]
    if places := _results(body):
        del items[places[-1]]
    items.append(_asked("Go on.", body))
    return body


def out_of_order(body: Body) -> Body:
    """Results of calls that were made together came in another order."""
    body = copy.deepcopy(body)
    items, places = body[_field(body)], _results(body)
    for item in items:
        if isinstance(item.get("content"), list) and _is_result(item):
            item["content"].reverse()
    for one, other in itertools.pairwise(places):
        if other == one + 1:
            items[one], items[other] = items[other], items[one]
        if "input" in body and other == one + 2:  # call, result, call, result
            items[one : other + 1] = [items[one + 1], items[other], items[one]]
    return body


def with_empty_answers(body: Body) -> Body:
    """The model has said nothing twice: once it was asked again, once it was told to go on."""
    body = copy.deepcopy(body)
    items = body[_field(body)]
    for text in ("Are you there?", "Go on."):
        items += [_said("", body), _asked(text, body)]
    return body


def _asked(text: str, body: Body) -> dict[str, Any]:
    if "input" in body:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def _said(text: str, body: Body) -> dict[str, Any]:
    if "input" in body:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"role": "assistant", "content": [{"type": "text", "text": text}] if "system" in body else text}


BROKEN: Mapping[str, Callable[[Body], Body]] = {
    "repeated": repeated,
    "compacted": compacted,
    "without a result": without_result,
    "out of order": out_of_order,
    "with empty answers": with_empty_answers,
}


def gone_on(body: Body) -> Body:
    """The next turn, after an answer."""
    body = copy.deepcopy(body)
    body[_field(body)] += [_said("Well.", body), _asked("Go on.", body)]
    return body
