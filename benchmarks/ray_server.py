"""The server on Ray Serve for ``ray_path``: ``python -m benchmarks.ray_server PORT ARGUMENTS``; ends when told to."""

from __future__ import annotations

import json
import signal
import sys
import threading

import ray
from ray import serve

from llmjax.deploy.ray import app


def main() -> None:
    port, arguments = sys.argv[1:]
    end = threading.Event()
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: end.set())
    ray.init(_node_ip_address="127.0.0.1", num_cpus=4, include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(app(json.loads(arguments)))
    end.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
