"""Times of encoders, in a table; the encoder is a real one."""

from __future__ import annotations

import pytest

from benchmarks.vision import Taken, main, measure, ours, rows

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def test_an_encoder_is_run_and_shown() -> None:
    best = measure({"llmjax": ours(TINY, 2, "bfloat16")}, 1)
    assert best["llmjax"].wall > 0
    assert rows("tiny", best)[0].startswith("| tiny | llmjax | ")


def test_others_are_shown_as_multiples() -> None:
    best = {"llmjax": Taken(0.1, 0.2), "transformers": Taken(0.25, 0.3)}
    assert rows("so400m", best)[1] == "| so400m | transformers | 250 | 2.50x | 300 | 1.50x |"


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiles", "0"])
    assert "at least 1" in capsys.readouterr().err
