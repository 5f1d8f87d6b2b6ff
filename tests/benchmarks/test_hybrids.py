"""Models of one size with recurrent mixers and with attention, as a benchmark."""

from __future__ import annotations

from math import prod

import jax.numpy as jnp
import pytest

from benchmarks.hybrids import ATTENTION, configs, main
from llmjax.errors import ConfigError
from llmjax.models import abstract_model, model_config


def test_models_are_of_one_size() -> None:
    sizes = {}
    for name, shape in configs(1024, 4).items():
        _, shapes = abstract_model(model_config(shape), dtype=jnp.float32, activation_dtype=jnp.float32)
        sizes[name] = sum(prod(x.shape) for key, x in shapes.items() if len(x.shape) == 2 and "embed" not in key)
    assert {name for name, size in sizes.items() if abs(size / sizes[ATTENTION] - 1) < 0.4} == set(sizes)
    assert set(sizes) == {ATTENTION, "mamba", "mamba2", "qwen3-next", "kimi-linear"}


@pytest.mark.slow
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tokens", "40", "--hidden", "128", "--layers", "1", "--rounds", "1", "--only", "mamba"])
    head, _, attention, mamba = capsys.readouterr().out.splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [dict(zip(columns, map(str.strip, line.strip("|").split("|")), strict=True)) for line in (attention, mamba)]
    assert [row["model"] for row in rows] == [ATTENTION, "mamba"]
    assert [(row["layers"], row["functions"]) for row in rows] == [("1", "1"), ("2", "1")]
    assert rows[0]["of attention's rate"] == "1.00" and float(rows[1]["of attention's rate"]) > 0


@pytest.mark.parametrize("wrong", ["--only rwkv", "--hidden 100", "--tokens 0"])
def test_wrong_arguments(wrong: str) -> None:
    with pytest.raises(ConfigError):
        main(wrong.split())
