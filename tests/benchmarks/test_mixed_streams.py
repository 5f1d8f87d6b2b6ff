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


CALL = [{"index": 0, "function": {"arguments": '{"name": 1'}}]


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("JSON", read(chunk(0, '{"name": "A", "age": 100}', "stop")), "not the form"),
        ("JSON", read(chunk(0, '{"name": "A", "age": 9}', "stop")), None),
        ("JSON", read(chunk(0, '{"name": "A', "length")), None),
        ("expression", read(chunk(0, "2020-01-01", "stop")), "not the form"),
        ("stop strings", read(chunk(0, "It is the end, or", "stop")), "goes on behind"),
        ("tools", read(chunk(0, tool_calls=CALL), chunk(0, reason="tool_calls")), "not the arguments"),
        ("forced tools", read(chunk(0, "No.", "stop")), "no call"),
        ("logprobs", read(chunk(0, "a", "stop"), {"usage": {"completion_tokens": 9}}), "0 of 9"),
    ],
)
def test_what_is_wrong(kind: str, answer: Answer, message: str | None) -> None:
    found = KINDS[kind].wrong(answer)
    assert (found is None) if message is None else (found is not None and message in found)


def test_kinds_say_nothing_twice() -> None:
    assert not any({"stream", "max_tokens", "seed"} & kind.fields.keys() for kind in KINDS.values())
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
