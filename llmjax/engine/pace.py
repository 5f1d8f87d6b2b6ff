"""How many decode steps the next dispatch may take: few enough that streams stay smooth and newcomers soon get in."""

from __future__ import annotations

# Two dispatches are under way at a time, so a newcomer waits for 50 ms at most, and streams get 40 pieces a second.
DISPATCH_SECONDS = 0.025


class Pace:
    """Starts at one step and at most doubles from dispatch to dispatch, as long as they stay short.

    Args:
        most: steps that no dispatch exceeds.
        seconds: that a dispatch should take at most.
    """

    def __init__(self, most: int, *, seconds: float = DISPATCH_SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._steps = 1

    @property
    def steps(self) -> int:
        """For the next dispatch."""
        return self._steps

    def record(self, steps: int, seconds: float) -> None:
        """A dispatch of decodes alone took ``steps`` steps in ``seconds``."""
        if steps:
            fitting = int(self._seconds * steps / max(seconds, 1e-9))
            self._steps = max(1, min(self._most, max(2 * steps, self._steps), fitting))

    def restart(self) -> None:
        """The batch has changed: what a step takes now is unknown."""
        self._steps = 1
