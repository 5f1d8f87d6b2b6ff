"""Pictures and videos that callers have named, so that a name alone brings them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from llmjax.errors import InvalidRequest

NAMED_BYTES = 1 << 28  # of prepared pictures and videos that are kept by name
MOST_CHARACTERS = 256  # of a name
FIELD = "multi_modal_uuids"


class Prepared(Protocol):
    """A prepared picture or video."""

    @property
    def nbytes(self) -> int:
        """The size of its patches."""


T = TypeVar("T", bound=Prepared)


class NamedMedia:
    """Prepared pictures and videos by name, the last ones that were asked for; any thread may ask.

    Args:
        most: bytes of them at most.
    """

    def __init__(self, most: int = NAMED_BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, given: Any, prepare: Callable[[Any], T]) -> T:
        """What has a name: as it was prepared when it was first given, or prepared now.

        Args:
            key: the name, with all else that decides what is prepared.
            given: a picture or a video; None: what was given with this name before.
            prepare: prepares what is given.

        Raises:
            InvalidRequest: nothing is given, and nothing of the name is kept; or as ``prepare``.
        """
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                known: T = found
                return known
        if given is None:
            raise InvalidRequest("nothing is given, and nothing with this name is kept: give it again", field=FIELD)
        made = prepare(given)
        with self._lock:
            if key not in self._kept and made.nbytes <= self._most:
                self._kept[key] = made
                self._bytes += made.nbytes
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


def names_of(uuids: Any, kind: str, count: int) -> Sequence[str | None]:
    """The names of pictures or videos in vLLM's ``multi_modal_uuids``, one or None for each.

    Args:
        uuids: as a prompt has it; None: there are none.
        kind: "image" or "video".
        count: how many are given.

    Raises:
        InvalidRequest: it has another form, or another number of names.
    """
    if uuids is None:
        return [None] * count
    if not isinstance(uuids, Mapping) or not uuids.keys() <= {"image", "video"}:
        raise InvalidRequest("multi_modal_uuids must be an object with 'image', 'video' or both", field=FIELD)
    found = uuids.get(kind)
    if found is None:
        return [None] * count
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list | tuple) or len(names) != count:
        raise InvalidRequest(
            f"multi_modal_uuids: {kind!r} must have a name or None for each of the {count} that multi_modal_data has",
            field=FIELD,
        )
    for name in names:
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_CHARACTERS):
            raise InvalidRequest(
                f"multi_modal_uuids: a name is a string of 1 to {MOST_CHARACTERS} characters", field=FIELD
            )
    return names
