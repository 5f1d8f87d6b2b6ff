"""``llmjax.quantize``; what the command of that name adds is tested in cli/test_quantize.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import llmjax
from llmjax.checkpoint import open_checkpoint
from llmjax.conversion import Progress
from llmjax.errors import ConfigError
from llmjax.tokenizer import load_tokenizer
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(GOLDEN / "llama", folder)
    for path in (TESTS / "engine" / "golden" / "characters").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


def test_a_folder(model: Path, tmp_path: Path) -> None:
    steps: list[Progress] = []
    report = llmjax.quantize(
        str(model),
        tmp_path / "out",
        scheme="INT4",
        group_size=16,
        format="gptq",
        progress=steps.append,
        dtype="float32",
        device="cpu",
    )
    assert report.kinds["int4"].tensors == len(steps) == 21
    assert [step.done for step in steps] == list(range(1, 22)) and {step.total for step in steps} == {21}
    assert steps[0].name == "model.layers.0.mlp.down_proj.weight" and steps[0].error.startswith("error 0.")
    assert report.total.after < report.total.before and report.target == tmp_path / "out"
    assert open_checkpoint(tmp_path / "out").quantization == "gptq"
    assert load_tokenizer(tmp_path / "out").encode("abc") == load_tokenizer(model).encode("abc")


def test_a_matrix_without_numbers_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    shutil.copyfile(model / "config.json", tmp_path / "source" / "config.json")
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "extra.weight": np.zeros((3, 0), np.float32)}, tmp_path / "source" / "model.safetensors")
    llmjax.quantize(str(tmp_path / "source"), tmp_path / "out", scheme="int8", skip_tokenizer_init=True)
    assert open_checkpoint(tmp_path / "out").tensors["extra.weight"].shape == (3, 0)


def test_a_gguf_file(model: Path, tmp_path: Path) -> None:
    steps: list[Progress] = []
    rules = {"v_proj": "none"}
    report = llmjax.quantize(
        str(model), str(tmp_path / "a"), scheme="q8_0", quantization_rules=rules, skip_tokenizer_init=True,
        progress=steps.append,
    )  # fmt: skip
    assert report.target == tmp_path / "a.gguf" and report.kinds.keys() == {"q8_0", "bf16", "f32"}
    assert steps[-1].done == steps[-1].total == report.total.tensors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "int8", "groupsize": 16}, "groupsize is not a setting; did you mean group_size?"),
        ({"scheme": "int8", "max_num_seqs": 4}, "max_num_seqs is not a setting"),  # of an engine, without use here
        ({"scheme": "int8", "force": "perhaps"}, "force"),
        ({"scheme": "q9"}, "scheme 'q9' is unknown"),
        ({"scheme": "int8", "method": "gptq"}, "need --calibration FILE"),
    ],
)
def test_mistakes(settings: dict[str, object], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        llmjax.quantize(str(model), tmp_path / "out", **settings)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_no_module_takes_the_place_of_the_function() -> None:
    code = """
import importlib, pkgutil, llmjax
for package in ("quantization", "weights", "checkpoint"):
    for found in pkgutil.walk_packages(importlib.import_module(f"llmjax.{package}").__path__, f"llmjax.{package}."):
        importlib.import_module(found.name)
assert llmjax.quantize.__module__ == "llmjax.conversion", llmjax.quantize
"""
    subprocess.run([sys.executable, "-c", code], check=True)
