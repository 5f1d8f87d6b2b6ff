"""Adapters of models whose layers are divided among stages, each of which has its own layers' share of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from tests.checkpoints import ADAPTERS, GOLDEN, SEEING
from tests.engine import test_images
from tests.engine.adapters.asking import Asking, Said, adaptation, golden
from tests.engine.test_pipeline_parallel import staged
from tests.levels import at_levels

TOLERANCE = 2e-4
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
NAMES = {
    "gains, embeddings and a head": ["plain", "dora", "embeddings", "saved"],
    "a tied head": ["tied-rows"],
    "experts": ["qwen3-moe"],
    "layers of several kinds": ["qwen3-next"],
}


def base_of(name: str) -> Path:
    return GOLDEN / (ADAPTERS / name / "base.txt").read_text()


def check(found: list[Said], expected: list[Said]) -> None:
    assert [said.tokens for said in found] == [said.tokens for said in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE, rtol=0)


def of_name(name: str, folder: Path) -> Adaptation:
    """An adapter of a folder that has the content of a golden one now."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ADAPTERS / name, folder)
    return Adaptation.of([ScaledAdapter(reference=AdapterReference.read("own", folder, number=1))])


def asked(llm: LLM, names: list[str], folder: Path) -> list[Said]:
    """Batches with more adapters than places, beside a long request without one that decodes while they are loaded.
    Then contents that take the place of others under their name."""
    asking, plain = Asking(llm), golden(names[0])[0]
    batch = [(plain[:5], None), *((golden(name)[0], adaptation(name)) for name in names)]
    found = asking.ask(batch, tokens=[40, *[8 + 3 * i for i in range(len(names))]])
    found += asking.ask(batch, tokens=4, scored=True)
    for name in (names[0], names[-1], names[0]):
        found += asking.ask([(plain, of_name(name, folder)), (plain, None)], tokens=8, scored=True)
    return found


FIRST = next(iter(NAMES))
CASES = [(FIRST, 2), (FIRST, 3), *((case, 2) for case in NAMES if case != FIRST)]


@pytest.mark.parametrize(("case", "stages"), at_levels(CASES, fast=CASES[:1], slow=CASES))
def test_as_in_one_stage(case: str, stages: int, tmp_path: Path) -> None:
    names = NAMES[case]
    with staged(base_of(names[0]), 1, **SETTINGS) as llm:
        expected = asked(llm, names, tmp_path / "own")
    with staged(base_of(names[0]), stages, **SETTINGS) as llm:
        found = asked(llm, names, tmp_path / "own")
    check(found, expected)
    for name, said in zip(names, found[len(names) + 2 :], strict=False):
        np.testing.assert_allclose(said.logprobs, golden(name)[1], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_model_with_an_adapter_of_its_own() -> None:
    """It changes prompts with pictures, whose encoder each stage has as a whole."""
    name = "phi4_multimodal"
    options: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 64, "skip_tokenizer_init": False}
    with staged(SEEING / name, 2, **options) as llm:
        for case in ("one", "none"):
            prompt, params = (
                test_images.prompt_of(name, case),
                SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
            )
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == test_images.golden(name)[f"{case}/continued"].tolist()
