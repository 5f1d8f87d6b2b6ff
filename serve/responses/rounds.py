"""Which calls of a response were one answer of the model: the ids of their items say it."""

from __future__ import annotations

import re
import uuid

MARKED = re.compile(r"[a-z]+_r([0-9a-f]{12})_[0-9a-f]{16}")


def new_round() -> str:
    """A mark for the calls of one answer."""
    return uuid.uuid4().hex[:12]


def id_in_round(prefix: str, round: str) -> str:
    """A new id of a call that belongs to a round.

    Args:
        prefix: what ids of its kind begin with.
        round: what `new_round` has returned.
    """
    return f"{prefix}_r{round}_{uuid.uuid4().hex[:16]}"


def round_of(id: object) -> str | None:
    """The round that an id names; None: it was not made here."""
    found = MARKED.fullmatch(id) if isinstance(id, str) else None
    return None if found is None else found[1]
