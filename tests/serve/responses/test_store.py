"""What is kept of responses: whose, how many, how large, how long."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.serve.errors import ApiError
from llmjax.serve.responses.store import ResponseStore, StoredResponse

MOST, MOST_BYTES, LIFETIME = 3, 100, 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_of(clock: Clock, *, most: int = MOST) -> ResponseStore:
    return ResponseStore(most=most, most_bytes=MOST_BYTES, lifetime=LIFETIME, clock=clock)


def response(id: str, owner: str = "a", *, size: int = 10) -> StoredResponse:
    return StoredResponse(id=id, owner=owner, input=b"", num_items=0, answer=b"x" * size)


def has(store: ResponseStore, owner: str, id: str) -> bool:
    try:
        return store.get(owner, id).id == id
    except ApiError as error:
        assert error.status == 404
        return False


def test_a_response_belongs_to_its_owner() -> None:
    store = store_of(Clock())
    store.put(response("x", "a"))
    assert has(store, "a", "x") and not has(store, "b", "x")
    with pytest.raises(ApiError):
        store.delete("b", "x")
    store.delete("a", "x")
    assert not has(store, "a", "x")


def test_a_response_that_is_too_large_is_not_kept_and_drives_the_others_out() -> None:
    store = store_of(Clock())
    store.put(response("small"))
    store.put(response("huge", size=MOST_BYTES + 1))
    assert not has(store, "a", "huge")


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = store_of(Clock(), most=0)
    store.put(response("x"))
    assert not has(store, "a", "x")
    with pytest.raises(ApiError, match="max-stored-responses"):
        store.check_room("a")


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.sampled_from([0.0, 1.0, 6.0]), st.booleans()),
        max_size=30,
    )
)
def test_the_bounds_hold_and_the_oldest_make_room(steps: list[tuple[str, int, float, bool]]) -> None:
    clock = Clock()
    store = store_of(clock)
    model: dict[str, OrderedDict[str, tuple[int, float]]] = {"a": OrderedDict(), "b": OrderedDict()}
    for number, (owner, size, pause, forget) in enumerate(steps):
        clock.now += pause
        for kept in model.values():
            for id in [id for id, (_, expires) in kept.items() if expires <= clock.now]:
                del kept[id]
        kept = model[owner]
        if forget and kept:
            store.delete(owner, kept.popitem()[0])
        id = f"r{number}"
        store.put(response(id, owner, size=size))
        kept[id] = (size, clock.now + LIFETIME)
        while len(kept) > MOST or sum(size for size, _ in kept.values()) > MOST_BYTES:
            kept.popitem(last=False)
        for owner, kept in model.items():
            assert {f"r{i}" for i in range(number + 1) if has(store, owner, f"r{i}")} == kept.keys()
