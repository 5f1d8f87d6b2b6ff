"""Every bad request gets OpenAI's error body with the field at fault, and the server goes on."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import openai
import pytest

from llmjax.config import ServerConfig
from llmjax.serve.limits import BodyLimits

pytestmark = pytest.mark.smoke

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}


def check(response: httpx.Response, *, status: int, param: str | None, says: str = "") -> dict[str, Any]:
    """The error object, after checking its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["param"] == param, error
    assert says in error["message"], error
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 1000
    assert "Traceback" not in error["message"]
    assert error["type"] == ("server_error" if status >= 500 else error["type"])
    return error


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -1}, "temperature", "temperature"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"n": 0}, "n", "n must be"),
    ({"n": 10**9}, "n", "n must be"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens", "fit the context of 512"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "contradicts"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens", "above max_tokens"),
    ({"stop": ["x"] * 10**5}, "stop", "at most"),
    ({"stop": [1] * 10**5}, "stop.0", "string"),
    ({"stop": 7}, "stop", "string"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ({"priority": 1}, "priority", "scheduling-policy"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "s" * 1025}, "cache_salt", "at most 1024 characters"),
    ({"temprature": 1}, "temprature", "did you mean `temperature`?"),
    ({"stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "must be a name"),
    ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"modalities": ["text", "audio"]}, "modalities", "read and write text only"),
    ({"audio": {"voice": "x"}}, "audio", "read and write text only"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "does not read it"),
    ({"store": 0}, "store", "boolean"),
    ({"service_tier": "gold"}, "service_tier", "'auto'"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16 entries"),
    ({"metadata": {"x" * 65: "x"}}, "metadata", "keys of 64"),
    ({"metadata": {"x": "x" * 513}}, "metadata", "values of 512"),
    ({"user": "x" * 513}, "user", "at most 512 characters"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of is 2, below n = 3"),
    ({"best_of": 129}, "best_of", "less than or equal to 128"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    ({"stop": {"Single": 1}}, "stop", "string"),
    ({"stop": {"Other": "x"}}, "stop", "string"),
    ({"repeat_last_n": -2}, "repeat_last_n", "-1"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not trust"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not hold"),
    ({"continue_final_message": True}, "continue_final_message", "exclude"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "user"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "required"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "required"),
    ({"messages": [{"role": "system"}, {"role": "user", "content": "x"}]}, "messages.0.content", "role system"),
    ({"messages": [{"role": "developer", "content": None}]}, "messages.0.content", "role developer"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens", "max_completion_tokens is 1000000"),
    ({"max_completion_tokens": 2, "min_tokens": 5}, "min_tokens", "above max_completion_tokens 2"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"9" * 10: 1}}, "logit_bias", "logit_bias"),
    ({"seed": 2**64}, "seed", f"must be an integer in [{-(2**63)}, {2**63 - 1}]"),
    ({"seed": -(2**64)}, "seed", f"must be an integer in [{-(2**63)}, {2**63 - 1}]"),
    ({"seed": 2**63}, "seed", f"must be an integer in [{-(2**63)}, {2**63 - 1}]"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "above the context of 512"),
    ({"messages": [{"role": "function"}]}, "messages.0.content", "role function"),
    ({"function_call": {"name": "f"}}, "function_call", "needs `functions`"),
    ({"functions": [{"name": "f"}], "tools": [{"type": "function"}]}, "functions", "exclude"),
    ({"functions": [1]}, "functions.0", "dict"),
    ({"functions": [{}] * 513}, "functions", "at most 512"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type",
        "reads text only",
    ),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages.0.content.0.type", "['text']"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages", "context of 512"),
    ({"seed": 2**70}, "seed", "integer"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_bad_chat_field(http: httpx.Client, change: dict[str, Any], param: str | None, says: str) -> None:
    for stream in (False, True):
        body = {**HELLO, "stream": stream, **change}
        check(http.post(CHAT, json=body), status=400, param=param, says=says)


BAD_TEXT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"suffix": "x"}, "suffix", "no tokens for filling a gap"),
    ({"suffix": "x", "echo": True}, "echo", "cannot be combined with suffix"),
    ({"suffix": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "cannot be combined with suffix"),
    ({"suffix": "x", "prompt": [1, 2]}, "prompt", "must be a text"),
    ({"suffix": 1}, "suffix", "string"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of is 2, below n = 3"),
    ({"prompt": None}, "prompt", "prompt"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": "", "add_special_tokens": False}, "prompt", "no tokens"),
    ({"prompt": [1, "a"]}, "prompt", "prompt"),
    ({"prompt": [10**6]}, "prompt", "vocabulary"),
    ({"prompt": [-1]}, "prompt", "vocabulary"),
    ({"prompt": [True]}, "prompt", "prompt"),
    ({"prompt": [5] * 600}, "prompt", "context of 512"),
    ({"prompt": [5] * 510, "max_tokens": 3}, "max_tokens", "2 fit the context of 512"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "above the context of 512"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "prompts are text or token ids"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD_TEXT, ids=lambda value: str(value)[:40])
def test_bad_completion_field(http: httpx.Client, change: dict[str, Any], param: str | None, says: str) -> None:
    response = http.post(TEXT, json={**PROMPT, **change})
    field = response.json()["error"]["param"]
    assert field is not None and param is not None and field.split(".")[0] == param
    check(response, status=400, param=field, says=says)


def test_missing_field(http: httpx.Client) -> None:
    assert check(http.post(CHAT, json={}), status=400, param="messages")["code"] == "missing_required_parameter"
    check(http.post(TEXT, json={}), status=400, param="prompt", says="required")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": True}])
def test_stream_options_have_no_effect_without_a_stream(http: httpx.Client, options: dict[str, Any] | None) -> None:
    for path, body in ((CHAT, HELLO), (TEXT, PROMPT)):
        for stream in ({}, {"stream": False}, {"stream": None}):
            response = http.post(path, json={**body, "max_tokens": 1, "stream_options": options, **stream})
            assert response.status_code == 200
            named = "stream_options" if options and any(options.values()) else None
            assert response.headers.get("x-ignored-fields") == named


OVER = 3 * 10**5  # more values, or objects, than one body may hold

ABUSIVE: list[tuple[str, bytes, str | None, str]] = [
    (TEXT, b'{"prompt": [' + b",".join([b"[1]"] * OVER) + b"]}", "prompt", f"has {2 * OVER} entries"),
    (TEXT, b'{"prompt": "x", "allowed_token_ids": [' + b",".join([b"1"] * OVER) + b"]}", "allowed_token_ids", "values"),
    (TEXT, b'{"prompt": "x", "logit_bias": {' + b",".join([b'"1":1'] * 10**5) + b"}}", "logit_bias", "keys"),
    (CHAT, b'{"metadata": {' + b",".join([b'"a":"b"'] * 10**5) + b"}}", "metadata", "keys"),
    (CHAT, b'{"messages": [' + b",".join([b'{"role":"user"}'] * 10**5) + b"]}", "messages", "objects"),
    (CHAT, b'{"messages": [{"content": [' + b",".join([b'{"text":"a"}'] * 10**5) + b"]}]}", "messages", "objects"),
    (CHAT, b"{" + b",".join(b'"k%d":1' % i for i in range(10**5)) + b"}", None, "100001 values"),
    (CHAT, b'{"tools": ' + b'{"a":' * 200 + b"1" + b"}" * 201, None, "nested deeper than 128"),
    (TEXT, b'{"prompt": "x", "' + b"k" * 10**6 + b'": 1}', "k" * 100 + "…", "unknown field"),
    (TEXT, b'{"prompt": "x", ' + b",".join(b'"k%d":1' % i for i in range(30000)) + b"}", "k0", "unknown field"),
    (
        CHAT,
        b'{"messages": [{"role": "user", ' + b",".join(b'"k%d":1' % i for i in range(30000)) + b"}]}",
        "messages.0.content",
        "required",
    ),
    (TEXT, b'{"prompt": "x", "logit_bias": {' + b",".join([b'"1":"a"'] * 30000) + b"}}", "logit_bias", "object whose"),
    (CHAT, b'{"messages": [' + b",".join([b"{}"] * 9000) + b"]}", "messages", "at most 8192"),
    (
        TEXT,
        b'{"prompt": "x", "bad_words": [' + b",".join([b'"' + b"w" * 10**4 + b'"'] * 99) + b"]}",
        "bad_words",
        "4096",
    ),
    (TEXT, b'{"prompt": "x", "stop": "' + b"w" * 10**6 + b'"}', "stop", "4096"),
    (TEXT, b'{"prompt": "' + b"w" * 10**6 + b'"}', "prompt", "context of 512"),
    ("/tokenize", b'{"prompt": "' + b"w" * 10**6 + b'"}', "prompt", "context of 512"),
    ("/detokenize", b'{"tokens": [' + b",".join([b"1"] * OVER) + b"]}", "tokens", f"has {OVER} entries"),
    (TEXT, b'{"prompt": "x", "model": "' + b"m" * 10**6 + b'"}', "model", "does not exist"),
]


@pytest.mark.parametrize(("path", "content", "param", "says"), ABUSIVE, ids=lambda value: str(value)[:60])
def test_body_that_holds_too_much(http: httpx.Client, path: str, content: bytes, param: str | None, says: str) -> None:
    response = http.post(path, content=content, headers=JSON)
    check(response, status=404 if param == "model" else 400, param=param, says=says)
    assert len(response.content) < 1000


def test_default_body_limit_follows_the_context(running: Any) -> None:
    longest = running.engine.tokenizer.max_token_bytes
    assert longest == len("<|im_start|>")
    limits = BodyLimits.of(running.engine, ServerConfig())
    assert limits.bytes == 2**20 + 512 * longest * 6
    assert BodyLimits.of(running.engine, ServerConfig(max_request_bytes=5)).bytes == 5


def test_truncated_text_is_cut_before_it_is_encoded(running: Any, http: httpx.Client) -> None:
    text = "the inner and outer hen " * 10**4
    ids = running.engine.tokenizer.encode(text)
    for side, kept in (("left", ids[-40:]), ("right", ids[:40])):
        body = {"prompt": text, "truncate_prompt_tokens": 40, "truncation_side": side, "return_token_ids": True}
        (choice,) = http.post(TEXT, json={**body, "max_tokens": 1}).json()["choices"]
        assert choice["prompt_token_ids"] == kept


def test_million_stop_strings(http: httpx.Client) -> None:
    body = {**HELLO, "stop": ["x"] * 10**6}
    check(http.post(CHAT, json=body), status=400, param="stop", says="1000000 entries")
    check(http.post(CHAT, json={**body, "stop": ["longer than the limit"] * 10**6}), status=413, param=None)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nul", b'{"a":1,}', b"\xff\xfe", b'{"a":"\xff"}', b"[" * 10**5, b'"\\ud800"']
)
def test_invalid_json(http: httpx.Client, content: bytes) -> None:
    error = check(http.post(CHAT, content=content, headers=JSON), status=400, param=None)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("content", [b"[]", b"1", b"null", b'"x"'])
def test_body_that_is_no_object(http: httpx.Client, content: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        check(http.post(path, content=content, headers=JSON), status=400, param=None, says="object")


def test_wrong_content_type_method_path_and_model(http: httpx.Client) -> None:
    check(http.post(CHAT, content=b"{}"), status=415, param=None, says="application/json")
    check(http.post(CHAT, data={"a": "b"}), status=415, param=None, says="application/x-www-form-urlencoded")
    response = http.get(CHAT)
    check(response, status=405, param=None)
    assert "POST" in response.headers["allow"]
    check(http.get("/v1/nothing"), status=404, param=None)
    error = check(http.post(CHAT, json={**HELLO, "model": "gpt-9"}), status=404, param="model", says="gpt-9")
    assert error["code"] == "model_not_found"
    check(http.post(TEXT, json={**PROMPT, "model": "gpt-9"}), status=404, param="model")
    check(http.post("/tokenize", json={**PROMPT, "model": "gpt-9"}), status=404, param="model")


def test_large_body_is_refused_unread(http: httpx.Client) -> None:
    """100 MB announced, and 100 MB in chunks of unknown number: neither is taken in."""
    sent = 0

    def chunks() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 2**20
            yield b" " * 2**20

    error = check(http.post(CHAT, content=chunks(), headers=JSON), status=413, param=None, says="4194304")
    assert error["code"] == "body_too_large" and sent < 50 * 2**20
    headers = {**JSON, "content-length": str(100 * 2**20)}
    sent = 0
    check(http.post(CHAT, content=chunks(), headers=headers), status=413, param=None)
    assert sent < 50 * 2**20


def test_half_a_request_harms_nobody(http: httpx.Client) -> None:
    host, port = http.base_url.host, http.base_url.port
    assert port is not None
    for start in (
        b"POST /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9\r\n\r\n{",
    ):
        with socket.create_connection((host, port)) as sock:
            sock.sendall(start)
    assert http.get("/health").status_code == 200


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny-llama", messages=[{"role": "user", "content": "x"}], temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_more_prompts_than_fit_the_queue(http: httpx.Client) -> None:
    check(http.post(TEXT, json={"prompt": ["x"] * 10**5}), status=400, param="prompt", says="at most")
