"""Streams that share one prompt and streams with their own, on a tiny model, from flags to the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shared_prompt import Figure, SharedPromptOptions, Times, main
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="--new-tokens must be at least 1, not 0"):
        SharedPromptOptions(new_tokens=0)
    with pytest.raises(ConfigError, match="--parts: 'prefill' is none of attention, step"):
        SharedPromptOptions(parts=("step", "prefill"))


def test_the_ratio_is_that_of_medians() -> None:
    figure = Figure(case="", own=Times(wall=[4, 6, 90], cpu=[1]), common=Times(wall=[2, 1, 3], cpu=[4]))
    assert (figure.ratio("wall"), figure.ratio("cpu")) == (3, 0.25)


@pytest.mark.slow
def test_both_arrangements(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [str(GOLDEN / "llama"), "--tokenizer", str(TESTS / "engine/golden/characters")]
    flags = "--streams 2 --common 32 --own 8 --new-tokens 3 --rounds 2 --dtype float32 --kv-cache-memory-bytes 4MiB"
    files = ["--output-json", str(tmp_path / "shared.json"), "--compilation-cache-dir", compile_cache_dir]
    files += ["--max-num-batched-tokens", "16"]
    assert main(["--model", *model, *flags.split(), *files]) == 0
    assert "2 streams at 40 tokens, 32 of them common" in capsys.readouterr().out
    figures = json.loads((tmp_path / "shared.json").read_text())["figures"]
    (step,) = figures["a whole step"]
    assert [len(step[kind]["wall"]) for kind in ("own", "common")] == [2, 2]
    assert all(seconds > 0 for kind in ("own", "common") for seconds in step[kind]["wall"])
    assert all(figure["common"]["cpu"] for figure in figures.get("attention, a layer", ()))
