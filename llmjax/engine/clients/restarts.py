"""The policy for restarting an engine that has died: when, and after how many deaths no more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often an engine may die.

    Attributes:
        most: deaths within ``period`` seconds after which it is started again; one more is too many.
        first_wait: seconds before the first restart; each further one waits twice as long, at most ``longest_wait``.
    """

    most: int = 5
    period: float = 600.0
    first_wait: float = 0.5
    longest_wait: float = 30.0


class Restarts:
    """The deaths of one engine."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Counts a death.

        Args:
            now: in seconds of any clock that does not go back.

        Returns:
            Seconds to wait before it is started again; None: it has died too often.
        """
        policy = self._policy
        while self._deaths and now - self._deaths[0] >= policy.period:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > policy.most:
            return None
        return min(policy.longest_wait, policy.first_wait * 2 ** (len(self._deaths) - 1))
