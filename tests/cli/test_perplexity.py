"""``llmjax eval perplexity`` as it is typed, on a tiny model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmjax.cli import main
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
RESULTS = json.loads((TESTS / "evaluation" / "golden" / "perplexity.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "text [1].txt"
    path.write_text(RESULTS["text"], encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def engine(compile_cache_dir: str) -> list[str]:
    line = f"--model {GOLDEN / 'llama'} --tokenizer {TESTS / 'engine/golden/characters'} --page-size 4"
    line += f" --max-num-batched-tokens 16 --kv-cache-memory-bytes 1MiB --compilation-cache-dir {compile_cache_dir}"
    return [*line.split(), "--dtype", "float32"]


@pytest.mark.slow
def test_the_report_names_windows_and_figure(text: str, engine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    expected = RESULTS["perplexity"]["llama"][0]
    assert main(["eval", "perplexity", "--text", text, "--context", "32", *engine]) == 0
    out = capsys.readouterr().out
    assert f"{text}: 251 tokens" in out
    assert "windows of 32 tokens, second half scored (as llama-perplexity), each begins with BOS" in out
    assert "105 tokens in 7 windows" in out
    assert f"{expected['perplexity']:.2f}"[:6] in out
    assert f"± {expected['standard_error']:.2f}"[:6] in out

    expected = RESULTS["perplexity"]["llama"][1]
    assert main(["eval", "perplexity", "--text", text, "--context", "48", "--stride", "20", "--json", *engine]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert (fields["scored_tokens"], fields["bos"], fields["text_tokens"]) == (expected["tokens"], 1, 251)
    assert (fields["context"], fields["stride"], fields["dtype"]) == (48, 20, "float32")
    assert "as Hugging Face" in fields["convention"]
    assert fields["seconds"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--text names the file to score and is required"),
        (["--text", "/nowhere.txt"], "--text /nowhere.txt: No such file or directory"),
        (["--text", "/nowhere.txt", "--stride", "600"], "stride must lie in [1, 512] (the context), not 600"),
        (["--text", "/nowhere.txt", "--context", "x"], "--context must be a number of tokens such as 4096 or 8k"),
        (["--text", "t", "--skip-tokenizer-init"], "a text cannot be scored without a tokenizer"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", "--model", "/nowhere", *argv]) == 1
    assert capsys.readouterr().err.startswith(f"llmjax: error: {message}")


def test_a_text_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_bytes(b"a\xff")
    assert main(["eval", "perplexity", "--text", str(tmp_path / "t")]) == 1
    assert "is not UTF-8 text (invalid start byte at byte 1)" in capsys.readouterr().err


def test_the_evaluations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 1
    assert "perplexity" in capsys.readouterr().out
    assert main(["eval", "perplexty"]) == 1
    assert "did you mean perplexity?" in capsys.readouterr().err
