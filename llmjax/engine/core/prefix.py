"""Search for a prompt's cached prefix: for each full page and each group of layers, where the page's content is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llmjax.engine.core.layer_states import LayerStates
from llmjax.engine.core.media import PromptMedia
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.tier import Place

NO_PAGE = -1

Places = tuple[Place, ...]

NOW: Places = (Place.DEVICE,)  # a prefix in these places can be used as it is
SOON: Places = (Place.DEVICE, Place.NEXT_STEP)  # can be used after the step that is being planned
RESTORED: Places = (Place.DEVICE, Place.HOST)  # can be used if pages are restored before that step
FETCHED: Places = (Place.DEVICE, Place.HOST, Place.DISK)  # can be used after waiting for the disk


class Found(NamedTuple):
    """A page of known content, and where it is."""

    place: Place
    page: int = NO_PAGE  # its number, if it is on the device


@dataclass(frozen=True)
class Prefix:
    """Where the first pages of a prompt are.

    Attributes:
        groups: the groups of layers.
        pages: by group, then by index of the page; None: the page is nowhere.
        media: the images of the prompt; no prefix ends inside one that has to be computed as a whole.

    An example: pages of 16 tokens, of which full attention needs all, and a window of 20 tokens the last ones::

        page               0     1     2     3
        full attention  DEVICE DEVICE DEVICE HOST    longest(NOW) = 0: after 3 pages the window needs pages 1 and 2,
        window of 20       -      -   DEVICE DEVICE  and page 1 is gone; after 2 it needs 0 and 1, after 1 page 0
                                                     longest(RESTORED) = 4: the window needs pages 2 and 3
    """

    groups: list[LayerStates]
    pages: list[list[Found | None]]
    media: PromptMedia | None = None

    def lengths(self, places: Places, *, most: int | None = None) -> Iterator[int]:
        """Numbers of pages after which each group has, in the given places, all that the next token needs.

        Args:
            places: where pages may be.
            most: pages at most.

        Yields:
            The numbers, the largest first, without 0.
        """
        end = len(self.pages[0]) if most is None else min(most, len(self.pages[0]))
        partial = []
        for group, pages in zip(self.groups, self.pages, strict=True):
            if group.keeps_all:
                end = next((i for i, found in enumerate(pages[:end]) if not _within(found, places)), end)
            else:
                partial.append((group, pages))
        for length in range(end, 0, -1):
            tokens = length * self.groups[0].page_size
            if self.media is not None and self.media.floor(tokens) < tokens:
                continue
            if all(_within(found, places) for g, pages in partial for found in pages[g.first_needed(tokens) : length]):
                yield length

    def longest(self, places: Places, *, most: int | None = None) -> int:
        """The largest of ``lengths``; 0 if there is none."""
        return next(self.lengths(places, most=most), 0)


class PageKeys:
    """The keys of sequences' pages: what decides whether two sequences may share one.

    Args:
        page_size: tokens of a page.
        shared: whether different requests may share pages; continuations of one request always may.
        prompt_kind: maps a prompt's length to its kind; prompts of different kinds share no pages.
    """

    def __init__(self, *, page_size: int, shared: bool, prompt_kind: Callable[[int], tuple[int, ...]]) -> None:
        self.page_size = page_size
        self.shared = shared
        self._prompt_kind = prompt_kind

    def of(self, sequence: Sequence, index: int) -> PageKey:
        """Key of a sequence's full page ``index``; those of the pages before it must have been asked for."""
        tokens = tuple(sequence.tokens[index * self.page_size : (index + 1) * self.page_size])
        if index < len(sequence.keys):
            return PageKey(sequence.keys[index], tokens)
        parent = sequence.keys[index - 1] if index else self._root(sequence)
        if (media := sequence.request.media) is not None:
            parent = PageKey.marked(parent, media.marks(index * self.page_size, (index + 1) * self.page_size))
        key = PageKey.chain(parent, tokens)
        sequence.keys.append(key.digest)
        return key

    def num_sharable(self, sequence: Sequence) -> int:
        """Full pages that may be found instead of computed. The last token is computed: its logits are needed."""
        if sequence.needs_every_position or sequence.request.params.skip_reading_prefix_cache:
            return 0
        return (len(sequence.tokens) - 1) // self.page_size

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        if not self.shared:
            return PageKey.root("request", str(request.request_id))
        kind = "".join(f"{part} " for part in self._prompt_kind(sequence.num_prompt_tokens))
        return PageKey.shared(request.cache_salt, sequence.digest, kind)


def _within(found: Found | None, places: Places) -> bool:
    return found is not None and found.place in places
