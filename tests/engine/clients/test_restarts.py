"""How long a dead engine waits for its restart, and when it is not restarted."""

from __future__ import annotations

from llmjax.engine.clients.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(most=4, period=100, first_wait=1, longest_wait=3)


def test_waits_double_up_to_the_longest_and_end() -> None:
    deaths = Restarts(POLICY)
    assert [deaths.died(float(now)) for now in range(6)] == [1, 2, 3, 3, None, None]


def test_deaths_are_forgotten() -> None:
    deaths = Restarts(POLICY)
    assert [deaths.died(now) for now in (0, 10, 20, 30)] == [1, 2, 3, 3]
    assert deaths.died(100) == 3  # the first one has been forgotten just now
    assert deaths.died(100.5) is None
    rare = Restarts(POLICY)
    assert {rare.died(100.0 * i) for i in range(50)} == {1}
