"""Agreement of KV types on a tiny model, from flags to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kv_quality import Agreement, common_prefix, continuations, cut_prompts, main, same_next_tokens
from llmjax import LLM
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
TEXT = json.loads((TESTS / "evaluation" / "golden" / "perplexity.json").read_text())["text"]
MODEL = GOLDEN / "llama"


def test_prompts_are_spread_over_the_text() -> None:
    assert cut_prompts(range(100), bos=None, count=3, length=10) == [[*range(s, s + 10)] for s in (0, 45, 90)]
    assert cut_prompts(range(20), bos=7, count=2, length=10) == [[7, *range(10)], [7, *range(10, 20)]]
    with pytest.raises(ConfigError, match="the text has 19 tokens, 2 prompts of 10 need 20"):
        cut_prompts(range(19), bos=None, count=2, length=10)


def test_prefixes_end_before_the_first_difference() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [0, 2, 3])] == [3, 2, 0]
    agreement = Agreement(next_token=0.98765, prefix=(4, 2, 4), length=4)
    assert agreement.row("int8") == "| int8 | 98.77 % | 3 of 4 | 2 of 3 |"


@pytest.mark.slow
def test_only_first_choices_are_the_same(compile_cache_dir: str) -> None:
    llm = LLM(
        str(MODEL),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_logprobs=0,
        compilation_cache_dir=compile_cache_dir,
    )
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    said = continuations(llm, prompts, 10)
    assert [len(tokens) for tokens in said] == [10, 10]
    assert same_next_tokens(llm, prompts, said) == 1
    changed = [[*said[0][:9], (said[0][9] + 1) % 96], said[1]]
    assert same_next_tokens(llm, prompts, changed) == 19 / 20
    llm.close()


@pytest.mark.slow
def test_the_table_of_a_tiny_model(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    flags = f"{MODEL} --text {tmp_path / 't.txt'} --prompts 4 --prompt-tokens 16 --new-tokens 8 --reference float32"
    settings = f"--settings tokenizer={TESTS / 'engine/golden/characters'} dtype=float32 max_num_batched_tokens=16"
    settings += " max_num_seqs=4"
    settings += f" compilation_cache_dir={compile_cache_dir}"
    assert main([*flags.split(), "--types", "fp8_e5m2", *settings.split()]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2] == "llama: 4 prompts of 16 tokens of t.txt, 8 new tokens each, against float32"
    assert shown[6] == "| float32 | 100.00 % | 8 of 8 | 4 of 4 |"
    assert shown[7].startswith("| fp8_e5m2 | ")
    assert main([*flags.split(), "--types", "int3", *settings.split()]) == 1
    assert "kv_quality: error: LLM(): kv_cache_dtype must be one of auto, " in capsys.readouterr().err
