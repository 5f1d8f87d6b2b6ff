"""The size of the next dispatch: few enough decode steps, and few enough prompt tokens and images beside decodes, that
streams stay smooth and new requests soon start."""

from __future__ import annotations

# Two dispatches run at a time, so a new request waits for 50 ms at most, and streams get 40 pieces a second.
DISPATCH_SECONDS = 0.025
CHUNK_SECONDS = 0.4  # how long streams wait for a step with prompt tokens
LEAST_TOKENS = 64  # fewest tokens of such a step; fewer would make prompts slow, because each step reads all weights
NEWEST = 0.25  # weight of the last such step among all
ENCODER_SHARE = 1 / 6  # of the time, beside streams: they keep more than 80 % of their pace


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


class EncoderPace:
    """When a part of an encoder's run may come between the steps of streams: when steps have had as much time since the
    last one that the encoder has its share.

    A part's time is that from step to step less that of a step without one.

    Args:
        share: the encoder's share of the time.
    """

    def __init__(self, *, share: float = ENCODER_SHARE) -> None:
        self._steps_of_part = (1 - share) / share  # seconds of steps for one of the encoder
        self._owed = 0.0  # seconds of steps that streams have to get first
        self._of_step: float | None = None
        self._unread = False  # how long the last part took is not known

    @property
    def goes_on(self) -> bool:
        """Whether the next part may come before the next step."""
        return not self._unread and self._owed <= 0

    def begun(self) -> None:
        """A part comes before the next step."""
        self._unread = True

    def record(self, *, steps: int, seconds: float, parts: int, decodes: bool) -> None:
        """Notes that a dispatch of some steps took ``seconds`` with the parts that came before it.

        Args:
            decodes: whether they were steps of decodes alone.
        """
        if parts:
            if not self._unread:
                return  # there were no streams
            self._unread = False
            took = seconds - steps * (self._of_step or 0.0)
            self._owed = max(took, 0.0) * self._steps_of_part
            return
        self._owed = max(self._owed - seconds, 0.0)
        if decodes and steps and seconds:
            new = seconds / steps
            self._of_step = new if self._of_step is None else self._of_step + NEWEST * (new - self._of_step)
