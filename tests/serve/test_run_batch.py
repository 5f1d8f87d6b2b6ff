"""llmjax run-batch: a file of requests in, a file of results out, in vLLM's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from llmjax.cli import main

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello the world"}]


def line(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"max_tokens": 5, "temperature": 0, **body}}


def run(model: Path | str, source: Path, target: Path, cache: str) -> int:
    flags = ["--model", str(model), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2"]
    flags += ["--max-num-batched-tokens", "16", "--page-size", "16", "--kv-cache-memory-bytes", "8MiB"]
    flags += ["--served-model-name", "tiny", "--compilation-cache-dir", cache, "--disable-log-stats"]
    return main(["run-batch", "-i", str(source), "-o", str(target), *flags])


def test_every_request_has_its_result_in_its_place(
    tiny_model: Path, compile_cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        line("one", messages=MESSAGES),
        line("wrong", messages=MESSAGES, temprature=1),
        line("other model", model="gpt", messages=MESSAGES),
        line("text", TEXT, prompt="the"),
        *(line(f"many {i}", TEXT, prompt=[40 + i, 41], max_tokens=1 + i % 7, ignore_eos=True) for i in range(40)),
        line("answer", "/v1/responses", input="the", max_output_tokens=3),
    ]
    del requests[-1]["body"]["max_tokens"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, requests)) + "\n")
    assert run(tiny_model, source, target, compile_cache_dir) == 1
    results = [json.loads(text) for text in target.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [request["custom_id"] for request in requests]
    assert len({result["id"] for result in results}) == len(results)
    by_id = {result["custom_id"]: result for result in results}
    assert by_id["wrong"]["response"]["status_code"] == 400 and by_id["wrong"]["response"]["body"] is None
    assert "temperature" in by_id["wrong"]["error"]["error"]["message"]
    assert by_id["other model"]["response"]["status_code"] == 404
    good = [result for result in results if result["error"] is None]
    assert len(good) == len(results) - 2 and all(result["response"]["status_code"] == 200 for result in good)
    assert all(result["response"]["request_id"] for result in results)
    ChatCompletion.model_validate(by_id["one"]["response"]["body"], strict=True)
    assert by_id["answer"]["response"]["body"]["object"] == "response"
    for i in range(40):
        assert by_id[f"many {i}"]["response"]["body"]["usage"]["completion_tokens"] == 1 + i % 7
    assert not list(tmp_path.glob("*.partial"))
    assert "43 requests answered, 2 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ("{", "line 1: it is not valid JSON"),
        ("[]", "line 1: it is not a JSON object"),
        (
            json.dumps(line("a", messages=MESSAGES)) + "\n" + json.dumps(line("a", messages=MESSAGES)),
            "line 2: the custom_id 'a'",
        ),
        (json.dumps(line("", messages=MESSAGES)), "line 1: `custom_id`"),
        (json.dumps(line("a", "/v1/models")), "line 1: `url`"),
        (json.dumps({**line("a"), "url": ["/v1/completions"]}), "line 1: `url`"),
        (json.dumps({**line("a"), "method": "GET"}), "line 1: `method`"),
        (json.dumps({**line("a"), "body": 1}), "line 1: `body`"),
        (json.dumps(line("a", stream=True)), "line 1: answers in a batch come whole"),
        ('{"custom_id": ' + "[" * 200 + "]" * 200 + "}", "line 1: it holds too many values, or is nested too deeply"),
    ],
)
def test_lines_are_checked_before_the_model_is_loaded(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    assert run("/no/such/model", source, target, "") == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_files_that_cannot_be_used(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny_model, tmp_path / "none.jsonl", tmp_path / "out", "") == 1
    assert "none.jsonl: No such file" in capsys.readouterr().err
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a", messages=MESSAGES)))
    assert run(tiny_model, source, tmp_path / "folder" / "out", "") == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["run-batch", "-i", str(source)]) == 1
    assert "--output-file" in capsys.readouterr().err
