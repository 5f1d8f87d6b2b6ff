"""A rank other than 0, started by ``ranks.local``: ``python -m llmjax.engine.ranks.worker_main``."""

from __future__ import annotations

import logging
import os
import signal
import sys

import msgspec

from llmjax.engine.clients.wire import Start
from llmjax.errors import LLMJaxError


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # rank 0's affair; it may have requests to finish
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to rank 0
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)
    rank = start.config.node_rank
    logging.basicConfig(
        level=start.log_level, format=f"%(asctime)s %(levelname)s %(name)s: rank {rank}: %(message)s", stream=sys.stderr
    )
    from llmjax.engine.ranks.worker import run_worker

    try:
        run_worker(start.config, start.share)
    except Exception as error:
        logging.getLogger(__name__).error("%s", error, exc_info=not isinstance(error, LLMJaxError))
    logging.shutdown()
    os._exit(1)  # threads may be inside XLA, and are not waited for


if __name__ == "__main__":
    main()
