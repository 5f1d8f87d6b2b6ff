"""The process of one start that ``llmjax bench startup`` times: settings come as JSON, seconds go as JSON."""

from __future__ import annotations

import json
import sys
import time

from llmjax.errors import LLMJaxError


def main() -> int:
    """Starts the engine that standard input describes, and prints how long that took."""
    order = json.load(sys.stdin)
    from llmjax import LLM
    from llmjax.config import EngineConfig
    from llmjax.settings import make_config

    try:
        config = make_config(EngineConfig, order["settings"], source="settings")
        begin = time.perf_counter()
        llm = LLM.from_config(config)
        startup, process = time.perf_counter() - begin, time.time() - order["started"]
        llm.warm_up()
        programs = time.perf_counter() - begin
        llm.close()
    except LLMJaxError as error:
        print(f"llmjax: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"startup": startup, "process": process, "programs": programs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
