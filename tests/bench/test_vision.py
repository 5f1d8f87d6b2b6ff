"""``llmjax bench vision`` on a golden checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmjax.bench import vision
from llmjax.bench.vision import VisionOptions
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN, SEEING
from tests.serve.pictures import golden, png

SMALL = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "1MiB"]


def flags(compile_cache_dir: str) -> list[str]:
    return [*SMALL, "--compilation-cache-dir", compile_cache_dir, "--compile-threads", "1"]


@pytest.mark.slow
def test_each_part_is_timed(compile_cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    line = [str(SEEING / "qwen2-vl"), *flags(compile_cache_dir), "--num-images", "1,2", "--image-size", "24x36"]
    line += ["--batch-size", "2", "--num-iters", "2", "--output-len", "4", "--input-len", "8"]
    assert vision.main([*line, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["batch_size"]) == ("vision", 2)
    one, two = found["results"]
    assert (one["images"], two["images"], one["size"]) == (1, 2, "24x36")
    assert two["rows"] == 2 * one["rows"] > 0
    assert one["prompt_tokens"] == 8 + one["rows"]
    for each in (one, two):
        assert each["encoder"] + each["prompt"] == pytest.approx(each["first_token"])
        assert min(each[name] for name in ("prepare", "prompt", "token", "requests_per_second")) > 0
        assert each["images_per_second"] == pytest.approx(each["images"] * each["requests_per_second"])
    shown = capsys.readouterr().out
    assert "encoder" in shown and "2 × 24x36" in shown


@pytest.mark.slow
def test_streams_beside_the_encoder(compile_cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    line = [str(SEEING / "qwen2-vl"), *flags(compile_cache_dir), "--num-images", "1", "--image-size", "24x36"]
    assert vision.main([*line, "--beside", "1", "--num-iters", "2", "--output-json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["results"]
    assert (found["size"], found["images"]) == ("24x36", 1)
    assert found["alone"] >= 0 and found["encoder"] > 0
    assert "beside the encoder" in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_line_of_vllm_gcu(compile_cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python3 -m vllm_utils.benchmark_vision_language``, with the same flags."""
    picture = tmp_path / "a.png"
    picture.write_bytes(png(golden("image0")))
    line = ["--backend", "vllm", "--model", str(SEEING / "qwen2-vl"), "--input-vision-file", str(picture)]
    line += ["--prompt", "Describe this image.", *flags(compile_cache_dir)]
    assert vision.command_line().parse([*line, "--device", "gcu"]).device == "gcu"  # its own plug-in's name
    assert vision.main([*line, "--output-len", "3", "--num-iters", "1", "--num-images", "1"]) == 0
    assert "1 × a.png" in capsys.readouterr().out


@pytest.mark.slow
def test_captions_are_timed(compile_cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture comes first there, and is encoded once for two prompts none of which has a known prefix."""
    path = tmp_path / "result.json"
    line = [str(SEEING / "blip"), *flags(compile_cache_dir), "--max-model-len", "100", "--num-images", "1"]
    line += ["--image-size", "24x36", "--num-iters", "2", "--output-len", "4", "--input-len", "8"]
    assert vision.main([*line, "--output-json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["results"]
    assert (found["images"], found["rows"], found["prompt_tokens"]) == (1, 10, 10 + 1 + 8)
    assert found["encoder"] + found["prompt"] == pytest.approx(found["first_token"])


@pytest.mark.slow
def test_a_model_that_does_not_see_says_so(compile_cache_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"sees no pictures$"):
        vision.main(
            [str(GOLDEN / "llama"), "--skip-tokenizer-init", *flags(compile_cache_dir), "--max-model-len", "64"]
        )


@pytest.mark.parametrize("size", ["8", "8x", "0x8", "8x99999", "axb"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(ConfigError, match="--image-size must be WIDTHxHEIGHT"):
        VisionOptions(image_size=(size,))
    assert VisionOptions(image_size=("8X16",)).sizes() == [(8, 16)]
