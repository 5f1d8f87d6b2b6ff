"""What a form costs on a tiny model, from flags to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.structured import StructuredOptions, main
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds must be at least 1, not 0"):
        StructuredOptions(rounds=0)
    with pytest.raises(ConfigError, match="--streams must be at least 1 each, not 0"):
        StructuredOptions(streams=(1, 0))
    with pytest.raises(ConfigError, match="--forms: 'prose' is none of none, any text"):
        StructuredOptions(forms=("any text", "prose"))


@pytest.mark.slow
def test_forms_beside_none(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [str(GOLDEN / "llama"), "--tokenizer", str(TESTS / "engine/golden/characters")]
    flags = "--streams 2 --rounds 2 --tokens 6 --max-num-batched-tokens 16 --dtype float32"
    files = ["--output-json", str(tmp_path / "forms.json"), "--compilation-cache-dir", compile_cache_dir]
    assert main(["--model", *model, *flags.split(), "--forms", "any text", *files]) == 0
    assert "| any text" in capsys.readouterr().out
    none, other = json.loads((tmp_path / "forms.json").read_text())["figures"]
    assert (none["form"], none["cpu_ratio"], none["wall_ratio"]) == ("none", 1, 1)
    assert (other["form"], other["streams"], len(other["runs"])) == ("any text", 2, 2)
    assert all(run["cpu"] > 0 and run["wall"] > 0 for run in other["runs"])
