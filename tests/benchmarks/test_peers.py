"""Flags of the comparison, and the weights that a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import PeerOptions, bytes_read, main
from benchmarks.random_model import SHAPES, write_random_model
from llmjax.checkpoint import open_checkpoint
from llmjax.errors import ConfigError


def test_interpreters_by_engine() -> None:
    found = PeerOptions(peer=("llama.cpp=/a/python", "vllm=/b=c/python")).interpreters()
    assert list(found) == ["llmjax", "llama.cpp", "vllm"]
    assert found["vllm"] == "/b=c/python"


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("vllm", "--peer must be NAME=PYTHON, not 'vllm'"),
        ("vllm=", "--peer must be NAME=PYTHON"),
        ("vlm=python", "unknown engine 'vlm'; did you mean vllm"),
        ("llmjax=python", "--peer: llmjax always runs"),
    ],
)
def test_wrong_peers_are_named(peer: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        main(["--model", "m.gguf", "--peer", peer])


def test_wrong_flags_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for flags, message in (
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--points", "decode"], "--points: 'decode' is none of"),
        (["--output-json", str(tmp_path / "no" / "r.json")], "--output-json: no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            main([*flags, "--model", "m.gguf"])


def test_a_folder_is_no_common_format(tmp_path: Path) -> None:
    write_random_model(tmp_path / "tiny", SHAPES["tiny"], max_position_embeddings=128)
    with pytest.raises(ConfigError, match=r"tiny is not a \.gguf file"):
        main(["--model", str(tmp_path / "tiny"), "--work-dir", str(tmp_path)])


@pytest.mark.real_model
def test_a_tied_embedding_is_read_in_every_step(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.gguf is not None
    assert bytes_read(checkpoint) == sum(tensor.nbytes for tensor in checkpoint.gguf.tensors.values())
