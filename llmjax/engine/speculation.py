"""Speculative decoding on the host: drafts of sequences, and whether it pays to verify them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from llmjax.engine.drafter import Drafter, LookupDrafter, ModelDrafter
from llmjax.engine.request import Sequence
from llmjax.errors import ConfigError
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import LastState
from llmjax.speculative import SpeculativeConfig

RECENT = 8  # dispatches whose fastest says what a step takes: whatever else the machine does makes it slower
RETRIES = 64  # steps that are said not to pay; the next one is made all the same, to measure it again


class Speculation:
    """Whether steps have drafts: they do where the tokens that they should bring are worth what they take.

    Args:
        config: what was asked for.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._plain: dict[int, deque[float]] = {}  # seconds of steps, by rows of the program
        self._drafted: dict[int, deque[float]] = {}
        self._declined = 0
        self._begun: set[tuple[int, bool]] = set()

    def drafter(self, tokens: list[int]) -> Drafter:
        """Of a sequence with these tokens, which may grow."""
        if self.config.model is not None:
            return ModelDrafter(self.config.num_speculative_tokens)
        return LookupDrafter(tokens, self.config)

    def drafts(self, running: list[Sequence], *, most: int) -> dict[Sequence, tuple[int, ...]]:
        """Guesses at the next tokens of sequences, as far as these are known; none where they do not pay.

        Args:
            most: drafts of a row.
        """
        if not most or len(running) > self.config.disable_by_batch_size:
            return {}
        found: dict[Sequence, tuple[int, ...]] = {}
        more = 0.0  # tokens that they should bring
        for sequence in running:
            if sequence.drafter is not None and (guess := sequence.drafter.drafts()[:most]):
                found[sequence] = guess
                more += _expected(sequence.drafter.acceptance, len(guess))
        return found if found and self._pays(len(running), more) else {}

    def record(self, *, rows: int, seconds: float, drafted: bool) -> None:
        """A step took so long.

        Args:
            rows: of the program, which may be more than there were.
        """
        if (rows, drafted) not in self._begun:  # its program may have been read from disk
            self._begun.add((rows, drafted))
            return
        costs = self._drafted if drafted else self._plain
        costs.setdefault(rows, deque(maxlen=RECENT)).append(seconds)

    def _pays(self, rows: int, more: float) -> bool:
        """Args: more: tokens that drafts should bring."""
        plain, drafted = _cost(self._plain, rows), _cost(self._drafted, rows)
        if plain is None or drafted is None or (rows + more) * plain > rows * drafted:
            return True
        self._declined += 1
        return self._declined % RETRIES == 0


def _cost(costs: Mapping[int, Collection[float]], rows: int) -> float | None:
    """Of the smallest program that has been measured and holds so many rows; None: there is none."""
    return next((min(costs[size]) for size in sorted(costs) if size >= rows), None)


def _expected(acceptance: float, count: int) -> float:
    """Drafts of ``count`` that are accepted in the mean, if each one behind right ones is with this probability."""
    return sum(acceptance**i for i in range(1, count + 1))


def check_speculative(speculative: SpeculativeConfig, model: ModelConfig, *, max_num_batched_tokens: int) -> None:
    """Raises ConfigError if the engine cannot do what was asked for."""
    if model.pooler is not None:
        raise ConfigError("speculative_config: the model makes vectors and generates nothing; leave it out")
    if any(isinstance(span, LastState) for span in model.spans):
        raise ConfigError(
            "speculative_config: the model has recurrent layers, whose state cannot go back behind a draft that was "
            "wrong; leave it out"
        )
    if speculative.num_speculative_tokens >= max_num_batched_tokens:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens ({speculative.num_speculative_tokens}) must be below "
            f"max_num_batched_tokens ({max_num_batched_tokens})"
        )
