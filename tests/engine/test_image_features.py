"""Whatever else an engine does, requests with images get the tokens that a plain engine gives them.

Run as a module, it prints what an engine on several devices generates, since a process has one number of devices:

    python -m tests.engine.test_image_features DEVICES CHECKPOINT
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from PIL import Image

from llmjax import LLM
from llmjax.speculative import SpeculativeConfig
from tests.engine.drafts.test_speculation import NGRAM, AlwaysWorthIt
from tests.engine.test_images import CASES, PAGE, check, engine_of, golden, prompt_of, scored

NAME = "qwen2-vl"
GREEDY = scored(max_tokens=24, ignore_eos=True)
Tokens = dict[str, list[int]]


def generated(llm: LLM, name: str = NAME) -> Tokens:
    """The tokens after each case's prompt, whose first log-probabilities are transformers'."""
    outputs = llm.generate([prompt_of(name, case) for case in CASES], GREEDY, use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        check(name, case, output, prompt=False)
    return {case: list(output.outputs[0].token_ids) for case, output in zip(CASES, outputs, strict=True)}


def check_idle(llm: LLM) -> None:
    """No page and no row is held."""
    engine = llm.engine
    engine.kv.check()
    engine.scheduler.media.check()
    assert (llm.kv_stats().used, engine.scheduler.media.used) == (0, 0)


@pytest.fixture(scope="module")
def plain(compile_cache_dir: str) -> Iterator[LLM]:
    llm = engine_of(NAME, compile_cache_dir)
    yield llm
    check_idle(llm)
    llm.close()


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Tokens:
    return generated(plain)


def test_a_prefix_may_end_inside_an_image(plain: LLM) -> None:
    """A prompt that ends with an image is computed again from the last page of its rows on."""
    found = golden(NAME)
    text = found["one/prompt"].tobytes().decode()
    prompt: Any = {
        "prompt": text[: text.index("<|vision_end|>")],
        "multi_modal_data": {"image": [Image.fromarray(found[f"image{found['one/images'][0]}"])]},
    }
    plain.reset_prefix_cache()
    (first,) = plain.generate([prompt], GREEDY, use_tqdm=False)
    (again,) = plain.generate([prompt], GREEDY, use_tqdm=False)
    count = len(first.prompt_token_ids or ())
    rows = len(found[f"image{found['one/images'][0]}/rows"])
    assert again.num_cached_tokens == (count - 1) // PAGE * PAGE
    assert count - rows < again.num_cached_tokens < count  # inside: rows are the prompt's last tokens
    assert first.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.slow
def test_drafts(expected: Tokens, compile_cache_dir: str) -> None:
    # One step at a time: else how long steps take decides how many, and so where drafts are looked for.
    llm = engine_of(NAME, compile_cache_dir, speculative_config=NGRAM, decode_steps=1)
    llm.engine.runner.programs.wait_all()  # there are no drafts before
    llm.engine._speculation = AlwaysWorthIt(SpeculativeConfig.of(NGRAM))
    assert generated(llm) == expected
    assert generated(llm) == expected  # after prefixes that were found
    assert llm.stats.draft_tokens > 0
    check_idle(llm)
    llm.close()


@pytest.mark.slow
def test_pages_that_come_back_from_host_memory_are_those_of_the_image(expected: Tokens, compile_cache_dir: str) -> None:
    llm = engine_of(NAME, compile_cache_dir, kv_offloading_size=0.001)
    assert generated(llm) == expected

    def lose_pages() -> None:
        for pool in llm.engine.kv.pools:
            pool.release(pool.allocate(pool.available) or [])
        llm.engine.kv.tier.move(llm.engine.runner)

    lose_pages()
    prompt = prompt_of(NAME, "one")
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    check(NAME, "one", output, prompt=False)
    hits = llm.stats.offload.host_hits
    assert hits >= (len(output.prompt_token_ids or ()) - 1) // PAGE * PAGE
    assert list(output.outputs[0].token_ids) == expected["one"]
    # Another picture of the size has the same tokens and other pages.
    lose_pages()
    (picture,) = prompt["multi_modal_data"]["image"]
    other = {**prompt, "multi_modal_data": {"image": [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]}}
    (changed,) = llm.generate([other], GREEDY, use_tqdm=False)
    assert changed.prompt_token_ids == output.prompt_token_ids
    assert changed.num_cached_tokens < len(output.prompt_token_ids or ()) // 2
    check_idle(llm)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept(expected: Tokens, compile_cache_dir: str, level: int) -> None:
    llm = engine_of(NAME, compile_cache_dir)
    assert generated(llm) == expected
    llm.sleep(level)
    llm.wake_up()
    assert generated(llm) == expected
    check_idle(llm)
    llm.close()


@pytest.mark.slow
def test_several_engines(expected: Tokens, compile_cache_dir: str) -> None:
    llm = engine_of(NAME, compile_cache_dir, data_parallel_size=2)
    for _ in range(2):
        assert generated(llm) == expected
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl", NAME, "gemma3"])
def test_several_devices(name: str) -> None:
    """The encoder is on each of them; qwen3-vl adds rows after some layers, and gemma3's images see themselves."""
    command = [sys.executable, "-m", "tests.engine.test_image_features"]
    found = []
    for devices in (1, 2):
        done = subprocess.run(
            [*command, str(devices), name],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
            timeout=550,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]


def main() -> None:
    devices, name = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    llm = engine_of(name, "off", tensor_parallel_size=devices)
    print(json.dumps(generated(llm, name)))
    check_idle(llm)
    llm.close()


if __name__ == "__main__":
    main()
