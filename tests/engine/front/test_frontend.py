"""The frontend without an engine: checks of requests, tokens to text, and the three kinds of outputs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.config import EngineConfig
from llmjax.engine.core.request import EngineOutput, SequenceTimes
from llmjax.engine.front.frontend import Frontend, Processed
from llmjax.engine.info import EngineInfo
from llmjax.errors import InvalidRequest
from llmjax.outputs import CompletionOutput, Logprob, RequestOutput
from llmjax.parsing.choice import Parsers
from llmjax.parsing.content import ContentReading
from llmjax.parsing.parser import OutputParser
from llmjax.sampling.params import RequestOutputKind, SamplingParams
from llmjax.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.smoke

TOKENIZER = load_tokenizer(Path(__file__).parents[1] / "golden" / "characters")
EOS = 2
INFO = EngineInfo(
    model_name="m",
    model_path="m",
    architecture="LlamaForCausalLM",
    num_layers=2,
    vocab_size=96,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    eos_token_ids=frozenset({EOS}),
    default_sampling_params={},
    device="cpu",
    platform="cpu",
    dtype="float32",
    kernels=None,
    weight_bytes=0,
    offloaded_bytes=0,
    load_seconds=0.0,
    kv_bytes=0,
    kv_tokens=0,
    kv_dtype="float32",
    kv_calibrated=False,
    page_size=4,
    longest_contexts={1: 64},
    sampler_bytes=0,
)


def make(*, tokenizer: Tokenizer | None = TOKENIZER, **settings: Any) -> Frontend:
    return Frontend(
        EngineConfig(max_logprobs=5, **settings),
        tokenizer=tokenizer,
        info=INFO,
        new_id=itertools.count().__next__,
        compiles=True,
    )


def said(tokens: list[int], *, index: int = 0, reason: str | None = None, **fields: Any) -> EngineOutput:
    times = SequenceTimes(arrival=0.0, first_token=1.0, last_token=2.0)
    fields.setdefault("request_id", 0)
    return EngineOutput(index=index, times=times, new_token_ids=tokens, finish_reason=reason, **fields)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def processed(frontend: Frontend, *outputs: EngineOutput) -> Processed:
    """The request outputs that the frontend makes of engine outputs."""
    return frontend.process(outputs)


def process(frontend: Frontend, *outputs: EngineOutput) -> list[RequestOutput]:
    return processed(frontend, *outputs).outputs


@given(
    tokens=st.lists(st.lists(st.one_of(st.integers(4, 6), st.integers(0, 95)), min_size=1, max_size=12), min_size=1),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    stop=st.lists(st.text("012", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_deltas_joined_are_the_cumulative_and_the_final_output(
    tokens: list[list[int]], sizes: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    results: dict[RequestOutputKind, list[CompletionOutput]] = {}
    for kind in RequestOutputKind:
        frontend = make()
        params = SamplingParams(
            n=len(tokens),
            max_tokens=63,
            stop=stop,
            include_stop_str_in_output=include,
            min_tokens=min_tokens,
            logprobs=0,
            output_kind=kind,
        )
        frontend.open([1], params, "r")
        # All continuations token by token in turn, handed over in batches of several sizes.
        stream = [
            said(
                [own[i]],
                index=index,
                reason="length" if i == len(own) - 1 else None,
                new_logprobs=[{own[i]: Logprob(logprob=-0.5, rank=1)}],
            )
            for i in range(max(map(len, tokens)))
            for index, own in enumerate(tokens)
            if i < len(own)
        ]
        seen: list[RequestOutput] = []
        while stream:
            size = sizes[len(seen) % len(sizes)]
            seen += process(frontend, *stream[:size])
            stream = stream[size:]
        assert frontend.num_requests == 0
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        if kind is RequestOutputKind.DELTA:
            results[kind] = [join(seen, index) for index in range(len(tokens))]
        else:
            if kind is RequestOutputKind.FINAL_ONLY:
                assert len(seen) == 1
            results[kind] = sorted(seen[-1].outputs, key=lambda output: output.index)
    delta, cumulative, final = (results[RequestOutputKind[k]] for k in ("DELTA", "CUMULATIVE", "FINAL_ONLY"))
    assert delta == cumulative == final
    for own, output in zip(tokens, final, strict=True):
        assert own[: len(output.token_ids)] == output.token_ids
        assert output.cumulative_logprob == -0.5 * len(output.token_ids)
        assert output.text_offsets == TOKENIZER.detokenizer(prompt_ids=[1]).whole(output.token_ids)[1][:-1]
        text = TOKENIZER.decode(output.token_ids)
        if output.finish_reason == "length":
            assert (output.text, output.token_ids, output.stop_reason) == (text, own, None)
        else:
            assert output.finish_reason == "stop"
            assert isinstance(output.stop_reason, str)
            assert text == output.text + (output.stop_reason if not include else "")
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)


def join(outputs: list[RequestOutput], index: int) -> CompletionOutput:
    parts = [part for output in outputs for part in output.outputs if part.index == index]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=[entry for part in parts for entry in part.logprobs or ()],
        text_offsets=[offset for part in parts for offset in part.text_offsets or ()],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def test_a_stop_string_ends_one_continuation_and_tells_the_engine() -> None:
    frontend = make()
    frontend.open([1], SamplingParams(n=2, stop=["bc"], max_tokens=9), "r")
    assert processed(frontend, said(ids("a")), said(ids("a"), index=1), said(ids("b"))).aborts == []
    result = processed(frontend, said(ids("c")))
    assert result.aborts == [(0, 0)]
    assert not result.outputs[0].finished
    # The engine was a step ahead, and answers the abort: neither shows.
    assert process(frontend, said(ids("d"))) == []
    assert process(frontend, said([], reason="abort")) == []
    (last,) = process(frontend, said(ids("z"), index=1, reason="length"))
    assert last.finished
    assert [(o.text, o.finish_reason, o.stop_reason) for o in last.outputs] == [
        ("a", "stop", "bc"),
        ("az", "length", None),
    ]


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    frontend = make()
    frontend.open([1], SamplingParams(stop=["b"], max_tokens=2), "r")
    process(frontend, said(ids("a")))
    result = processed(frontend, said(ids("b"), reason="length"))
    assert result.aborts == []
    assert (result.outputs[0].outputs[0].finish_reason, result.outputs[0].outputs[0].text) == ("stop", "a")


def test_what_was_held_back_comes_with_the_end() -> None:
    frontend = make()
    frontend.open([1], SamplingParams(stop=["abc"], max_tokens=3, output_kind=RequestOutputKind.DELTA), "r")
    texts = [process(frontend, said(ids(c)))[0].outputs[0].text for c in "xab"]
    texts.append(process(frontend, said([], reason="abort"))[0].outputs[0].text)
    assert texts == ["x", "", "", "ab"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_end_with_the_one_that_ends_the_text(size: int) -> None:
    grammar = Parsers(tools="hermes", reasoning="think").grammar(with_tools=True, prompt="")
    assert grammar is not None
    call = '<tool_call>{"name": "f", "arguments": {"a": "Q:"}}'
    texts = [  # of an answer, up to its end; what follows; where it ends
        ("ab", "cd", ContentReading(parser=lambda: OutputParser(grammar))),
        (call, "</tool_call>", ContentReading(parser=lambda: OutputParser(grammar), one_call=True)),
        ("<think>Q:</think>A Q:", " B", ContentReading(parser=lambda: OutputParser(grammar))),
    ]
    for text, rest, reading in texts:
        frontend = make()
        frontend.open([1], SamplingParams(stop=["ab", "Q:"], logprobs=0, max_tokens=99), "r", reading=reading)
        tokens, seen = ids(text + rest), []
        for at in range(0, len(tokens), size):
            some = tokens[at : at + size]
            scored = [{token: Logprob(logprob=-0.5, rank=1)} for token in some]
            seen += process(frontend, said(some, new_logprobs=scored))
        (output,) = seen[-1].outputs
        own = ids(text)
        assert (output.token_ids, output.finish_reason) == (own, "stop")
        assert output.logprobs is not None and len(output.logprobs) == len(own)
        assert output.cumulative_logprob == -0.5 * len(own)
        assert text == output.text + (output.stop_reason or "")


def test_log_probabilities_come_with_the_text_that_a_stop_string_may_swallow() -> None:
    frontend = make()
    delta = RequestOutputKind.DELTA
    frontend.open([1], SamplingParams(stop=["abc"], logprobs=0, max_tokens=9, output_kind=delta), "r")
    told = []
    for c in "xaabc":
        (token,) = ids(c)
        scored = said([token], new_logprobs=[{token: Logprob(logprob=-0.5, rank=1)}])
        (output,) = process(frontend, scored)[0].outputs
        told.append((output.text, output.token_ids, [next(iter(entry)) for entry in output.logprobs or ()]))
    x, a, b, c = (ids(char)[0] for char in "xabc")
    swallowed = [a, b, c]
    assert told == [("x", [x], [x]), ("", [], []), ("a", [a], [a]), ("", [], []), ("", swallowed, swallowed)]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": object()}}, "multi_modal_data"),
        ({"prompt_token_ids": [1], "prompt_embeds": [0.5]}, "prompt_embeds"),
        ({"prompt": "a", "promt": "b"}, "prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ({"multi_modal_data": {"image": object()}}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_nothing_in_a_prompt_is_ignored(prompt: dict[str, Any], field: str) -> None:
    frontend = make()
    with pytest.raises(InvalidRequest) as caught:
        frontend.open(prompt, SamplingParams(), "r")
    assert caught.value.field == field
    assert field in str(caught.value) and frontend.num_requests == 0


def test_the_salt_of_a_prompt_is_its_requests() -> None:
    frontend = make()
    assert frontend.open({"prompt": "a", "cache_salt": "s"}, SamplingParams(), "1").cache_salt == "s"
    assert frontend.open({"prompt": "a", "cache_salt": "s"}, SamplingParams(), "2", cache_salt="s").cache_salt == "s"
    assert frontend.open({"prompt": "a", "cache_salt": None}, SamplingParams(), "3", cache_salt="t").cache_salt == "t"
    assert frontend.open({"prompt": "a", "multi_modal_data": {}}, SamplingParams(), "4").cache_salt is None
    with pytest.raises(InvalidRequest, match="given twice"):
        frontend.open({"prompt": "a", "cache_salt": "s"}, SamplingParams(), "5", cache_salt="t")


def test_stop_tokens_show_only_if_asked() -> None:
    for include, text in ((False, "a"), (True, "ab")):
        frontend = make()
        params = SamplingParams(stop_token_ids=ids("b"), include_stop_str_in_output=include, max_tokens=5)
        frontend.open([1], params, "r")
        process(frontend, said(ids("a")))
        (output,) = process(frontend, said(ids("b"), reason="stop", stop_reason=ids("b")[0]))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, ids("ab"))
        assert output.outputs[0].stop_reason == ids("b")[0]


def test_special_tokens_are_skipped_unless_wanted() -> None:
    for skip, text in ((True, "ab"), (False, "a<s>b")):
        frontend = make()
        frontend.open([1], SamplingParams(skip_special_tokens=skip, max_tokens=3), "r")
        (output,) = process(frontend, said([*ids("a"), 1, *ids("b")], reason="length"))
        assert output.outputs[0].text == text


def test_offsets_come_where_somebody_looks_at_them() -> None:
    grammar = Parsers(tools=None, reasoning="qwen3").grammar(with_tools=False, prompt="")
    assert grammar is not None
    reading = ContentReading(parser=lambda: OutputParser(grammar))
    for options, read, offsets in (({}, None, None), ({"logprobs": 0}, None, [0, 1]), ({}, reading, [0, 1])):
        frontend = make()
        frontend.open([1], SamplingParams(max_tokens=2, **options), "r", reading=read)
        scores = [{token: Logprob(logprob=-0.5)} for token in ids("ab")] if options else None
        (output,) = process(frontend, said(ids("ab"), reason="length", new_logprobs=scores))
        assert (output.outputs[0].text, output.outputs[0].text_offsets) == ("ab", offsets)


def test_without_detokenizing_there_is_no_text() -> None:
    frontend = make()
    frontend.open([1], SamplingParams(detokenize=False, max_tokens=3), "r")
    (output,) = process(frontend, said(ids("abc"), reason="length"))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", ids("abc"))


def test_prompt_logprobs_come_once_in_deltas_with_decoded_tokens() -> None:
    frontend = make()
    params = SamplingParams(prompt_logprobs=0, max_tokens=2, output_kind=RequestOutputKind.DELTA)
    frontend.open(ids("ab"), params, "r")
    entry = {ids("b")[0]: Logprob(logprob=-1.0, rank=3)}
    (first,) = process(frontend, said(ids("c"), prompt_logprobs=[None, entry]))
    assert first.prompt_logprobs is not None
    scores = frontend.outputs.decoded(first.prompt_logprobs)
    assert scores == [None, {ids("b")[0]: Logprob(logprob=-1.0, rank=3, decoded_token="b")}]
    (second,) = process(frontend, said(ids("d"), reason="length"))
    assert second.prompt_logprobs is None


def test_what_the_engine_gets() -> None:
    frontend = make(scheduling_policy="priority")
    params = SamplingParams(max_tokens=None, stop_token_ids=[9], bad_words=["ab"])
    request = frontend.open("Hi", params, "r", priority=3, cache_salt="s")
    assert request.prompt_token_ids == [1, *ids("Hi")]
    assert request.max_tokens == 64 - 3
    assert request.stop_token_ids == {EOS, 9}
    assert request.bad_words_token_ids == (tuple(ids("ab")), tuple(ids(" ab")))
    assert (request.priority, request.cache_salt) == (3, "s")
    assert frontend.open("Hi", SamplingParams(max_tokens=5, ignore_eos=True), "q").stop_token_ids == frozenset()


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        ([], {}, "prompt", "prompt has no tokens"),
        ({"prompt_token_ids": []}, {}, "prompt", "prompt has no tokens"),
        ([3, 96], {}, "prompt", "token id 96; the vocabulary has 96 tokens"),
        ([-1], {}, "prompt", "token id -1"),
        ([3] * 64, {}, "prompt", "the prompt has 64 tokens; the context of 64"),
        (5, {}, "prompt", "must be text or token ids"),
        ([3.5], {}, "prompt", "a list of integers"),
        ([True], {}, "prompt", "a list of integers"),
        ({"text": "a"}, {}, "prompt", "needs 'prompt' or 'prompt_token_ids'"),
        ([3], {"logprobs": 6}, "logprobs", "logprobs must be between 0 and 5"),
        ([3], {"prompt_logprobs": 6}, "prompt_logprobs", "prompt_logprobs must be between 0 and 5"),
        ([3], {"logit_bias": {96: 1}}, "logit_bias", "token id 96"),
        ([3], {"allowed_token_ids": [96]}, "allowed_token_ids", "token id 96"),
        ([3], {"stop_token_ids": [96]}, "stop_token_ids", "token id 96"),
    ],
)
def test_requests_that_are_refused(prompt: Any, params: dict[str, Any], field: str, message: str) -> None:
    frontend = make()
    with pytest.raises(InvalidRequest, match=message) as caught:
        frontend.open(prompt, SamplingParams(**params), "r")
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert frontend.num_requests == 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [("text", {}, "prompt"), ([3], {"stop": "a"}, "stop"), ([3], {"bad_words": ["a"]}, "bad_words")],
)
def test_what_needs_a_tokenizer(prompt: Any, params: dict[str, Any], field: str) -> None:
    frontend = make(tokenizer=None)
    with pytest.raises(InvalidRequest, match="tokenizer") as caught:
        frontend.open(prompt, SamplingParams(**params), "r")
    assert caught.value.field == field


def test_ids_in_use_and_priorities_without_the_policy_are_refused() -> None:
    frontend = make()
    frontend.open([3], SamplingParams(), "r")
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        frontend.open([3], SamplingParams(), "r")
    with pytest.raises(InvalidRequest, match="--scheduling-policy priority") as caught:
        frontend.open([3], SamplingParams(), "s", priority=1)
    assert caught.value.field == "priority"


def test_outputs_of_forgotten_requests_are_dropped() -> None:
    frontend = make()
    request = frontend.open([3], SamplingParams(n=3), "r")
    assert frontend.num_unfinished == 3
    stats = frontend.forget(request.request_id)
    assert stats is not None
    assert stats.finish_reason == "abort"
    assert process(frontend, said([4])) == []
    assert frontend.forget(request.request_id) is None
    assert frontend.num_unfinished == 0


def test_outputs_of_an_earlier_request_with_the_same_id_are_dropped() -> None:
    frontend = make()
    earlier = frontend.open([3], SamplingParams(), "r")
    frontend.forget(earlier.request_id)
    later = frontend.open([3], SamplingParams(), "r")
    assert frontend.forget(earlier.request_id) is None  # the name is another request's by now
    assert frontend.process([said([4], reason="abort")]).outputs == []
    assert frontend.id_of("r") == later.request_id
    (output,) = process(frontend, said([5], request_id=later.request_id))
    assert output.request_id == "r"
    assert output.outputs[0].token_ids == [5]
