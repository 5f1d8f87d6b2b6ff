"""Which models leave so that another fits: examples, and what holds of every plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.several.room import NoRoom, Place, Room, make_room, missing

pytestmark = pytest.mark.smoke

MEMORY, CARD = "memory", "card 0"
BUDGET = {MEMORY: 100, CARD: 100}


def place(
    held: int, used: float, *, asleep: int | None = None, card: int = 0, busy: bool = False, pinned: bool = False
) -> Place:
    return Place(
        held={MEMORY: held, CARD: card},
        asleep=None if asleep is None else {MEMORY: asleep, CARD: card},
        used=used,
        busy=busy,
        pinned=pinned,
    )


def room(need: int, places: dict[str, Place], *, card: int = 0) -> Room:
    return make_room({MEMORY: need, CARD: card}, BUDGET, places)


def test_what_fits_needs_nothing() -> None:
    assert room(40, {"a": place(60, 1)}) == Room()
    assert not room(40, {"a": place(60, 1)})


def test_the_least_recently_used_leaves() -> None:
    assert room(40, {"a": place(50, 2), "b": place(50, 1)}).unload == ("b",)


def test_sleeping_is_enough_where_it_is() -> None:
    places = {"a": place(50, 1, asleep=20), "b": place(50, 2, asleep=20)}
    assert room(30, places) == Room(sleep=("a",))
    assert room(60, places) == Room(sleep=("a", "b"))
    assert room(70, places) == Room(sleep=("b",), unload=("a",))
    assert room(100, places) == Room(unload=("a", "b"))


def test_who_holds_nothing_of_what_is_short_stays() -> None:
    places = {"a": place(10, 1), "b": place(10, 2, card=90)}
    assert room(10, places, card=50) == Room(unload=("b",))


def test_busy_models_are_waited_for_only_when_idle_ones_are_not_enough() -> None:
    places = {"a": place(50, 1, busy=True), "b": place(50, 2)}
    assert room(50, places) == Room(unload=("b",))
    assert room(60, places) == Room(wait=("a",))


def test_pinned_models_stay() -> None:
    with pytest.raises(NoRoom) as caught:
        room(60, {"a": place(50, 1, pinned=True), "b": place(50, 2)})
    assert caught.value.missing == {MEMORY: 10}


amounts = st.integers(0, 60)
places = st.builds(
    lambda held, asleep, card, used, busy, pinned: place(
        held, used, asleep=None if asleep is None else min(asleep, held), card=card, busy=busy, pinned=pinned
    ),
    amounts,
    st.none() | amounts,
    amounts,
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
)


def left(places: dict[str, Place], found: Room) -> list[dict[str, int]]:
    """What is held after a plan."""
    return [
        dict(one.asleep or {}) if name in found.sleep else dict(one.held)
        for name, one in places.items()
        if name not in found.unload
    ]


@given(memory=amounts, card=amounts, places=st.dictionaries(st.sampled_from("abcdef"), places))
def test_plans_fit_spare_and_do_no_more_than_they_must(memory: int, card: int, places: dict[str, Place]) -> None:
    need = {MEMORY: memory, CARD: card}
    try:
        found = make_room(need, BUDGET, places)
    except NoRoom as error:
        stay = [one.held for one in places.values() if one.pinned]
        assert missing(need, BUDGET, stay) == error.missing != {}
        return
    for name in (*found.sleep, *found.unload, *found.wait):
        assert not places[name].pinned
    assert not any(places[name].busy for name in (*found.sleep, *found.unload))
    assert all(places[name].busy for name in found.wait)
    assert not {*found.sleep} & {*found.unload}
    if found.wait:
        idle = tuple(name for name, one in places.items() if not one.busy and not one.pinned)
        assert missing(need, BUDGET, left(places, Room(unload=idle)))
        assert not missing(need, BUDGET, left(places, Room(unload=(*idle, *found.wait))))
        return
    assert not missing(need, BUDGET, left(places, found))
    for name in found.unload:
        fewer = Room(sleep=found.sleep, unload=tuple(other for other in found.unload if other != name))
        assert missing(need, BUDGET, left(places, fewer))
    for name in found.sleep:
        fewer = Room(sleep=tuple(other for other in found.sleep if other != name), unload=found.unload)
        assert missing(need, BUDGET, left(places, fewer))
