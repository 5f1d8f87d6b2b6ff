"""The longest cached prefix, from tables that say where each page is."""

from __future__ import annotations

import pytest

from llmjax.engine.core.layer_states import GroupSpec, LayerStates, kind_of
from llmjax.engine.core.prefix import FETCHED, NOW, RESTORED, SOON, Found, Places, Prefix
from llmjax.engine.core.tier import NoTier, Place
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Span

pytestmark = pytest.mark.smoke

ALL, STATE, WINDOW = AllTokens(), LastState(), LastTokens(20)
LETTERS = {"d": Place.DEVICE, "n": Place.NEXT_STEP, "h": Place.HOST, "f": Place.DISK}  # a dot: nowhere


def prefix_of(rows: dict[Span, str]) -> Prefix:
    """A prefix with pages of 16 tokens; each letter of a row says where a page is."""
    groups: list[LayerStates] = [
        kind_of(span)(GroupSpec(span=span, num_pages=9), page_size=16, num_slots=1, pages_per_sequence=8)
        for span in rows
    ]
    pages = [[Found(LETTERS[letter]) if letter in LETTERS else None for letter in row] for row in rows.values()]
    return Prefix(groups, pages)


@pytest.mark.parametrize(
    ("rows", "places", "lengths"),
    [
        # The example of `Prefix`.
        ({ALL: "dddh", WINDOW: "..dd"}, NOW, []),
        ({ALL: "dddh", WINDOW: "..dd"}, RESTORED, [4]),
        # All tokens: up to the first page that is too far away.
        ({ALL: "dddd"}, NOW, [4, 3, 2, 1]),
        ({ALL: "ddhd"}, NOW, [2, 1]),
        ({ALL: "ddhf"}, RESTORED, [3, 2, 1]),
        ({ALL: "ddhf"}, FETCHED, [4, 3, 2, 1]),
        ({ALL: ""}, FETCHED, []),
        # A window of 20 tokens needs the last two pages.
        ({WINDOW: "dd.d"}, NOW, [2, 1]),
        ({WINDOW: ".dd."}, NOW, [3]),
        ({WINDOW: "h.hd"}, NOW, []),
        ({WINDOW: "h.hd"}, RESTORED, [4, 1]),
        # A state needs the last page alone; the step being planned may not read what it writes.
        ({STATE: "..d."}, NOW, [3]),
        ({STATE: ".d.n"}, NOW, [2]),
        ({STATE: ".d.n"}, SOON, [4, 2]),
        ({STATE: ".d.n"}, RESTORED, [2]),
        # Every group has its say.
        ({ALL: "ddd", WINDOW: "ddd", STATE: "d.."}, NOW, [1]),
        ({ALL: "dddd", WINDOW: "d.dd", STATE: "d..h"}, NOW, [1]),
        ({ALL: "dddd", WINDOW: "d.dd", STATE: "d..h"}, RESTORED, [4, 1]),
        ({ALL: "dhdd", WINDOW: "dddd", STATE: "dddd"}, NOW, [1]),
    ],
)
def test_a_prefix_ends_where_a_group_lacks_what_the_next_token_needs(
    rows: dict[Span, str], places: Places, lengths: list[int]
) -> None:
    prefix = prefix_of(rows)
    assert list(prefix.lengths(places)) == lengths
    assert prefix.longest(places) == max(lengths, default=0)
    for most in range(6):
        assert list(prefix.lengths(places, most=most)) == [length for length in lengths if length <= most]


def test_nothing_below_the_device_has_nothing() -> None:
    with pytest.raises(LookupError, match="a page that is nowhere cannot be restored"):
        NoTier().restore(0, None, 1)  # type: ignore[arg-type]
    assert NoTier().fetched("anybody", seconds=1.0)
