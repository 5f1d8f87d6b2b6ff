"""Whole engines on the golden checkpoints of models that see: logits against transformers', however prompts are cut.

Budget and pages are small, so that images are cut into chunks, found in the prefix cache, and computed again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, AsyncLLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control
from llmjax.engine.clients.loop import ThreadEngine
from llmjax.errors import InvalidRequest
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import RequestOutputKind
from tests.checkpoints import SEEING
from tests.levels import at_levels
from tests.models.vision import test_video
from tests.waiting import until_async

pytestmark = pytest.mark.jax_api

TOLERANCE = 2e-4
PAGE = 4
CHUNKS = (1, 7, 64)
NAMES = [
    "qwen2-vl",
    "qwen2_5-vl",
    "qwen3-vl",
    "gemma3",
    "idefics3",
    "llava",
    "internvl",
    "pixtral",
    "mistral3",
    "llava-next",
    "llava-onevision",
    "qwen3_5",
    "paligemma",
    "paligemma2",
    "glm4v",
    "glm4v-moe",
    "glm46v",
    "glm-ocr",
    "gemma4",
    "gemma4-layered",
    "llama4",
    "minicpmv",
    "phi3_v",
    "kimi-vl",
    "kimi-k2_5",
    "deepseek-vl2",
    "deepseek-vl",
    "janus",
    "aya-vision",
    "cohere2-vision",
    "llava-next-video",
    "idefics2",
    "ovis2",
    "molmo2",
    "molmo2-olmo",
    "granite-vision",
    "llava-full",
    "vipllava",
    "lighton-ocr",
    "phi4_multimodal",
]
CASES = ["none", "one", "two", "first"]
# An image, or a prompt with images, has to be in one step.
WHOLE_IMAGES = ("molmo2", "molmo2-olmo")
WHOLE = {"gemma3": (20, 64), "gemma4": (20, 64), "paligemma": (64,), "paligemma2": (64,)}
WHOLE |= dict.fromkeys(WHOLE_IMAGES, (128,))
WHOLE_PROMPTS = ("paligemma", "paligemma2")
RECURRENT = ("qwen3_5",)
WINDOWED = ("gemma3", "gemma4", "gemma4-layered", "paligemma2", "aya-vision", "cohere2-vision")
SIZES = {name: WHOLE.get(name, CHUNKS) for name in NAMES}
VIDEOS = ["qwen2-vl", "qwen2_5-vl", "qwen3-vl", "glm4v", "glm46v", "llava-next-video", "llava-onevision", "molmo2"]
MORE = [f"{name} in chunks of {chunk}" for name in NAMES for chunk in SIZES[name]]
FAST = ["qwen2-vl in chunks of 1", "qwen2_5-vl in chunks of 7", "qwen3-vl in chunks of 64", "gemma3 in chunks of 20"]
SLOW = [f"{name} in chunks of {SIZES[name][0] if name in WHOLE else 7}" for name in NAMES[4:]]


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(SEEING / name / "golden.npz") as archive:
        return dict(archive)


def engine_of(name: str, compile_cache_dir: str, *, folder: Path | None = None, **options: Any) -> LLM:
    """An engine in which a prompt's log-probabilities are those of all tokens."""
    options = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": 160,
        "kv_cache_memory_bytes": 2**20,
        **options,
    }
    vocab_size = golden(name)["one/logits"].shape[1]
    return LLM(
        str(folder or SEEING / name),
        dtype="float32",
        page_size=PAGE,
        max_logprobs=vocab_size,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        **options,
    )


def prompt_of(name: str, case: str) -> dict[str, Any]:
    found = golden(name)
    pictures = [Image.fromarray(found[f"image{number}"]) for number in found[f"{case}/images"]]
    return {"prompt": found[f"{case}/prompt"].tobytes().decode(), "multi_modal_data": {"image": pictures}}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def rows_of(entries: Any, size: int) -> np.ndarray:
    """Log-probabilities of all tokens, [n, V]."""
    return np.array([[entry[token].logprob for token in range(size)] for entry in entries])


def check(name: str, case: str, output: RequestOutput, *, prompt: bool) -> None:
    """Compares the log-probabilities after the prompt, and those in it, with transformers'."""
    expected = log_softmax(golden(name)[f"{case}/logits"])
    assert output.error is None
    assert list(output.prompt_token_ids or ()) == golden(name)[f"{case}/tokens"].tolist()
    after = rows_of(output.outputs[0].logprobs[:1], expected.shape[1])  # type: ignore[index]
    np.testing.assert_allclose(after[0], expected[-1], atol=TOLERANCE)
    if prompt:
        assert output.prompt_logprobs is not None
        found = rows_of(output.prompt_logprobs[1:], expected.shape[1])
        # Layers of the gated delta rule add up what f32 rounds: transformers' own logits are as far from those that it
        # computes in f64 as ours are from these.
        atol = 5e-5 * float(np.abs(expected).max()) if name in RECURRENT else TOLERANCE
        np.testing.assert_allclose(found, expected[:-1], atol=max(atol, TOLERANCE))


class Seeing(NamedTuple):
    """A golden checkpoint in an engine."""

    name: str
    llm: LLM
    budget: int


@pytest.fixture(scope="module", params=at_levels(MORE, fast=FAST, slow=SLOW))
def engine(request: Any, compile_cache_dir: str) -> Iterator[Seeing]:
    name, _, chunk = request.param.partition(" in chunks of ")
    budget = max(int(chunk), 2)
    llm = engine_of(name, compile_cache_dir, max_num_batched_tokens=budget, max_num_seqs=min(2, int(chunk)))
    yield Seeing(name, llm, budget)
    media = llm.engine.scheduler.media
    llm.engine.kv.check()
    media.check()
    assert (llm.kv_stats().used, media.used) == (0, 0)
    llm.close()


def scored(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, logprobs=-1, **options)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(engine: Seeing, case: str) -> None:
    params = scored(max_tokens=2, prompt_logprobs=-1)
    (output,) = engine.llm.generate([prompt_of(engine.name, case)], params, use_tqdm=False)
    check(engine.name, case, output, prompt=True)


def test_prefixes_that_end_in_images_are_found(engine: Seeing) -> None:
    """Whatever part of a prompt is found in the cache, what follows is as if nothing were."""
    name, llm, budget = engine
    prompt = prompt_of(name, "two")
    (first,) = llm.generate([prompt], scored(max_tokens=1), use_tqdm=False)
    check(name, "two", first, prompt=False)
    (again,) = llm.generate([prompt], scored(max_tokens=1), use_tqdm=False)
    check(name, "two", again, prompt=False)
    pages = (len(first.prompt_token_ids or ()) - 1) // PAGE * PAGE
    few = name in WINDOWED and budget < PAGE  # pages of windows, which the same request has needed further on
    if name in RECURRENT or few:  # found where there is a snapshot, or the pages that a window reaches back to
        assert again.num_cached_tokens in range(0, pages + 1, PAGE)
    else:
        assert again.num_cached_tokens == (0 if name in WHOLE_PROMPTS else pages)
    # The same tokens with another image of the same size have nothing in common from the image on.
    other = np.array(prompt["multi_modal_data"]["image"][0])
    other[0, 0] ^= 255
    images = [Image.fromarray(other), prompt["multi_modal_data"]["image"][1]]
    (changed,) = llm.generate([{**prompt, "multi_modal_data": {"image": images}}], scored(max_tokens=1), use_tqdm=False)
    assert changed.prompt_token_ids == first.prompt_token_ids
    assert changed.num_cached_tokens < len(golden(name)["two/tokens"]) // 4


def test_several_continuations_and_requests_at_once(engine: Seeing) -> None:
    name, llm, _ = engine
    llm.reset_prefix_cache()
    alone = {}
    for case in CASES:
        (alone[case],) = llm.generate([prompt_of(name, case)], scored(max_tokens=12), use_tqdm=False)
        check(name, case, alone[case], prompt=False)
    llm.reset_prefix_cache()
    together = llm.generate([prompt_of(name, case) for case in CASES], scored(max_tokens=12, n=2), use_tqdm=False)
    for case, output in zip(CASES, together, strict=True):
        for one in output.outputs:
            assert list(one.token_ids) == list(alone[case].outputs[0].token_ids)


@pytest.mark.parametrize("name", at_levels(NAMES, fast=NAMES[:1], slow=NAMES[2:4]))
def test_a_preempted_request_sees_the_same(name: str, compile_cache_dir: str) -> None:
    """Pages for a request and a half, and rows for one image: requests lose both."""
    cases = sorted(CASES, key=["one", "two", "none", "first"].index)  # the longest at once
    batched = 128 if name in WHOLE_IMAGES else 64 if name in WHOLE_PROMPTS else 16
    rows = max(36, *(len(golden(name)[f"image{number}/rows"]) for number in range(3)))
    rows = 80 if name in WHOLE_IMAGES else rows  # for two images, which have to be there at once
    pages = {"cohere2-vision": 48, "llava-next": 41, "llava-next-video": 41}.get(
        name, 56 if name in WINDOWED else 44
    )  # of which some are of windows
    longest = max(len(golden(name)[f"{case}/tokens"]) for case in CASES)
    params = scored(max_tokens=max(48, 140 - longest), ignore_eos=True)  # so that two need more pages than there are
    llm = engine_of(name, compile_cache_dir, max_num_batched_tokens=batched)
    alone = [llm.generate([prompt_of(name, case)], params, use_tqdm=False)[0] for case in cases]
    page_bytes = llm.info.kv_bytes // (llm.info.kv_tokens // PAGE)
    llm.close()
    tight = engine_of(name, compile_cache_dir, kv_cache_memory_bytes=pages * page_bytes, max_num_batched_tokens=batched)
    media = tight.engine.scheduler.media
    tight.engine.scheduler.media = type(media)(rows, budget=16)
    outputs = tight.generate([prompt_of(name, case) for case in cases], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [list(o.outputs[0].token_ids) for o in alone]
    preemptions = sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)
    assert preemptions > 0 or name in RECURRENT  # whose states run out before pages do, so that requests wait
    tight.engine.scheduler.media.check()
    assert tight.engine.scheduler.media.used == 0
    tight.close()


@pytest.mark.parametrize("name", at_levels(NAMES, fast=["qwen3-vl"], slow=["qwen2_5-vl", "llama4", "minicpmv"]))
def test_an_encoder_that_goes_in_parts_beside_streams(
    name: str, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer at a time between steps; what comes out is as if it were one run."""
    monkeypatch.setattr("llmjax.engine.programs.compiler.PART_PRODUCTS", {True: 1.0, False: 1.0})
    room = {"max_num_batched_tokens": WHOLE[name][-1]} if name in WHOLE_IMAGES else {}
    llm = engine_of(name, compile_cache_dir, **room)
    text, cases = prompt_of(name, "none"), ["one", "two", "first"]
    outputs = llm.generate(
        [text, *(prompt_of(name, case) for case in cases)],
        [scored(max_tokens=24, ignore_eos=True), *[scored(max_tokens=2)] * 3],
        use_tqdm=False,
    )
    check(name, "none", outputs[0], prompt=False)
    for case, output in zip(cases, outputs[1:], strict=True):
        check(name, case, output, prompt=False)
    media = llm.engine.scheduler.media
    media.check()
    assert media.used == 0
    llm.close()


@pytest.mark.parametrize("name", at_levels(VIDEOS, fast=["qwen3-vl"], slow=["qwen2_5-vl", "glm4v"]))
def test_logits_behind_videos_are_those_of_transformers(name: str, compile_cache_dir: str, tmp_path: Path) -> None:
    """In chunks that end inside a video's frames, and again from the prefix cache."""
    found = test_video.golden(name)
    metadata = {"fps": float(found["fps"]), "frames_indices": found["indices"], "total_num_frames": int(found["total"])}
    data: dict[str, Any] = {"video": (found["frames"], metadata)}
    if name not in test_video.ALONE:
        data["image"] = Image.fromarray(golden(name)["image0"])
    prompt: Any = {"prompt": found["prompt"].tobytes().decode(), "multi_modal_data": data}
    expected = log_softmax(found["logits"])
    folder = test_video.seeing_video(name, tmp_path / name)
    budget = WHOLE[name][0] if name in WHOLE_IMAGES else 20
    llm = engine_of(name, compile_cache_dir, folder=folder, max_num_batched_tokens=budget)
    for again in range(2):
        params = scored(max_tokens=1, prompt_logprobs=None if again else -1)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert list(output.prompt_token_ids or ()) == found["tokens"].tolist()
        rows = rows_of(output.outputs[0].logprobs, expected.shape[1])
        if not again:
            assert output.prompt_logprobs is not None
            rows = np.concatenate([rows_of(output.prompt_logprobs[1:], expected.shape[1]), rows])
        np.testing.assert_allclose(rows, expected[-len(rows) :], atol=TOLERANCE)
    assert output.num_cached_tokens == (len(found["tokens"]) - 1) // PAGE * PAGE
    for wrong, reason in [
        ({**data, "video": []}, "1 video placeholders, but there are 0 videos"),
        ({**data, "video": [data["video"]] * 5}, "a prompt may have 4"),
        ({**data, "video": 3}, "video 1: a int is not a video"),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            llm.generate([{**prompt, "multi_modal_data": wrong}], use_tqdm=False)
    llm.close()


@pytest.mark.slow
def test_crops_of_a_picture_are_as_pictures_of_their_own(compile_cache_dir: str, tmp_path: Path) -> None:
    """Pan-and-scan: tokens and logits are those that a prompt with the words and the parts in it has."""
    name, folder = "gemma3", tmp_path / "panned"
    shutil.copytree(SEEING / name, folder)
    path = folder / "preprocessor_config.json"
    keys = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 12, "pan_and_scan_max_num_crops": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    picture = Image.fromarray(golden(name)["image2"])  # 111 x 50 pixels, which are two parts
    parts = [picture, picture.crop((0, 0, 56, 50)), picture.crop((56, 0, 111, 50))]
    one = "<start_of_image>"
    words = f"Here is the original image {one} and here are some crops to help you see better {one} {one}"
    found = []
    for model, text, pictures in ((folder, one, [picture]), (SEEING / name, words, parts)):
        llm = engine_of(name, compile_cache_dir, folder=model, max_num_batched_tokens=64, max_model_len=256)
        prompt: Any = {"prompt": f"See {text}? ", "multi_modal_data": {"image": pictures}}
        (output,) = llm.generate([prompt], scored(max_tokens=4, prompt_logprobs=-1), use_tqdm=False)
        llm.close()
        assert output.prompt_logprobs is not None
        found.append((list(output.prompt_token_ids or ()), rows_of(output.prompt_logprobs[1:], 320)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


def test_what_a_prompt_with_images_must_be(engine: Seeing) -> None:
    name, llm, _ = engine
    picture = Image.fromarray(golden(name)["image0"])
    text = golden(name)["one/prompt"].tobytes().decode()
    for prompt, reason in [
        ({"prompt": text}, "the prompt has 1 image placeholders, but there are 0 images"),
        ({"prompt": text, "multi_modal_data": {"image": [picture] * 2}}, "but there are 2 images"),
        ({"prompt": text, "multi_modal_data": {"image": [picture] * 65}}, "a prompt may have 64"),
        ({"prompt": text, "multi_modal_data": {"audio": [picture]}}, "'audio' is not supported"),
        ({"prompt": text, "multi_modal_data": {"image": b"nothing"}}, "image 1: "),
        ({"prompt": text, "multi_modal_data": {"image": 3}}, "a int is not a picture"),
        ({"prompt": text, "multi_modal_data": {"image": "/nowhere/a.png"}}, "the file cannot be read"),
        (
            {"prompt": text, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["nobody's"]}},
            "image 1: nothing is given, and nothing with this name is kept",
        ),
        (
            {"prompt": text, "multi_modal_data": {"image": picture}, "multi_modal_uuids": {"image": ["a", "b"]}},
            "a name or None for each of the 1",
        ),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            llm.generate([prompt], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="beam search"):
        from llmjax import BeamSearchParams

        llm.beam_search([prompt_of(name, "one")], BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_name_brings_a_picture_again(engine: Seeing) -> None:
    name, llm, _ = engine
    prompt = {**prompt_of(name, "two"), "multi_modal_uuids": {"image": ["a", None]}}
    (first,) = llm.generate([prompt], scored(max_tokens=1), use_tqdm=False)
    data = {"image": [None, prompt["multi_modal_data"]["image"][1]]}
    (again,) = llm.generate([{**prompt, "multi_modal_data": data}], scored(max_tokens=1), use_tqdm=False)
    check(name, "two", first, prompt=False)
    check(name, "two", again, prompt=False)


def test_chat_with_pictures(engine: Seeing, tmp_path: Any) -> None:
    name, llm, _ = engine
    picture = Image.fromarray(golden(name)["image0"])
    picture.save(tmp_path / "a.png")
    parts = [
        {"type": "image", "image": picture},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
        {"type": "image_pil", "image_pil": picture},
    ]
    messages = [[{"role": "user", "content": [{"type": "text", "text": "Is it?"}, part]}] for part in parts]
    outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)  # type: ignore[arg-type]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({tuple(output.prompt_token_ids or ()) for output in outputs}) == 1


async def streamed(llm: AsyncLLM, number: int, prompt: dict[str, Any]) -> list[int] | None:
    """The tokens of a request; every third one is aborted after its first token, or in its prompt."""
    params = SamplingParams(temperature=0, max_tokens=12, output_kind=RequestOutputKind.CUMULATIVE)
    stream = llm.generate(prompt, params, f"r{number}")
    if number % 3 == 0:
        task = asyncio.ensure_future(anext(stream))
        if number % 2:
            await task
        else:
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        return None
    async for output in stream:
        tokens = list(output.outputs[0].token_ids)
    return tokens


def test_streams_that_come_and_go_leave_nothing(compile_cache_dir: str) -> None:
    """Sixteen at a time, half of them with pictures, a third of them aborted."""
    name = "qwen2-vl"
    prompts = [prompt_of(name, case) for case in CASES]
    config = EngineConfig(
        model=str(SEEING / name),
        dtype="float32",
        page_size=PAGE,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=40 * 1024,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        disable_log_stats=True,
    )

    async def run() -> None:
        llm = AsyncLLM.from_config(config)
        try:
            await asyncio.wrap_future(
                llm.client.control(Control.FREEZE)
            )  # until all are there, so that some are preempted
            streams = asyncio.gather(*(streamed(llm, i, prompts[i % len(prompts)]) for i in range(32)))
            await until_async(lambda: llm.num_requests >= 26)  # the other six are canceled before anything is computed
            await asyncio.wrap_future(llm.client.control(Control.GO_ON))
            found = await streams
            for case in range(len(CASES)):
                same = [tokens for i, tokens in enumerate(found) if i % len(CASES) == case and tokens is not None]
                assert len(same) > 4 and all(tokens == same[0] for tokens in same)
            await until_async(lambda: not llm.num_requests)
            client = llm.client
            assert isinstance(client, ThreadEngine)
            engine = client._loop._engine
            await until_async(lambda: engine.idle and not engine.num_requests)
            engine.kv.check()
            engine.scheduler.media.check()
            assert (engine.kv_stats().used, engine.scheduler.media.used) == (0, 0)
            assert engine.totals.preemptions > 0
        finally:
            await llm.shutdown(drain_timeout=0)

    asyncio.run(run())
