"""The limits of requests: what is refused, under which name, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmjax.engine.front.limits import RequestLimits
from llmjax.errors import InvalidRequest, PromptTooLong

LIMITS = RequestLimits(vocab_size=96, max_model_len=64, max_logprobs=5, priorities=False)


def test_what_is_within_the_limits_passes() -> None:
    for priority in (None, 0):
        LIMITS.check_priority(priority)
    RequestLimits(vocab_size=1, max_model_len=1, max_logprobs=0, priorities=True).check_priority(-3)
    for count in (None, 0, 5):
        LIMITS.check_logprobs(count, field="logprobs")
    for ids in ([], [0, 95]):
        LIMITS.check_ids(ids)
    assert [LIMITS.check_prompt(length) for length in (1, 60, 63)] == [63, 4, 1]


@pytest.mark.parametrize(
    ("check", "field", "message"),
    [
        (lambda: LIMITS.check_priority(1), "priority", "priority needs a server started with --scheduling-policy"),
        (lambda: LIMITS.check_logprobs(6, field="top_logprobs"), "top_logprobs", "between 0 and 5 .*, not 6"),
        (lambda: LIMITS.check_logprobs(-1, field="logprobs"), "logprobs", "between 0 and 5 .*, not -1"),
        (lambda: LIMITS.check_ids([3, 96], field="items.2"), "items.2", "items.2 holds token id 96; .* 96 tokens"),
        (lambda: LIMITS.check_ids([-1, 96]), "prompt", "prompt holds token id -1"),
        (lambda: LIMITS.check_prompt(0, field="messages"), "messages", "messages has no tokens"),
    ],
)
def test_the_field_at_fault_is_named(check: Callable[[], None], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check()
    assert caught.value.field == field


def test_a_prompt_that_leaves_no_room_says_by_how_much() -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 64 tokens; the context of 64 must") as caught:
        LIMITS.check_prompt(64, field="messages")
    assert (caught.value.field, caught.value.tokens, caught.value.limit) == ("messages", 64, 63)
