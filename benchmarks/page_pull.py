"""KV pages of one process for another: by our copies over TCP, and by ``jax.experimental.transfer``, in turn.

    python -m benchmarks.page_pull [--megabytes 16] [--page-kib 256] [--rounds 5]

Of each way: bytes a second from asking until they are on the device, medians, and what becomes of a name that nobody
gives (JAX's pulls have no end of their own; ours are told so).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import this_machine
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.tier import KeptPage
from llmjax.engine.ranks.join import free_port
from llmjax.engine.tiers.host import PageFormat
from llmjax.engine.tiers.offload import PagesLost
from llmjax.engine.tiers.transfer import PageGiver, PageTaker, bind
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.kv_transfer import KVTransferConfig

HOST = "127.0.0.1"
IDENTITY, SECRET = "benchmark", "word"
PAGE_TOKENS = 32
UNKNOWN_SECONDS = 10.0  # to wait for a name that nobody gives


class Read:
    """Pages that have been read out."""

    def __init__(self, pages: Sequence[np.ndarray[Any, Any]]) -> None:
        self._pages = pages

    def contents(self) -> list[tuple[np.ndarray[Any, Any], ...]]:
        return [(page,) for page in self._pages]


def form_of(page_bytes: int) -> PageFormat:
    return PageFormat(PAGE_TOKENS, (jax.ShapeDtypeStruct((page_bytes // 2,), jnp.bfloat16.dtype),))


def give(pipe: Connection, pages: int, page_bytes: int, rounds: int) -> None:
    """The process that has the pages."""
    from jax.experimental import transfer  # there may be none in another JAX

    port = free_port(HOST)
    config = KVTransferConfig(
        kv_connector="TCPConnector", kv_role="kv_producer", kv_ip=HOST, kv_port=port, kv_buffer_size=2**40
    )
    giver = PageGiver(config, bind(config), identity=IDENTITY, secret=SECRET, formats=[form_of(page_bytes)])
    held = jnp.ones((pages, page_bytes // 2), jnp.bfloat16)
    server = transfer.start_transfer_server(jax.devices()[0].client, f"{HOST}:0", [f"{HOST}:0"])
    keys = [PageKey(tokens=(number,) * PAGE_TOKENS, digest=number.to_bytes(16, "little")) for number in range(pages)]
    for number in range(rounds):
        giver.give(f"{number}", [(0, keys, Read(list(np.asarray(held))))])
        server.await_pull(number, [held])
    pipe.send((port, server.address()))
    pipe.recv()


def main(argv: Sequence[str]) -> int:
    """Measures and prints.

    Raises:
        LLMJaxError: a setting is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_pull", allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=16, help="of a prompt's pages (default: 16)")
    parser.add_argument("--page-kib", type=int, default=256, help="of a page (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: 5)")
    options = parser.parse_args(argv)
    for name in ("megabytes", "page_kib", "rounds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    page_bytes = options.page_kib << 10
    pages = max(1, (options.megabytes << 20) // page_bytes)
    rounds = options.rounds + 1  # the first one is for what comes up only once
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=give, args=(theirs, pages, page_bytes, rounds), daemon=True)
    process.start()
    try:
        port, address = pipe.recv()
        by_tcp, by_jax = tcp_of(port, page_bytes), jax_of(address, pages, page_bytes)
        seconds: dict[str, list[float]] = {"over TCP": [], "jax.experimental.transfer": []}
        for number in range(rounds):
            for name, pull in zip(seconds, (by_tcp, by_jax), strict=True):
                started = time.perf_counter()
                pull(number)
                seconds[name].append(time.perf_counter() - started)
        print(f"{pages} pages of {options.page_kib} KiB; {this_machine()}")
        for name, durations in seconds.items():
            print(
                f"{name}: {pages * page_bytes / median(durations[1:]) / 1e9:.2f} GB/s, "
                f"{1e3 * median(durations[1:]):.1f} ms"
            )
        print(f"a name that nobody gives, over TCP: {ended(lambda: by_tcp(rounds))}")
        # Last, and in a process of its own: what waits for it cannot be ended.
        asked = context.Process(target=ask_jax, args=(address, pages, page_bytes, rounds), daemon=True)
        asked.start()
        asked.join(UNKNOWN_SECONDS)
        state = f"ended with status {asked.exitcode}" if not asked.is_alive() else f"no end in {UNKNOWN_SECONDS:g} s"
        print(f"a name that nobody gives, jax.experimental.transfer: {state}")
        asked.kill()
    finally:
        process.kill()
    return 0


def tcp_of(port: int, page_bytes: int) -> Callable[[int], None]:
    """Pulls by our own protocol."""
    peer = f"{HOST}:{port}"
    taker = PageTaker([peer], identity=IDENTITY, secret=SECRET, formats=[form_of(page_bytes)])

    def pull(number: int) -> None:
        pages: list[KeptPage] = [page for _, page in taker.take(f"{number}", peer=peer)]
        jax.block_until_ready(jax.device_put(np.stack([page.content[0] for page in pages])))

    return pull


def jax_of(address: str, pages: int, page_bytes: int) -> Callable[[int], None]:
    """Pulls by JAX's transfer server."""
    from jax.experimental import transfer

    device = jax.devices()[0]
    server = transfer.start_transfer_server(device.client, f"{HOST}:0", [f"{HOST}:0"])
    connection = server.connect(address)
    like = jax.ShapeDtypeStruct(
        (pages, page_bytes // 2), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device)
    )

    def pull(number: int) -> None:
        jax.block_until_ready(connection.pull(number, [like]))

    return pull


def ask_jax(address: str, pages: int, page_bytes: int, number: int) -> None:
    """A pull of what is not there."""
    jax_of(address, pages, page_bytes)(number)


def ended(pull: Callable[[], None]) -> str:
    """How a pull ends, and when."""
    started = time.perf_counter()
    try:
        pull()
        how = "pages came"
    except PagesLost as lost:
        how = str(lost)
    return f"{how}, after {1e3 * (time.perf_counter() - started):.1f} ms"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"page_pull: error: {error}")
