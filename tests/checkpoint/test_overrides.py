"""hf_overrides act, or are an error: in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax import models
from llmjax.checkpoint.checkpoint import open_checkpoint
from llmjax.checkpoint.overrides import check_reached, overridden
from llmjax.errors import CheckpointError
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/config.json"))
FLAT = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
NESTED = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), FLAT["rope_parameters"])}


def read(folder: Path, **keys: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {**(models.text_config(config) or config), **keys}


def llama(**keys: Any) -> dict[str, Any]:
    config = read(LLAMA)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    return {**config, **keys}


def frequencies(config: dict[str, Any]) -> np.ndarray:
    rope: Any = models.model_config(config).layers[0].mixer
    return np.asarray(rope.rope.inv_freq)


def check(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    changed = overridden(config, overrides)
    check_reached(changed, overrides, Path("folder"), convert=None)
    return changed


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_no_family_reads_is_an_error(folder: Path) -> None:
    config = read(folder)
    with pytest.raises(CheckpointError, match="nothing of this model reads 'no_such_key'"):
        check(config, no_such_key=7)
    counted = next(key for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers") if key in config)
    check(config, **{counted: config[counted]})


def test_the_base_of_rope_acts_wherever_the_file_holds_it() -> None:
    wanted = frequencies(llama(rope_theta=1e4))
    for config in (llama(rope_theta=1e6), llama(**FLAT), llama(rope_theta=1e6, **FLAT)):
        assert not np.array_equal(frequencies(config), wanted)
        assert np.array_equal(frequencies(check(config, rope_theta=1e4)), wanted)
    both = check(llama(**FLAT), rope_theta=1e4, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    assert np.array_equal(frequencies(both), wanted)


def test_where_kinds_of_layers_have_their_own_it_is_an_error() -> None:
    config = {**llama(), **NESTED}
    with pytest.raises(CheckpointError, match="reads 'rope_theta': rope_parameters holds it by kind of layer"):
        check(config, rope_theta=1e4)
    check(config, rope_parameters=NESTED["rope_parameters"])


def test_of_a_file_that_says_it_twice_rope_parameters_count_as_in_transformers() -> None:
    twice = llama(rope_theta=1e4, **FLAT)
    assert np.array_equal(frequencies(twice), frequencies(llama(rope_theta=1e6, **FLAT)))


def test_opening_a_model_checks_them() -> None:
    assert open_checkpoint(LLAMA, overrides={"max_position_embeddings": 32}).config["max_position_embeddings"] == 32
    for key in ("max_position_embedding", "attention_dropout", "text_config"):
        with pytest.raises(CheckpointError, match=f"hf_overrides: nothing of this model reads '{key}'"):
            open_checkpoint(LLAMA, overrides={key: {}})
