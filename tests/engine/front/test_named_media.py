"""Pictures and videos by the names that callers have given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from llmjax.engine.front.named_media import NamedMedia, names_of
from llmjax.errors import InvalidRequest


@dataclass(frozen=True)
class Thing:
    """Something prepared."""

    given: int
    nbytes: int = 40


def test_a_name_brings_what_was_given_first() -> None:
    named = NamedMedia(most=100)
    assert named.get("a", 1, Thing) == Thing(1)
    assert named.get("a", 2, Thing) == named.get("a", None, Thing) == Thing(1)
    named.get("b", 2, Thing)
    named.get("a", None, Thing)
    named.get("c", 3, Thing)  # for which the one that was not asked for longest makes room
    assert named.get("a", None, Thing) == Thing(1)
    with pytest.raises(InvalidRequest, match="nothing with this name is kept"):
        named.get("b", None, Thing)
    assert named.get("b", 4, Thing) == Thing(4)


def test_what_is_too_large_is_not_kept() -> None:
    named = NamedMedia(most=30)
    assert named.get("a", 1, Thing) == Thing(1)
    with pytest.raises(InvalidRequest, match="give it again"):
        named.get("a", None, Thing)


def test_names_of_each() -> None:
    assert names_of(None, "image", 2) == [None, None]
    assert names_of({"video": "v"}, "image", 1) == [None]
    assert names_of({"image": "a"}, "image", 1) == ["a"]
    assert names_of({"image": ["a", None]}, "image", 2) == ["a", None]


@pytest.mark.parametrize(
    ("uuids", "count", "reason"),
    [
        (["a"], 1, "must be an object"),
        ({"audio": ["a"]}, 1, "must be an object"),
        ({"image": ["a"]}, 2, "for each of the 2"),
        ({"image": 3}, 1, "for each of the 1"),
        ({"image": [""]}, 1, "1 to 256 characters"),
        ({"image": ["a" * 257]}, 1, "1 to 256 characters"),
        ({"image": [3]}, 1, "a name is a string"),
    ],
)
def test_wrong_names(uuids: Any, count: int, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        names_of(uuids, "image", count)
