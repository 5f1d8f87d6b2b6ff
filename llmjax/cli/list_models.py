"""``llmjax list``: the models on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmjax.checkpoint.store import StoredModel, stored_models
from llmjax.cli.parser import Parser
from llmjax.cli.store import add_download_dir, size


def main(argv: list[str]) -> int:
    """Lists the models on this machine."""
    parser = Parser(prog="llmjax list", description="List the models on this machine, those used last first.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_download_dir(parser)
    values = parser.parse(argv)
    models = stored_models(values.download_dir)
    if values.json:
        print(json.dumps([{**asdict(model), "folder": str(model.folder)} for model in models], indent=2))
    elif models:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(models), highlight=False)
    else:
        print("There are no models yet. To fetch one: llmjax pull Qwen/Qwen3-0.6B", file=sys.stderr)
    return 0


def _table(models: Sequence[StoredModel]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=len(models) > 1, footer_style="bold")
    table.add_column("model", overflow="fold", footer=f"{len(models)} models")
    table.add_column("files")
    table.add_column("size", justify="right", footer=size(sum(model.num_bytes for model in models)))
    table.add_column("last used", justify="right")
    for model in models:
        holds = model.holds if model.whole else " ".join([model.holds, "(incomplete)"]).strip()
        when = datetime.fromtimestamp(model.used).strftime("%Y-%m-%d")
        table.add_row(*map(Text, (model.name, holds, size(model.num_bytes), when)))
    return table
