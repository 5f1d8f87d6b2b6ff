"""A server with defaults of its own for requests: names, template variables, sampling, unknown fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError

HELLO = [{"role": "user", "content": "the"}]
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
TEMPLATE = (
    "{{ enable_thinking }}/{{ style }}{{ reasoning_effort }}/{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


def vocab_size(config: EngineConfig) -> int:
    size: int = json.loads((Path(config.model) / "config.json").read_text())["vocab_size"]
    return size


@pytest.fixture(scope="module")
def own(engine_config: EngineConfig, start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    engine = engine_config.replace(
        served_model_name=("first", "second", "*"),
        max_logprobs=vocab_size(engine_config),
        chat_template=TEMPLATE,
        override_generation_config={"temperature": 0.0, "max_new_tokens": 3, "frequency_penalty": 0.5},
    )
    defaults = {"enable_thinking": True, "style": "plain"}
    server = ServerConfig(
        port=0,
        ignore_unknown_fields=True,
        default_chat_template_kwargs=defaults,
        reasoning_effort_map={"xhigh": "max", "medium": "low"},
    )
    running, stop = start_server(engine, server)
    with running.http() as http:
        yield http
    stop()


def prompt_of(http: httpx.Client, **fields: Any) -> str:
    tokens = http.post("/tokenize", json={"messages": HELLO, **fields}).json()["tokens"]
    text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


def test_any_name_is_served_and_the_first_is_told(own: httpx.Client) -> None:
    for name in ("first", "second", "gpt-4o", "", None):
        answer = own.post("/v1/chat/completions", json={**BODY, "model": name})
        assert answer.status_code == 200
        assert answer.json()["model"] == "first"
    models = own.get("/v1/models").json()["data"]
    assert [card["id"] for card in models] == ["first", "second"]
    assert own.get("/v1/models/second").json()["id"] == "second"
    assert own.get("/v1/models/other").json()["id"] == "first"


def test_an_empty_name_is_the_default(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json={**BODY, "model": ""}).status_code == 200
    assert http.post("/v1/chat/completions", json={**BODY, "model": "llama"}).status_code == 404


def test_template_variables_have_defaults_that_requests_replace(own: httpx.Client) -> None:
    assert prompt_of(own) == "True/plain/the"
    assert prompt_of(own, chat_template_kwargs={"enable_thinking": False}) == "False/plain/the"


def test_efforts_reach_the_template_as_the_server_says(own: httpx.Client) -> None:
    def shown(path: str, body: dict[str, Any]) -> str:
        answer = own.post(path, json={"max_tokens": 1, "return_prompt_text": True, **body})
        return str(answer.json()["prompt_text"])

    for asked, told in (("xhigh", "max"), ("medium", "low"), ("high", "high")):
        body = {"messages": HELLO, "reasoning_effort": asked}
        assert shown("/v1/chat/completions", body) == f"True/plain{told}/the"
    counted = [
        own.post("/v1/messages/count_tokens", json={"messages": HELLO, "output_config": {"effort": effort}}).json()
        for effort in ("medium", "high")
    ]
    assert counted[1]["input_tokens"] - counted[0]["input_tokens"] == len("high") - len("low")


@pytest.mark.parametrize("wrong", [{"huge": "max"}, {"low": 1}])
def test_maps_of_efforts_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reasoning_effort_map names one of none, minimal"):
        ServerConfig(reasoning_effort_map=wrong)


def test_a_variable_that_the_template_does_not_read_is_said(own: httpx.Client) -> None:
    variables = {"enable_thinking": True, "thinking": True, "x" * 300: 1}
    answer = own.post("/v1/chat/completions", json={**BODY, "chat_template_kwargs": variables})
    assert answer.status_code == 200
    first, second = answer.headers["x-ignored-fields"].split(",")
    assert first == "chat_template_kwargs.thinking" and len(second) < 200
    told = own.post("/v1/chat/completions", json={**BODY, "chat_template_kwargs": {"style": "x"}}).headers
    assert "x-ignored-fields" not in told


def test_sampling_defaults_are_those_of_the_command_line(own: httpx.Client) -> None:
    body = {"messages": HELLO, "ignore_eos": True}
    plain = own.post("/v1/chat/completions", json=body).json()
    same = own.post("/v1/chat/completions", json={**body, "temperature": 0, "frequency_penalty": 0.5, "max_tokens": 3})
    assert plain["usage"]["completion_tokens"] == 3
    assert plain["choices"][0]["message"]["content"] == same.json()["choices"][0]["message"]["content"]
    assert own.post("/v1/chat/completions", json={**body, "max_tokens": 9}).json()["usage"]["completion_tokens"] == 9


def test_unknown_fields_are_ignored_and_named(own: httpx.Client) -> None:
    strange = {"strange": 1, "grüße": {}, "nothing": None, "stream_options": None}
    answer = own.post("/v1/chat/completions", json={**BODY, **strange})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "strange,gr%C3%BC%C3%9Fe"
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True, "odd": 1}}
    with own.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.headers["x-ignored-fields"] == "odd"
        assert "data: [DONE]" in list(stream.iter_lines())
    many = own.post("/v1/chat/completions", json={**BODY, **{f"unknown{i}": i for i in range(5000)}})
    assert many.status_code == 200
    assert many.headers["x-ignored-fields"].count("unknown") == 16


def test_an_unknown_field_without_a_value_is_no_error(http: httpx.Client) -> None:
    nulls: dict[str, Any] = {"strange": None, "context_cache": None}
    assert http.post("/v1/chat/completions", json={**BODY, **nulls}).status_code == 200
    refused = http.post("/v1/chat/completions", json={**BODY, **nulls, "stranger": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stranger"
    options = {"stream": True, "stream_options": {"odd": None, "odder": 1}}
    assert (
        http.post("/v1/chat/completions", json={**BODY, **options}).json()["error"]["param"] == "stream_options.odder"
    )
    bodies = [json.dumps({**BODY, **{f"unknown{i}": None for i in range(n)}}) for n in (1, 3000)]
    headers = {"content-type": "application/json"}
    assert {http.post("/v1/chat/completions", content=body, headers=headers).status_code for body in bodies} == {200}


def test_the_switch_of_thinking_reaches_the_template(own: httpx.Client) -> None:
    for field in ("thinking", "enable_thinking"):
        body = {**BODY, field: False, "return_token_ids": True}
        answer = own.post("/v1/chat/completions", json=body)
        ids = answer.json()["prompt_token_ids"]
        assert own.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "False/plain/the"
        assert "x-ignored-fields" not in answer.headers


def test_log_probabilities_of_all_tokens(own: httpx.Client, engine_config: EngineConfig) -> None:
    size = vocab_size(engine_config)
    body = {**BODY, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    answer = own.post("/v1/chat/completions", json=body).json()
    first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert len(first) == len(answer["prompt_logprobs"][1]) == size
    assert sum(math.exp(entry["logprob"]) for entry in first) == pytest.approx(1, abs=1e-4)
    text = own.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1, "logprobs": -1}).json()
    assert sum(map(math.exp, text["choices"][0]["logprobs"]["top_logprobs"][0].values())) > 0.9


def test_defaults_may_not_replace_messages() -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs may not hold messages"):
        ServerConfig(default_chat_template_kwargs={"messages": []})
