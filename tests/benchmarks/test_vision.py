"""Times of encoders, in a table; the encoder is a real one."""

from __future__ import annotations

import pytest

from benchmarks.vision import Taken, main, measure, ours, rows, shortened

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
WINDOWED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 4,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 8,
    "window_size": 32,
    "fullatt_block_indexes": [1, 3],
}
TOWERS = {
    "tiles": {"architecture": "Idefics3ForConditionalGeneration", "scale_factor": 2, "vision_config": VISION},
    "pictures": {"architecture": "Qwen2_5_VLForConditionalGeneration", "image_size": 64, "vision_config": WINDOWED},
}


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoder_is_run_and_shown(name: str) -> None:
    tower = shortened(TOWERS[name], 2)
    best = measure({"llmjax": ours(tower, 2, "bfloat16")}, 1)
    assert best["llmjax"].wall > 0
    assert rows("tiny", best)[0].startswith("| tiny | llmjax | ")


def test_a_tower_is_cut_short() -> None:
    vision = shortened(TOWERS["pictures"], 3)["vision_config"]
    assert vision["depth"] == 3 and vision["fullatt_block_indexes"] == [1]
    assert shortened(TOWERS["tiles"], None) == TOWERS["tiles"]


def test_others_are_shown_as_multiples() -> None:
    best = {"llmjax": Taken(0.1, 0.2), "transformers": Taken(0.25, 0.3)}
    assert rows("so400m", best)[1] == "| so400m | transformers | 250 | 2.50x | 300 | 1.50x |"


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiles", "0"])
    assert "at least 1" in capsys.readouterr().err
