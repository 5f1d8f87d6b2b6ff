"""Sums in memory that processes share."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from llmjax.kernels.cpu import shared_sum
from llmjax.kernels.cpu.shared_sum import FOLDER, ROOM, NotShared

pytestmark = pytest.mark.jax_api

SHAPES = [(1, 3), (4, 576), (7, 0), (3, ROOM - 5), (1,)]
ROUNDS = 40
# Another device: it sums the same shapes, and then goes.
OTHER = """
import sys, jax, numpy as np
from llmjax.kernels.cpu import shared_sum
from tests.kernels.test_shared_sum import ROUNDS, SHAPES, of_device
jax.config.update("jax_platforms", "cpu")
shared_sum.attach(sys.argv[1], 2)
print("here", flush=True)
total = jax.jit(shared_sum.shared_sum, static_argnames="place")
for shape in SHAPES:
    for round in range(ROUNDS):
        found = np.asarray(total(of_device(1, shape, round), 1, place=round % 2))
print(float(found.sum()))
"""


def of_device(number: int, shape: tuple[int, ...], round: int) -> np.ndarray:
    return np.random.default_rng((number, round)).standard_normal(shape, np.float32)


def made(devices: int) -> str:
    try:
        return shared_sum.make(devices)
    except NotShared as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def other() -> Iterator[subprocess.Popen[str]]:
    name = made(2)
    shared_sum.attach(name, 2)
    process = subprocess.Popen([sys.executable, "-c", OTHER, name], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        shared_sum.unnamed(name)
        assert not (FOLDER / name).exists()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sums_are_those_of_all_devices(other: subprocess.Popen[str]) -> None:
    total = jax.jit(shared_sum.shared_sum, static_argnames="place")
    for shape in SHAPES:
        for round in range(ROUNDS):
            found = np.asarray(total(of_device(0, shape, round), 0, place=round % 2))
            np.testing.assert_array_equal(found, of_device(0, shape, round) + of_device(1, shape, round))
    assert other.stdout is not None
    assert float(other.stdout.read()) == pytest.approx(float(found.sum()))
    # And now that it has gone, whoever waits for it hears so.
    errors: list[Exception] = []
    began = threading.Event()

    @jax.jit
    def wait_for_other(x: jax.Array) -> jax.Array:
        x = jax.pure_callback(lambda x: (began.set(), x)[1], x, x)  # what comes next is the sum
        return shared_sum.shared_sum(x, 0, place=1)

    def wait() -> None:
        try:
            jax.block_until_ready(wait_for_other(of_device(0, (3,), 0)))
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    began.wait()
    shared_sum.stop()
    waiting.join()
    assert re.search("another rank has gone", str(errors[0]))
    with pytest.raises(Exception, match="another rank has gone"):
        jax.block_until_ready(total(of_device(0, (3,), 0), 0, place=0))


def test_what_is_not_shared() -> None:
    shared_sum.unnamed(made(2))
    with pytest.raises(NotShared, match="shared memory has other names"):
        shared_sum.attach("llmjax-../../etc/passwd", 2)
    with pytest.raises(NotShared, match="No such file"):
        shared_sum.attach("llmjax-0123", 2)
    name = made(2)
    try:
        with pytest.raises(NotShared, match="it is not what was made for these devices"):
            shared_sum.attach(name, 3)
        assert (FOLDER / name).stat().st_mode & 0o777 == 0o600
    finally:
        shared_sum.unnamed(name)
