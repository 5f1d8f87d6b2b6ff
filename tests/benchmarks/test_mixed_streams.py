"""Streams that ask for everything of a tiny server, from flags to the table; and what counts as wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixed_streams import KINDS, Answer, Kind, MixedOptions, main
from llmjax.errors import ConfigError
from tests.serve.conftest import write_llama, write_tokenizer


def chunk(index: int = 0, text: str = "", reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text, **more}, "finish_reason": reason}]}


def read(*events: dict[str, Any]) -> Answer:
    answer = Answer()
    for i, event in enumerate(events):
        answer.take(event, now=float(i))
    return answer


def test_an_answer_is_read_by_its_continuations() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    answer = read(chunk(0, "a"), chunk(1, "x"), chunk(0, "b"), chunk(0, reason="stop"), chunk(1, "y", "length"), usage)
    assert answer.whole() == ["ab"] and answer.reasons == {0: "stop", 1: "length"} and answer.tokens == 5
    assert answer.gaps == [2.0, 3.0]


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": i} for i, event in enumerate(events)]


def ended(status: str, text: str, arguments: str | None = None, reason: str | None = None) -> dict[str, Any]:
    output: list[dict[str, Any]] = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    output += [] if arguments is None else [{"type": "function_call", "arguments": arguments}]
    response = {"status": status, "output": output, "usage": {"output_tokens": 3}, "incomplete_details": None}
    return {"type": f"response.{status}", "response": response | {"incomplete_details": {"reason": reason}}}


TEXT = {"type": "response.output_text.delta", "delta": "a", "logprobs": [{}]}
ARGUMENTS = {"type": "response.function_call_arguments.delta", "delta": "{}"}


@pytest.mark.parametrize(
    ("events", "reason", "disorder"),
    [
        (numbered({"type": "response.created"}, TEXT, TEXT, ended("completed", "aa")), "stop", None),
        (numbered(TEXT, ended("incomplete", "a", reason="max_output_tokens")), "length", None),
        (numbered(TEXT, ARGUMENTS, ended("completed", "a", "{}")), "tool_calls", None),
        (numbered(TEXT, ended("failed", "a")), "failed: None", None),
        (numbered(TEXT, ended("completed", "b")), "stop", "something else"),
        (numbered(TEXT, TEXT, ended("completed", "aa"))[::2], "stop", "has the number 2"),
    ],
)
def test_responses_are_read(events: list[dict[str, Any]], reason: str, disorder: str | None) -> None:
    answer = read(*events)
    assert answer.reasons == {0: reason} and answer.tokens == 3
    assert (answer.disorder is None) if disorder is None else (disorder in (answer.disorder or ""))
    if reason == "stop" and disorder is None:
        assert answer.whole() == ["aa"] and answer.logprobs == 2 and answer.gaps == [1.0]


def block(kind: str, index: int, **delta: str) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index, "delta": delta}


END = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
STOP = {"type": "message_stop"}


def test_messages_are_read() -> None:
    text, call = block("delta", 0, text="a"), block("delta", 1, partial_json="{}")
    first, second = [block("start", 0), text, block("stop", 0)], [block("start", 1), call, block("stop", 1)]
    answer = read(*first, *second, END, STOP)
    assert answer.reasons == {0: "tool_calls"} and answer.tokens == 2 and answer.disorder is None
    assert answer.texts[0] == ["a", ""] and answer.arguments[0] == ["", "{}"]
    for wrong in ([*first[:2], STOP], [*first[:2], *second], [text, END], [*first[:2], call]):
        assert read(*wrong).disorder is not None


CALL = [{"index": 0, "function": {"arguments": '{"name": 1'}}]


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("JSON", read(chunk(0, '{"name": "A", "age": 100}', "stop")), "not the form"),
        ("JSON", read(chunk(0, '{"name": "A", "age": 9}', "stop")), None),
        ("JSON", read(chunk(0, '{"name": "A', "length")), None),
        ("expression", read(chunk(0, "2020-01-01", "stop")), "not the form"),
        ("stop strings", read(chunk(0, "It is the end, or", "stop")), "goes on after"),
        ("tools", read(chunk(0, tool_calls=CALL), chunk(0, reason="tool_calls")), "not the arguments"),
        ("forced tools", read(chunk(0, "No.", "stop")), "no call"),
        ("logprobs", read(chunk(0, "a", "stop"), {"usage": {"completion_tokens": 9}}), "0 of 9"),
    ],
)
def test_what_is_wrong(kind: str, answer: Answer, message: str | None) -> None:
    found = KINDS[kind].wrong(answer)
    assert (found is None) if message is None else (found is not None and message in found)


def test_kinds_say_nothing_twice() -> None:
    said = {"stream", "max_tokens", "max_output_tokens", "seed"}
    assert not any(said & kind.fields.keys() for kind in KINDS.values())
    assert Kind().wrong(Answer()) is None


def test_wrong_options_are_refused() -> None:
    for options in ({"streams": 0}, {"seconds": 0.0}, {"speculation": ("maybe",)}):
        with pytest.raises(ConfigError, match=f"--{next(iter(options))}"):
            MixedOptions(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_everything_at_once(tmp_path: Path, compile_cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, found = tmp_path / "model", tmp_path / "found.json"
    model.mkdir()
    write_llama(model, vocab=write_tokenizer(model))
    flags = "--dtype float32 --max-num-batched-tokens 128 --kv-cache-memory-bytes 8MiB --page-size 16"
    files = ["--output-json", str(found), "--compilation-cache-dir", compile_cache_dir]
    files += ["--hf-overrides", '{"max_position_embeddings": 2048}']  # tools take a thousand of its tokens
    asked = f"--streams {len(KINDS)} --seconds 3 --warm-up 1 --tokens 24"  # a client for each, however slow they are
    status = main(["--model", str(model), *flags.split(), *asked.split(), *files])
    table, runs = capsys.readouterr().out, json.loads(found.read_text())["runs"]
    assert status == 0, table
    assert [run["speculation"] for run in runs] == ["off", "on"] and "pages held" in table
    for run in runs:
        assert run["errors"] == [] and run["pages_held"] == 0 and run["tokens"] > 0
        assert run["requests"].keys() == KINDS.keys() and 0 <= run["gap_median"] <= run["gap_p99"]
        assert min(run["memory"]) > 2**20
