"""Perplexities of a tiny model by scheme, from flags to the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import REFERENCE, ROWS, Difference, Score, TooFarError, check, main, row_settings, table
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.library import library
from llmjax.models import model_config
from llmjax.quantization.plan import QuantizationPlan
from llmjax.settings import make_config
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
RESULTS = json.loads((TESTS / "evaluation" / "golden" / "perplexity.json").read_text())


def test_a_row_is_a_scheme_and_settings() -> None:
    assert row_settings("q4_k") == {"activations": "float", "quantization": "q4_k"}
    row = row_settings("none,dtype=float32,max_num_batched_tokens=16,activations=int8")
    assert row == {"activations": "int8", "quantization": "none", "dtype": "float32", "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError, match="'dtypes=float32' is not a SETTING=VALUE of the engine; did you mean dtype"):
        row_settings("none,dtypes=float32")
    with pytest.raises(ConfigError, match="'float32' is not a SETTING=VALUE"):
        row_settings("none,float32")


@pytest.mark.skipif(library() is None, reason="the C++ library is not built")
def test_a_row_may_name_an_instruction_set() -> None:
    assert row_settings("stored,isa=generic") == {"activations": "float", "quantization": "stored", "isa": "generic"}
    with pytest.raises(ConfigError, match="isa=mmx: not available; there is: generic"):
        row_settings("stored,isa=mmx")


def test_a_row_that_differs_too_much_is_named() -> None:
    def score(*logprobs: float) -> Score:
        return Score(logprobs=logprobs, weight_bytes=1, dtype="float32", seconds=1)

    scores = {"none": score(-1.0, -2.0), "near": score(-1.001, -2.0), "far": score(-1.0, -1.99)}
    check(scores, at_most=0.5)
    with pytest.raises(TooFarError, match=r"more than 0.1 % from that of none: far by -0.499 %$"):
        check(scores, at_most=0.1)
    with pytest.raises(TooFarError, match="none: wrong by "):
        check({**scores, "wrong": score(float("nan"), -2.0)}, at_most=0.5)


def test_every_row_can_be_run() -> None:
    assert ROWS[0] == REFERENCE
    model = model_config(json.loads((GOLDEN / "llama" / "config.json").read_text()))
    for row in ROWS:
        settings = make_config(EngineConfig, row_settings(row), source=row)
        QuantizationPlan.of(settings.quantization, {}, model)


def test_differences_are_taken_token_by_token() -> None:
    rng = np.random.default_rng(0)
    reference = -rng.exponential(3, 400)
    change = rng.normal(0.01, 0.02, 400)
    found = Difference.of(tuple(reference - change), tuple(reference))
    assert found.value == pytest.approx(np.exp(change.mean()) - 1)
    assert found.error == pytest.approx(np.exp(change.mean()) * change.std(ddof=1) / 20)
    assert Difference.of(tuple(reference), tuple(reference)) == Difference(0.0, 0.0)


def test_the_table_names_figures_and_settings() -> None:
    scores = {
        REFERENCE: Score(logprobs=(-1.0, -2.0, -3.0), weight_bytes=4_000_000, dtype="float32", seconds=1),
        "q4_k,activations=int8": Score(logprobs=(-1.1, -2.1, -3.1), weight_bytes=500_000, dtype="bfloat16", seconds=1),
    }
    _, _, first, second = table(scores).splitlines()
    error = np.exp(2) * np.std([1, 2, 3]) / np.sqrt(2)
    assert first == f"| none | float32 | 4.0 | 7.3891 ± {error:.2f} | |"
    assert (
        second == f"| q4_k | bfloat16, activations=int8 | 0.5 | 8.1662 ± {error * np.exp(0.1):.2f} | +10.52 % ± 0.00 |"
    )


@pytest.mark.slow
def test_scores_are_kept_and_the_reference_is_hugging_faces(
    tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(RESULTS["text"], encoding="utf-8")
    expected = RESULTS["perplexity"]["llama"][0]
    flags = [str(GOLDEN / "llama"), "--text", str(text), "--context", str(expected["context"])]
    flags += ["--results", str(tmp_path / "r.json"), "--settings", f"tokenizer={TESTS / 'engine/golden/characters'}"]
    flags += ["page_size=4", f"compilation_cache_dir={compile_cache_dir}"]
    assert main([*flags, "--rows", REFERENCE]) == 0
    first = capsys.readouterr().out.splitlines()
    perplexity, error = map(float, first[-2].split("|")[4].split("±"))
    assert perplexity == pytest.approx(expected["perplexity"], rel=1e-4)
    assert error == pytest.approx(expected["standard_error"], abs=0.02)
    assert f"{expected['tokens']} tokens scored" in first[2]

    written = (tmp_path / "r.json").read_text()
    assert main([*flags, "--rows", REFERENCE]) == 0
    assert capsys.readouterr().out.splitlines() == first
    assert (tmp_path / "r.json").read_text() == written

    assert main([*flags, "--rows", REFERENCE, "int5"]) == 1
    assert "quantization 'int5' is unknown" in capsys.readouterr().err
    assert main([*flags[:2], str(tmp_path / "nowhere")]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "r.json").write_text("{")
    assert main(flags) == 1
    assert f"--results {tmp_path / 'r.json'}: " in capsys.readouterr().err
