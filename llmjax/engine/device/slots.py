"""Makes, on the host, the edits for sampling state that does not fit in a row, and for page tables of long prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from llmjax.arrays import Ints
from llmjax.engine.core.layer_states import TABLE_CHUNK, TableChanges
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.scheduler import Row
from llmjax.engine.device.commands import Edit
from llmjax.sampling.params import MAX_SCORED, MAX_WINDOW
from llmjax.sampling.settings import MAX_BANS, Feature, RequestSampling

CHUNK = 512  # ids that an edit takes at once


def table_edit(changes: TableChanges, *, size: int) -> Edit:
    """Writes entries of page tables.

    Args:
        changes: at most TABLE_CHUNK.
        size: entries of all page tables.
    """
    entry, page = np.full(TABLE_CHUNK, size, np.int32), np.zeros(TABLE_CHUNK, np.int32)
    entry[: len(changes.entry)], page[: len(changes.page)] = changes.entry, changes.page
    return Edit("write_pages", [entry, page])


class SlotEdits:
    """Makes edits of slots of `SamplerState`.

    Args:
        vocab_size: tokens that the state knows.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def set_up(self, sequence: Sequence, sampling: RequestSampling) -> Iterator[Edit]:
        """Sets up a sequence's slot; a sequence that was preempted already has output."""
        count = sequence.num_prompt_tokens
        return self.begin(sequence.slot, sampling, prompt=sequence.tokens[:count], output=sequence.tokens[count:])

    def before_sampling(self, row: Row, sampling: RequestSampling) -> Iterator[Edit]:
        """Brings a slot up to date before its row samples the next token."""
        sequence = row.sequence
        produced = row.start + row.count - sequence.num_prompt_tokens  # output tokens before the next one
        if sampling.min_tokens and produced == sampling.min_tokens:
            yield from self._bias(sequence.slot, sampling.stop_ids, sampling.stop_values)  # it may end from now on
        if sampling.bans_vary:
            # The host may not know the last token yet; the ban is conditional on it.
            history = sequence.tokens[: row.start + row.count - 1]
            yield self._ban(sequence.slot, sampling, history=history)

    def begin(self, slot: int, sampling: RequestSampling, *, prompt: list[int], output: list[int]) -> Iterator[Edit]:
        """Gives a slot to a sequence with these tokens."""
        at = np.array(slot, np.int32)
        yield Edit("reset_slot", [at, np.array(sampling.bias_fill, np.float32)])
        if sampling.features & Feature.PENALTY:
            older = max(0, len(prompt) + len(output) - sampling.window) if sampling.window else 0
            for ids in self._chunks(np.asarray(prompt[older:], np.int32)):
                yield Edit("add_prompt_tokens", [at, ids])
            for ids in self._chunks(np.asarray(output[max(0, older - len(prompt)) :], np.int32)):
                yield Edit("add_output_tokens", [at, ids])
        if sampling.window:
            yield Edit("set_recent", [at, recent_tokens(prompt, output)])
        if sampling.scored:
            scored = np.full(MAX_SCORED, self._vocab_size, np.int32)
            scored[: len(sampling.scored)] = sampling.scored
            yield Edit("set_scored", [at, scored])
        if sampling.features & Feature.BIAS:
            yield from self._bias(slot, sampling.bias_ids, sampling.bias_values)
            if len(output) < sampling.min_tokens:
                forbidden = np.full(len(sampling.stop_ids), -np.inf, np.float32)
                yield from self._bias(slot, sampling.stop_ids, forbidden)
        if sampling.bad_words:
            yield self._ban(slot, sampling, history=[*prompt, *output][:-1])

    def _ban(self, slot: int, sampling: RequestSampling, *, history: list[int]) -> Edit:
        """Sets the tokens that bad words forbid next.

        Args:
            history: all tokens but the last.
        """
        previous = np.full(MAX_BANS, -1, np.int32)
        tokens = np.full(MAX_BANS, self._vocab_size, np.int32)
        for i, pair in enumerate(sampling.bans(history)):
            previous[i], tokens[i] = pair
        return Edit("set_bans", [np.array(slot, np.int32), previous, tokens])

    def _bias(self, slot: int, ids: Ints, values: npt.NDArray[np.float32]) -> Iterator[Edit]:
        for start, chunk in zip(range(0, len(ids), CHUNK), self._chunks(ids), strict=True):
            part = np.zeros(CHUNK, np.float32)
            part[: len(ids) - start] = values[start : start + CHUNK]
            yield Edit("set_bias", [np.array(slot, np.int32), chunk, part])

    def _chunks(self, ids: Ints) -> Iterator[Ints]:
        for start in range(0, len(ids), CHUNK):
            chunk = np.full(CHUNK, self._vocab_size, np.int32)
            chunk[: len(ids) - start] = ids[start : start + CHUNK]
            yield chunk


def recent_tokens(prompt: list[int], output: list[int], *, size: int = MAX_WINDOW + 1) -> Ints:
    """``SamplerState.recent`` of a slot: the last ``size`` tokens, each at its position modulo ``size``."""
    marked = [-token - 1 for token in prompt[max(0, len(prompt) + len(output) - size) :]]
    marked += [token + 1 for token in output[-size:]]
    recent = np.zeros(size, np.int32)
    end = len(prompt) + len(output)
    recent[np.arange(end - len(marked), end) % size] = marked
    return recent
