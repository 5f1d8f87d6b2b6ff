"""An engine that sleeps has nothing on its device, and computes the same when it has been woken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.errors import Asleep, CheckpointError, InvalidRequest
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"
PROMPT = list(range(3, 30))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sleeping") / "llama"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((LLAMA / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, compile_cache_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        quantization="q8_0",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,
        compilation_cache_dir=compile_cache_dir,
        profile_dir=str(tmp_path_factory.mktemp("profiles")),
    )
    yield llm
    llm.close()


def said(llm: LLM) -> tuple[list[int], Any]:
    """Tokens and their log-probabilities, which may differ by how prompts are cut into steps."""
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs or []
    scores = np.array([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
    return tokens, scores


def same(found: tuple[list[int], Any], expected: tuple[list[int], Any]) -> bool:
    return found[0] == expected[0] and bool(np.allclose(found[1], expected[1], atol=1e-4))


def on_device(llm: LLM) -> tuple[int, int]:
    """Bytes of weights and of state on the device."""
    parts = (llm.engine.model.params, llm.engine.runner.executor.state)
    weights, state = (sum(leaf.nbytes for leaf in jax.tree.leaves(part) if not leaf.is_deleted()) for part in parts)
    return weights, state


def test_levels(llm: LLM) -> None:
    before, (weights, state) = said(llm), on_device(llm)
    assert weights > 0 and state > 0 and not llm.is_sleeping
    for level, left in ((1, weights), (2, 0)):
        llm.sleep(level)
        assert llm.is_sleeping and on_device(llm) == (left, 0)
        with pytest.raises(Asleep, match="woken"):
            said(llm)
        llm.wake_up()
        assert not llm.is_sleeping and on_device(llm) == (weights, state)
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert same(said(llm), before)
    assert llm.kv_stats().used == 0


def test_deeper_and_deeper(llm: LLM) -> None:
    before = said(llm)
    llm.sleep(1)
    llm.sleep(2)
    assert on_device(llm) == (0, 0)
    llm.sleep(1)
    llm.wake_up(tags=["kv_cache"])
    with pytest.raises(Asleep):
        said(llm)
    llm.wake_up(["weights"])
    llm.wake_up()
    assert same(said(llm), before)


def test_weights_of_other_devices_wait_in_the_hosts_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU acts as an accelerator, whose arrays the host sees as copies."""
    before = said(llm)
    sleeper = llm.engine.runner.executor._sleeper
    monkeypatch.setattr(type(sleeper._platform), "is_cpu", property(lambda self: False))
    monkeypatch.setattr("llmjax.engine.device.sleep.np.asarray", lambda leaf: np.array(leaf))
    llm.sleep(1)
    assert on_device(llm) == (0, 0)
    llm.wake_up()
    monkeypatch.undo()
    assert same(said(llm), before)


def test_what_cannot_be(llm: LLM) -> None:
    for arguments, field in (((3,), "level"), ((True,), "level"), ((1, "now"), "mode")):
        with pytest.raises(InvalidRequest) as raised:
            llm.sleep(*arguments)  # type: ignore[arg-type]
        assert raised.value.field == field
    with pytest.raises(InvalidRequest, match="tags"):
        llm.wake_up(["scheduling"])
    llm.wake_up()
    assert not llm.is_sleeping


def test_a_profile(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no profile is being written"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(InvalidRequest, match="already"):
        llm.start_profile()
    said(llm)
    llm.stop_profile()
    folder = Path(llm.config.profile_dir or "")
    (trace,) = folder.rglob("*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert list(folder.rglob("*.xplane.pb"))


@pytest.mark.slow
def test_files_that_hold_another_model(llm: LLM, folder: Path) -> None:
    config = (folder / "config.json").read_text()
    llm.sleep(2)
    (folder / "config.json").write_text(config.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    with pytest.raises(CheckpointError, match="another model"):
        llm.wake_up()
    assert llm.is_sleeping
    (folder / "config.json").write_text(config)
    llm.wake_up()
    assert not llm.is_sleeping and said(llm)
