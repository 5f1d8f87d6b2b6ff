"""Offline generation: prompts in every form, batches, errors that leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmjax
from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.clients.process import ProcessEngine
from llmjax.engine.clients.waited import WaitedEngine
from llmjax.engine.front.generation_config import check_generation_config, generation_config, sampling_defaults
from llmjax.errors import CheckpointError, ConfigError, EngineDead, InvalidRequest, PromptTooLong
from tests.checkpoints import GOLDEN

pytestmark = [pytest.mark.jax_api, pytest.mark.smoke]

LLAMA = GOLDEN / "llama"
CHARACTERS = Path(__file__).parent / "engine" / "golden" / "characters"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(compile_cache_dir: str) -> dict[str, Any]:
    return {
        "tokenizer": str(CHARACTERS),
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "kv_cache_memory_bytes": 28 * 1536,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
    }


@pytest.fixture(scope="module")
def llm(settings: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(str(LLAMA), **settings)
    yield llm
    assert llm.kv_stats().used == 0
    llm.close()


def said(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False, **options)]


def test_every_form_of_prompt_is_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("Hello")
    (expected,) = said(llm, "Hello")
    assert said(llm, ids) == said(llm, tuple(ids)) == said(llm, np.array(ids)) == [expected]
    forms: list[Any] = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    assert said(llm, forms) == [expected] * 4
    (output,) = llm.generate({"prompt_token_ids": ids, "prompt": "shown"}, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("shown", ids)
    (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hello", ids, True)
    assert output.outputs[0].text == llm.tokenizer.decode(expected)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[10 + i, 40 - i, 3] for i in range(10)]
    params = [GREEDY.clone(max_tokens=1 + (7 * i) % 10) for i in range(10)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert said(llm, prompts, params) == [said(llm, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]


def test_metrics(llm: LLM) -> None:
    (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    times = output.metrics
    assert times is not None
    moments = [
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
        times.last_token_time,
        times.finished_time,
    ]
    assert None not in moments
    assert moments == sorted(moments, key=lambda moment: moment or 0.0)
    assert times.num_preemptions == 0


def test_n_outputs(llm: LLM) -> None:
    (output,) = llm.generate("Hi", GREEDY.clone(n=3, temperature=1, seed=1), use_tqdm=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_chat_renders_the_template_once(llm: LLM) -> None:
    assert llm.tokenizer is not None
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "user: Hi assistant:"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    both = llm.chat([messages, [{"role": "user", "content": "Bye"}]], GREEDY, use_tqdm=False)
    assert [o.prompt for o in both] == ["user: Hi assistant:", "user: Bye assistant:"]
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 10**6
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    for ask in (lambda: llm.generate(text, GREEDY), lambda: llm.chat([{"role": "user", "content": text}], GREEDY)):
        with pytest.raises(PromptTooLong, match="more than the context of 64 holds"):
            ask()


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        ([], GREEDY, "prompts"),
        (None, GREEDY, "prompts"),
        (["ok", ""], [GREEDY], "sampling_params"),
        (["ok"], {"max_tokens": 8}, "sampling_params"),
        (["ok"], [None], "sampling_params"),
        (["ok", [96]], GREEDY, "prompt"),
        (["ok", [3] * 64], GREEDY, "prompt"),
        (["ok", "ok"], [GREEDY, GREEDY.clone(logprobs=21)], "logprobs"),
    ],
)
def test_one_bad_prompt_and_nothing_runs(llm: LLM, prompts: Any, params: Any, field: str) -> None:
    steps = llm.stats.steps
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.field == field
    assert llm.stats.steps == steps
    assert llm.engine.idle
    assert llm._frontend.num_requests == 0
    assert len(said(llm, "ok")[0]) == 8


def test_priorities_need_one_each_and_the_policy(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts and 1 priorities"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(InvalidRequest, match="--scheduling-policy priority"):
        llm.generate(["a"], GREEDY, use_tqdm=False, priority=[1])


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e", "f"], GREEDY.clone(max_tokens=40), use_tqdm=False)
    monkeypatch.undo()
    assert llm.kv_stats().used == 0
    assert llm._frontend.num_requests == 0
    first = said(llm, "a")
    assert first == said(llm, "a")
    assert len(first[0]) == 8


def test_an_interrupted_check_of_prompts_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = llm._frontend.requests.encode, []

    def interrupted(text: str) -> list[int]:
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(text)

    monkeypatch.setattr(llm._frontend.requests, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert (llm._frontend.num_requests, llm._frontend.num_unfinished) == (0, 0)


def test_calls_of_several_threads_come_one_after_another(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(6)]
    expected, found = [said(llm, prompt) for prompt in prompts], [[] for _ in prompts]
    together = threading.Barrier(len(prompts))

    def call(number: int) -> None:
        together.wait()
        for _ in range(3):
            found[number] += said(llm, prompts[number])
            llm.reset_prefix_cache()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tokens * 3 for tokens in expected]


@pytest.mark.slow
def test_generate_from_several_threads_keeps_one_model(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llmjax.llm._kept.close()
    start, began = LLM._start, []

    def watched(self: LLM, config: Any) -> None:
        began.append(config)
        start(self, config)

    monkeypatch.setattr(LLM, "_start", watched)
    found: list[list[int]] = []
    together = threading.Barrier(2)

    def call() -> None:
        together.wait()
        (output,) = llmjax.generate("Hello", model=str(LLAMA), **settings, temperature=0, max_tokens=4)
        found.append(output.outputs[0].token_ids)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llmjax.llm._kept.close()
    assert len(began) == 1
    assert len(found) == 2 and found[0] == found[1]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt, as in a terminal: processes in the background begin without that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else pages that are still to be computed would be found by the next request, full of what was there before."""
    prompt = "A prompt of more pages than one"
    expected = said(llm, prompt)
    said(llm, "x" * 40)
    llm.reset_prefix_cache()
    dispatch, calls = llm.engine.runner.dispatch, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return dispatch(*args, **options)

    monkeypatch.setattr(llm.engine.runner, "dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert len(calls) == 1
    assert llm.kv_stats().used == 0
    assert said(llm, prompt) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def hangs() -> Any:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)

    monkeypatch.setattr(llm.engine, "step", hangs)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_tokenizer(settings: dict[str, Any], llm: LLM) -> None:
    ids_only = LLM(str(LLAMA), **{**settings, "tokenizer": None, "skip_tokenizer_init": True})
    try:
        assert ids_only.get_tokenizer() is None
        (output,) = ids_only.generate([5, 6, 7], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == said(llm, [5, 6, 7])[0]
        assert (output.prompt, output.outputs[0].text) == (None, "")
        with pytest.raises(InvalidRequest, match="there is no tokenizer: give token ids"):
            ids_only.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="chat needs a tokenizer"):
            ids_only.chat([{"role": "user", "content": "Hi"}], GREEDY)
    finally:
        ids_only.close()
    ids_only.close()  # a second time does nothing


def test_generate_keeps_the_model_for_the_next_call(settings: dict[str, Any], llm: LLM) -> None:
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    llmjax.llm._kept.close()
    (first,) = llmjax.generate("Hello", model=str(LLAMA), **settings, **options)
    assert first.outputs[0].token_ids == said(llm, "Hello")[0]
    kept = llmjax.llm._kept._llm
    (again,) = llmjax.generate(["Hello"], model=str(LLAMA), **settings, temperature=1, seed=3, max_tokens=2)
    assert llmjax.llm._kept._llm is kept is not None
    assert len(again.outputs[0].token_ids) == 2
    with pytest.raises(InvalidRequest, match="temprature") as caught:
        llmjax.generate("Hello", model=str(LLAMA), temprature=1)
    assert caught.value.field == "temprature"
    llmjax.llm._kept.close()


def test_a_step_that_fails_is_the_last_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has taken with it, nobody knows: requests are refused, and ``generate`` loads the model again."""
    options = {"model": str(LLAMA), "temperature": 0, "max_tokens": 8, "ignore_eos": True, **settings}
    llmjax.llm._kept.close()
    (first,) = llmjax.generate("Hello", **options)
    failed = llmjax.llm._kept._llm
    assert failed is not None

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(failed.engine.runner, "dispatch", fails)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        failed.generate(["a", "b"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineDead, match=r"^the engine stopped: out of memory$"):
        failed.generate("Hello", GREEDY, use_tqdm=False)
    assert failed._frontend.num_requests == 0
    (again,) = llmjax.generate("Hello", **options)
    assert llmjax.llm._kept._llm is not failed
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    llmjax.llm._kept.close()


@pytest.mark.slow
def test_generate_lets_go_of_a_model_before_it_loads_the_next(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": str(LLAMA), "max_tokens": 1, **settings}
    llmjax.generate("Hello", **options)
    assert llmjax.llm._kept._llm is not None
    engine = weakref.ref(llmjax.llm._kept._llm.engine)
    weights = [weakref.ref(weight) for weight in llmjax.llm._kept._llm.engine.model.params.values()]
    start, left = LLM._start, []

    def watched(self: LLM, config: Any) -> None:
        left.extend(ref() for ref in (engine, *weights))
        start(self, config)

    monkeypatch.setattr(LLM, "_start", watched)
    llmjax.generate("Hello", **{**options, "served_model_name": "another"})
    assert left == [None] * (1 + len(weights)) and len(weights) > 1
    llmjax.llm._kept.close()
    with pytest.raises(ConfigError):  # nothing is kept of a model that could not be loaded
        llmjax.generate("Hello", **{**options, "page_size": 0})
    assert llmjax.llm._kept._llm is None


def test_bad_settings_and_models(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="page_sise"):
        LLM(str(LLAMA), page_sise=4)
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        LLM(str(LLAMA), **{**settings, "kv_cache_memory_bytes": 1})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(str(tmp_path), **settings)
    with pytest.raises(ConfigError, match="device_ids"):
        LLM(str(LLAMA), **{**settings, "device_ids": "first"})
    with pytest.raises(ConfigError, match="device_ids"):
        LLM(str(LLAMA), **{**settings, "device_ids": "-1"})
    with pytest.raises(ConfigError, match="'tpu' is not available"):
        LLM(str(LLAMA), **{**settings, "device": "tpu"})


def test_prompts_share_cached_prefixes_only_with_those_of_the_same_salt(llm: LLM) -> None:
    ids = [3 + i for i in range(9)]  # two full pages

    def cached(**more: Any) -> int:
        (output,) = llm.generate({"prompt_token_ids": ids, **more}, GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    counts = [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="b")]
    assert counts == [0, 8, 0, 8]
    with pytest.raises(InvalidRequest, match="multi_modal_data: this model reads text only"):
        cached(multi_modal_data={"image": object()})


def test_what_a_models_makers_recommend() -> None:
    assert sampling_defaults({}) == {}
    numbers = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.1, "pad": 1}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    assert sampling_defaults(numbers) == sampling_defaults({**numbers, "do_sample": True}) == expected
    assert sampling_defaults({**numbers, "do_sample": False}) == {**expected, "temperature": 0.0}
    assert SamplingParams(**sampling_defaults({"do_sample": False})).greedy
    assert sampling_defaults({"max_new_tokens": 99}) == {"max_tokens": 99}


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults({"num_beams": 1, "suppress_tokens": None, "stop_strings": [], "min_length": 0}) == {}
    assert not caplog.records
    assert sampling_defaults({"num_beams": 4, "no_repeat_ngram_size": 3, "top_k": 2}) == {"top_k": 2}
    assert "generation_config: num_beams, no_repeat_ngram_size have no effect here" in caplog.text


def test_arguments_of_vllm_are_accepted_empty_and_refused_else(llm: LLM) -> None:
    empty: dict[str, Any] = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": {}}
    params = SamplingParams(temperature=0, max_tokens=3)
    prompt = llmjax.TokensPrompt(prompt_token_ids=[1, 2, 3], prompt="abc")
    (output,) = llm.generate(prompt, params, use_tqdm=lambda: None, priority=0, **empty)
    assert output.prompt == "abc" and len(output.outputs[0].token_ids) == 3
    (told,) = llm.generate(llmjax.TextPrompt(prompt="Hello", cache_salt="x"), params, use_tqdm=False)
    assert told.prompt == "Hello"
    for name, says in (("prompt_adapter_request", "only LoRA"), ("tokenization_kwargs", "token ids")):
        with pytest.raises(InvalidRequest, match=f"{name}: .*{says}"):
            llm.generate("Hello", params, use_tqdm=False, **{name: object()})
    with pytest.raises(TypeError, match="unexpected argument 'lora_reqest'; did you mean lora_request"):
        llm.generate("Hello", params, lora_reqest=None)


def test_minus_one_log_probabilities_are_all_that_the_setting_allows(llm: LLM) -> None:
    size = llm.info.vocab_size
    with pytest.raises(InvalidRequest, match=rf"logprobs must be between 0 and 20 \(--max-logprobs\), not {size}"):
        llm.generate("Hello", SamplingParams(logprobs=-1), use_tqdm=False)


def test_generation_config_is_the_models_none_or_a_folders(tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    changes = {"temperature": 0.1}
    for config, expected in (
        (EngineConfig(), own),
        (EngineConfig(generation_config="none"), {}),
        (EngineConfig(generation_config=str(tmp_path)), {"top_p": 0.5}),
        (EngineConfig(override_generation_config=changes), {**own, **changes}),
        (EngineConfig(generation_config="none", override_generation_config=changes), changes),
    ):
        check_generation_config(config)
        assert generation_config(config, own) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_config": "/nowhere"}, "generation_config must be auto, none or a folder"),
        (
            {"override_generation_config": {"heat": 1}},
            "override_generation_config has 'heat'; defaults of requests are",
        ),
        (
            {"override_generation_config": {"temperature": "hot"}},
            "override_generation_config: temperature must be a num",
        ),
        ({"override_generation_config": {"max_new_tokens": 0}}, "override_generation_config: max_tokens must be an"),
    ],
)
def test_wrong_defaults_end_the_start_before_a_model_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/no/model", **settings)


def test_a_folder_is_known_by_its_name_and_not_by_its_path(llm: LLM) -> None:
    assert llm.model_name == "llama"


def test_made_from_a_configuration(settings: dict[str, Any], llm: LLM) -> None:
    made = LLM.from_config(EngineConfig(model=str(LLAMA), **settings, served_model_name="tiny"))
    try:
        assert made.model_name == "tiny"
        assert made.max_model_len == 64
        assert said(made, "Hello") == said(llm, "Hello")
    finally:
        made.close()


def test_an_engine_in_a_process_of_its_own(llm: LLM, settings: dict[str, Any]) -> None:
    apart = LLM(str(LLAMA), **settings, engine_process="process")
    try:
        assert isinstance(apart.client, WaitedEngine)
        prompts = ["Hello", "Good day", "Hell"]
        params = [GREEDY, SamplingParams(n=2, seed=3, max_tokens=6), SamplingParams(temperature=0, stop=["e"])]
        expected = llm.generate(prompts, params, use_tqdm=False)
        found = apart.generate(prompts, params, use_tqdm=False)
        for one, other in zip(found, expected, strict=True):
            assert [(o.text, o.token_ids, o.finish_reason) for o in one.outputs] == [
                (o.text, o.token_ids, o.finish_reason) for o in other.outputs
            ]
        assert apart.client.idle and apart.stats.generation_tokens > 0
        with pytest.raises(ConfigError, match="what this LLM computes with is in other processes"):
            _ = apart.engine
        engine = apart.client._engine
        assert isinstance(engine, ProcessEngine)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            apart.generate(prompts, params, use_tqdm=False)
        assert apart.client.idle
    finally:
        apart.close()
