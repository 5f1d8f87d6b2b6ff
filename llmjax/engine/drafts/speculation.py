"""Speculative decoding on the host: drafts of sequences, and whether it pays to verify them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from llmjax.engine.core.request import Sequence
from llmjax.engine.drafts.drafter import Acceptance, Drafter, LookupDrafter, ModelDrafter
from llmjax.errors import ConfigError
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import LastState
from llmjax.speculative import SpeculativeConfig, draft_lengths

RECENT = 8  # dispatches whose fastest is the time of a step: other work of the machine only makes steps slower
PLAIN = 0  # drafts of a step that has none
TRIALS = {
    PLAIN: 4
}  # dispatches that have to be measured before they are compared: plain ones overlap from the second on
RETRIES = (64, 1024)  # steps until another number of drafts is measured again: at first, and at most


class Speculation:
    """Chooses how many drafts the rows of a step have: the number that gives most tokens a second, or none.

    Args:
        config: the speculative settings.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._lengths = draft_lengths(config.num_speculative_tokens)
        self._costs: dict[tuple[int, int], deque[float]] = {}  # seconds of steps, by rows of the program and drafts
        self._begun: set[tuple[int, int]] = set()
        self._acceptance = Acceptance()  # the draft model's, over all sequences
        self._ages: dict[int, int] = {}  # steps since a number of drafts was the one
        self._patience, self._chosen = RETRIES[0], PLAIN

    def drafter(self, tokens: list[int]) -> Drafter:
        """Makes the drafter of a sequence with these tokens, to which more may be added."""
        if self.config.model is not None:
            return ModelDrafter(self.config.num_speculative_tokens, self._acceptance)
        return LookupDrafter(tokens, self.config)

    def drafts(self, running: list[Sequence], *, most: int) -> dict[Sequence, tuple[int, ...]]:
        """Drafts of the next tokens of sequences that have some; none if they do not pay.

        Args:
            most: most drafts of a row.
        """
        if not most or len(running) > self.config.disable_by_batch_size:
            return {}
        guesses = {
            sequence: guess
            for sequence in running
            if sequence.drafter is not None and (guess := sequence.drafter.drafts()[:most])
        }
        if not guesses:
            return {}
        length = self._length(guesses, rows=len(running), most=most)
        return {sequence: guess[:length] for sequence, guess in guesses.items()} if length else {}

    def record(self, *, rows: int, seconds: float, drafts: int) -> None:
        """Notes how long a step took.

        Args:
            rows: rows of the program, which may be more than the step had.
            drafts: most drafts that a row had; 0: there were none.
        """
        if drafts and drafts not in self._lengths:
            return  # cut off at the end of an output
        if (rows, drafts) not in self._begun:  # its program may have been read from disk
            self._begun.add((rows, drafts))
            return
        self._costs.setdefault((rows, drafts), deque(maxlen=RECENT)).append(seconds)

    def _length(self, found: Mapping[Sequence, tuple[int, ...]], *, rows: int, most: int) -> int:
        """Drafts of each row that has some.

        Args:
            found: all guesses.
            rows: sequences that run, those without a guess included.
            most: most drafts that a row can have.
        """
        speeds: dict[int, float] = {}
        for length in (*(length for length in self._lengths if length <= most), PLAIN):
            cost = self._cost(rows, length)
            if cost is None:
                return length  # to measure it
            speeds[length] = (rows + _expected(found, length)) / cost
        best = max(speeds, key=lambda length: speeds[length])
        for length in speeds:
            self._ages[length] = self._ages.get(length, 0) + 1
        if best != self._chosen:
            self._patience, self._chosen = RETRIES[0], best
        oldest = max(speeds, key=lambda length: self._ages[length])
        if oldest != best and self._ages[oldest] >= self._patience:
            self._patience = min(2 * self._patience, RETRIES[1])
            best = oldest
        self._ages[best] = 0
        return best

    def _cost(self, rows: int, drafts: int) -> float | None:
        """Seconds of the smallest measured program that holds ``rows`` rows; None: there is none."""
        measured = sorted(size for size, length in self._costs if length == drafts and size >= rows)
        seconds = self._costs[measured[0], drafts] if measured else ()
        return min(seconds) if len(seconds) >= TRIALS.get(drafts, 1) else None


def _expected(found: Mapping[Sequence, tuple[int, ...]], length: int) -> float:
    """Expected number of accepted drafts, if each draft after right ones is accepted with the sequence's share."""
    more = 0.0
    for sequence, guess in found.items():
        assert sequence.drafter is not None
        share = sequence.drafter.acceptance
        more += sum(share**i for i in range(1, 1 + min(length, len(guess))))
    return more


def check_speculative(speculative: SpeculativeConfig, model: ModelConfig, *, max_num_batched_tokens: int) -> None:
    """Raises ConfigError if the engine cannot do what the speculative settings ask for."""
    if model.pooler is not None:
        raise ConfigError("speculative_config: the model makes vectors and generates nothing; leave it out")
    if any(isinstance(span, LastState) for span in model.spans):
        raise ConfigError(
            "speculative_config: the model has recurrent layers, whose state cannot return to before a draft that "
            "was wrong; leave it out"
        )
    if speculative.num_speculative_tokens >= max_num_batched_tokens:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens ({speculative.num_speculative_tokens}) must be below "
            f"max_num_batched_tokens ({max_num_batched_tokens})"
        )
