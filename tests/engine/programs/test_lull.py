"""When background work begins."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from llmjax.engine.programs.lull import QUIET, Lull


class Wanted(threading.Event):
    """An event that says how long a thread waits for it, which then waits for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: SimpleQueue[float | None] = SimpleQueue()
        self.go_on: SimpleQueue[None] = SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.put(timeout)
        self.go_on.get()
        return self.is_set()


def test_it_begins_when_the_last_step_was_long_ago() -> None:
    now, wanted = 100.0, Wanted()
    lull = Lull(clock=lambda: now, wanted=wanted)
    waiting = threading.Thread(target=lull.wait, daemon=True)
    waiting.start()
    assert wanted.waits.get() == QUIET
    now += QUIET / 2
    lull.step()
    now += QUIET / 4
    wanted.go_on.put(None)
    assert wanted.waits.get() == QUIET * 3 / 4  # the step counts
    now += QUIET * 3 / 4
    wanted.go_on.put(None)
    waiting.join()
    lull.wait()  # there is nothing to wait for
    assert wanted.waits.empty()


def test_nobody_waits_for_what_is_wanted() -> None:
    now, wanted = 0.0, Wanted()
    lull = Lull(clock=lambda: now, wanted=wanted)
    waiting = threading.Thread(target=lull.wait, daemon=True)
    waiting.start()
    assert wanted.waits.get() == QUIET
    lull.end()
    wanted.go_on.put(None)
    waiting.join()
    lull.step()
    lull.wait()
    assert wanted.waits.empty()
