"""``llmjax quantize`` as it is typed, on a tiny model of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.cli import main
from llmjax.tokenizer import load_tokenizer
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
TEXT = json.loads((TESTS / "evaluation" / "golden" / "perplexity.json").read_text())["text"]
F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(GOLDEN / "llama", folder)
    for path in (TESTS / "engine" / "golden" / "characters").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


def quantize(*argv: str | Path) -> int:
    return main(["quantize", *map(str, argv), "--dtype", "float32", "--device", "cpu"])


def test_safetensors_and_the_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert quantize(model, target, "--scheme", "int8", "--quantization-rules", '{"down_proj": "fp8"}') == 0
    out = capsys.readouterr().out
    first = {line.split()[0]: line.split()[1] for line in out.splitlines()[:5]}
    assert first.keys() == {"stored", "bfloat16", "int8", "fp8", "total"}
    assert (first["int8"], first["fp8"]) == ("18", "3")
    assert f"written: {target}" in out
    found = open_checkpoint(target)
    assert found.tensors["model.layers.0.mlp.down_proj.weight"].type_name == "CT-FLOAT8"
    assert load_tokenizer(target).encode(TEXT) == load_tokenizer(model).encode(TEXT)

    assert quantize(model, target, "--scheme", "int8") == 1
    assert "is there already; --force replaces it" in capsys.readouterr().err
    assert quantize(model, target, "--scheme", "w8a8", "--force", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stored"]["w8a8"]["tensors"] == 21 and 0 < report["stored"]["w8a8"]["relative_error"] < 0.01
    sizes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    assert 0 < sizes - report["total"]["bytes_after"] < 10_000  # the header
    assert report["total"]["bytes_before"] > report["total"]["bytes_after"]


def test_gguf_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # No pre-tokenizer of GGUF cuts single characters.
    command = (model, tmp_path / "a", "--scheme", "q8_0", "--skip-tokenizer-init", "--quantization-rules")
    assert quantize(*command, '{"v_proj": "f"}') == 1
    assert "scheme 'f' is unknown" in capsys.readouterr().err
    assert quantize(*command, '{"v_proj": "none"}') == 0
    assert f"written: {tmp_path / 'a.gguf'}" in capsys.readouterr().out
    found = open_checkpoint(tmp_path / "a.gguf")
    assert found.tensors["model.layers.0.self_attn.q_proj.weight"].type_name == "Q8_0"
    assert found.tensors["model.layers.0.self_attn.v_proj.weight"].type_name == "BF16"
    assert quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "--scheme", "bf16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["stored"].keys() == {"bf16", "f32"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibration(method: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    calibrated = ("--method", method, "--calibration", tmp_path / "text", "--calibration-length", "16")
    target = tmp_path / "out"
    scheme = ("--scheme", "int4_asym", "--group-size", "16", "--calibration-tokens", "64", "--format", method)
    assert quantize(model, target, *scheme, *calibrated, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == method and len(report["output_errors"]) == 7
    for errors in report["output_errors"].values():
        assert 0 < errors[method] <= errors["worst"] and errors["rtn"] > 0 and errors["worst_layer"] < 3
    assert open_checkpoint(target).quantization == method
    assert quantize(model, target, *scheme, *calibrated, "--force") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["output", "error", "of", "rtn", method, "worst", "in", "layer"] in lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["SRC", "DST"], "--scheme says how to quantize and is required"),
        (["SRC", "DST", "--scheme", "q9"], "scheme 'q9' is unknown; known are int8, int8_g128, w8a8"),
        (["SRC", "DST.gguf", "--scheme", "int8"], "scheme int8 is for safetensors: DST must be a folder"),
        (["SRC", "DST", "--scheme", "q4_0", "--group-size", "32"], "--group-size is for safetensors, but q4_0"),
        (["SRC", "DST", "--scheme", "int8", "--method", "gptq"], "need --calibration FILE"),
        (["SRC", "DST", "--scheme", "int8", "--schema", "x"], "unknown flag --schema; did you mean --scheme?"),
        (["/nowhere", "DST", "--scheme", "int8"], "'/nowhere' is not on this machine"),
        (["SRC", "SRC", "--scheme", "int8", "--force"], "is what is read; write elsewhere"),
    ],
)
def test_mistakes(
    argv: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [a.replace("SRC", str(model)).replace("DST", str(tmp_path / "out")) for a in argv]
    assert main(["quantize", *named]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("llmjax: error: ")
        and message in error
        and error.removesuffix("\n").count("\n") == error.count("\n  hint: ")
    )
    assert not list(tmp_path.iterdir())
