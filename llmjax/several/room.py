"""Room for a model among others: which of them are put to sleep, or unloaded, so that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Amounts = Mapping[str, int]  # of each resource


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a model holds.

    Args:
        held: amounts that it holds now.
        asleep: amounts that it would hold if it slept; None: it cannot be put to sleep.
        used: when it was last used, on any clock.
        busy: whether it has requests in flight, or changes its state.
        pinned: whether it stays as it is.
    """

    held: Amounts
    asleep: Amounts | None
    used: float
    busy: bool = False
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class Room:
    """What has to happen before a model fits; nothing: it does.

    Args:
        sleep: models to put to sleep.
        unload: models to unload.
        wait: busy models that have to become idle first; then there is another plan.
    """

    sleep: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    wait: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sleep or self.unload or self.wait)


class NoRoom(Exception):
    """A model does not fit beside those that stay, whatever else is unloaded.

    Args:
        missing: amounts that are missing then.
    """

    def __init__(self, missing: Amounts) -> None:
        super().__init__(missing)
        self.missing = missing


def make_room(need: Amounts, budget: Amounts, places: Mapping[str, Place]) -> Room:
    """The least that has to happen, least recently used models first: idle ones sleep, then are unloaded; only where
    that is not enough are busy ones waited for.

    Args:
        need: amounts that the model is going to hold.
        budget: amounts that there are, of each resource.
        places: the other models, by name.

    Raises:
        NoRoom: see there.
    """
    short = missing(need, budget, [place.held for place in places.values()])
    if not short:
        return Room()
    order = sorted((name for name, place in places.items() if not place.pinned), key=lambda name: places[name].used)
    idle, busy = ([name for name in order if places[name].busy is state] for state in (False, True))
    for count in range(len(idle) + 1):
        sleepers = [name for name in idle[count:] if places[name].asleep is not None]
        if _fits(short, places, sleep=sleepers, unload=idle[:count]):
            return _least(short, places, sleep=sleepers, unload=idle[:count])
    for count in range(1, len(busy) + 1):
        if _fits(short, places, sleep=(), unload=[*idle, *busy[:count]]):
            room = _least(short, places, sleep=(), unload=[*busy[:count], *idle])
            return Room(wait=tuple(name for name in room.unload if places[name].busy))
    raise NoRoom(_still_short(short, places, sleep=(), unload=order))


def _least(short: Amounts, places: Mapping[str, Place], *, sleep: Sequence[str], unload: Sequence[str]) -> Room:
    """Without the models that can be left alone: those that come last are spared first, unloading before sleeping."""
    sleep, unload = list(sleep), list(unload)
    for name in reversed(unload[:]):
        if _fits(short, places, sleep=sleep, unload=(rest := [other for other in unload if other != name])):
            unload = rest
    for name in reversed(sleep[:]):
        if _fits(short, places, sleep=(rest := [other for other in sleep if other != name]), unload=unload):
            sleep = rest
    return Room(sleep=tuple(sleep), unload=tuple(unload))


def missing(need: Amounts, budget: Amounts, held: Sequence[Amounts]) -> dict[str, int]:
    """Amounts by which a need exceeds what is left of the budget; empty: it fits."""
    left = {name: budget.get(name, 0) - sum(each.get(name, 0) for each in held) for name in need}
    return {name: amount - left[name] for name, amount in need.items() if amount > max(left[name], 0)}


def _fits(short: Amounts, places: Mapping[str, Place], *, sleep: Sequence[str], unload: Sequence[str]) -> bool:
    return not _still_short(short, places, sleep=sleep, unload=unload)


def _still_short(
    short: Amounts, places: Mapping[str, Place], *, sleep: Sequence[str], unload: Sequence[str]
) -> dict[str, int]:
    """What is missing when some models sleep and some are unloaded."""
    left = dict(short)
    for resource in left:
        left[resource] -= sum(places[name].held.get(resource, 0) for name in unload)
        for name in sleep:
            place = places[name]
            left[resource] -= place.held.get(resource, 0) - (place.asleep or {}).get(resource, 0)
    return {name: amount for name, amount in left.items() if amount > 0}
