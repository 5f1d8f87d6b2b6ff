"""``llmjax run-batch``: answer the requests of a file, in OpenAI's batch format, without a server."""

from __future__ import annotations

import sys
from pathlib import Path

from llmjax.cli.parser import Parser, add_config_flags, configs_of
from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError


def main(argv: list[str]) -> int:
    """Answers them.

    Raises:
        LLMJaxError: a setting or a line is wrong, or the model cannot be loaded.
    """
    parser = Parser(prog="llmjax run-batch", description="Answer the requests of a file: OpenAI's batches, offline.")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="JSON lines with custom_id, method, url and body")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="where the results go, in the same order")
    add_config_flags(parser, EngineConfig, ServerConfig)
    values = parser.parse(argv)
    if values.input_file is None or values.output_file is None:
        raise ConfigError("run-batch needs --input-file (-i) and --output-file (-o)")
    configs = configs_of(values, EngineConfig, ServerConfig)
    from llmjax.serve.run_batch import run_batch  # the console script runs what the server does

    counts = run_batch(configs.engine, configs.server, Path(values.input_file), Path(values.output_file))
    print(f"{counts.completed} requests answered, {counts.failed} failed: {values.output_file}", file=sys.stderr)
    return int(counts.failed > 0)
