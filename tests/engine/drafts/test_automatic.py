"""Drafts that nobody has asked for: only where they change no token."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.config import EngineConfig
from llmjax.engine.build import load
from llmjax.engine.drafts import automatic
from llmjax.engine.drafts.automatic import DRAFTS, LOOKUP
from llmjax.engine.ranks.alone import Alone
from llmjax.kernels.cpu.library import library
from llmjax.speculative import SpeculativeConfig
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels are not built")

SETTINGS: dict[str, Any] = {
    "model": str(GOLDEN / "llama"),
    "quantization": "int8",
    "batch_invariant": True,
    "kv_cache_memory_bytes": 2**20,
    "compilation_cache_dir": "off",
}
OWN = {"method": "ngram", "num_speculative_tokens": 3}


def loaded(**changes: Any) -> tuple[SpeculativeConfig | None, set[int]]:
    """The speculative settings of an engine, and the drafts of its programs."""
    config, compiler = load(EngineConfig(**{**SETTINGS, **changes}), Alone())
    return config.speculative, {bucket.drafts for bucket in compiler.layouts}


def test_prompt_lookup_is_on_for_two_streams_where_it_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded() == (None, {0}), "so small a model gains nothing"
    monkeypatch.setattr(automatic, "WORTH", 1)
    found, drafts = loaded()
    assert found == SpeculativeConfig.of(LOOKUP) and found.disable_by_batch_size == 2
    assert drafts == {0, DRAFTS // 4, DRAFTS // 2, DRAFTS}
    assert loaded(speculative_config=OWN)[0] == SpeculativeConfig.of(OWN)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_speculation": False},
        {"quantization": None},  # plain products are others with other numbers of rows
        {"activations": "float"},
        {"max_num_batched_tokens": DRAFTS, "max_num_seqs": 4},
        {"model": str(GOLDEN / "mamba2")},
    ],
)
def test_elsewhere_there_are_none(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "WORTH", 1)
    assert loaded(**changes) == (None, {0})
