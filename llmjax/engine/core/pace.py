"""The size of the next dispatch: few enough decode steps, and few enough prompt tokens beside decodes, that streams
stay smooth and new requests soon start."""

from __future__ import annotations

# Two dispatches run at a time, so a new request waits for 50 ms at most, and streams get 40 pieces a second.
DISPATCH_SECONDS = 0.025
CHUNK_SECONDS = 0.4  # how long streams wait for a step with prompt tokens
LEAST_TOKENS = 64  # fewest tokens of such a step; fewer would make prompts slow, because each step reads all weights
NEWEST = 0.25  # weight of the last such step among all


class Pace:
    """Starts at one step and at most doubles from dispatch to dispatch, as long as they stay short.

    Args:
        most: steps that no dispatch exceeds.
        seconds: time that a dispatch should take at most.
    """

    def __init__(self, most: int, *, seconds: float = DISPATCH_SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._steps = 1

    @property
    def steps(self) -> int:
        """Most decode steps of the next dispatch."""
        return self._steps

    def record(self, steps: int, seconds: float) -> None:
        """Notes that a dispatch of decodes alone took ``steps`` steps in ``seconds``."""
        if steps:
            fitting = int(self._seconds * steps / max(seconds, 1e-9))
            self._steps = max(1, min(self._most, max(2 * steps, self._steps), fitting))

    def restart(self) -> None:
        """Begins again with one step, because the batch has changed and the time of a step is unknown."""
        self._steps = 1


class ChunkPace:
    """Tokens of a step that has both decodes and parts of prompts, by how long such steps have taken. A fast device
    takes as many as a step may have, and a slow one cuts prompts into smaller chunks.

    Args:
        seconds: time that such a step should take at most.
    """

    def __init__(self, *, seconds: float = CHUNK_SECONDS) -> None:
        self._seconds = seconds
        self._of_token: float | None = None

    @property
    def tokens(self) -> int | None:
        """A power of two, as programs have; None: it is not known yet."""
        if not self._of_token:
            return None
        fitting = int(min(self._seconds / self._of_token, 2.0**30))
        return max(1 << fitting.bit_length() - 1 if fitting else 0, LEAST_TOKENS)

    def record(self, tokens: int, seconds: float) -> None:
        """Notes that such a step took ``seconds``; steps of fewer than `LEAST_TOKENS` tokens are ignored."""
        if tokens >= LEAST_TOKENS:
            new = seconds / tokens
            self._of_token = new if self._of_token is None else self._of_token + NEWEST * (new - self._of_token)
