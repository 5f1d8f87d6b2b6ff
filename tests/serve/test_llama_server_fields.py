"""llama-server's fields in requests of OpenAI's API, beside the same requests in OpenAI's words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "the hen"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETION: {"prompt": "the hen"}}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
# What llama.vscode sends with every chat, but for the length.
OF_AN_EDITOR: dict[str, Any] = {
    "cache_prompt": True,
    "samplers": "edkypmxt",
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "timings_per_token": False,
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), 0),
    **dict.fromkeys(("dynatemp_exponent", "typical_p"), 1),
    "xtc_threshold": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
}


def answered(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **PROMPTS[path], **body}
    return http.post(path, json={name: value for name, value in asked.items() if value is not ...})


def tokens(http: httpx.Client, path: str, **body: Any) -> list[int]:
    response = answered(http, path, **body)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


@BOTH
def test_a_request_of_an_editor(http: httpx.Client, path: str) -> None:
    response = answered(http, path, **OF_AN_EDITOR)
    assert response.json()["choices"][0]["token_ids"] == tokens(http, path)
    told = {"dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n"}
    assert set(response.headers["x-ignored-fields"].split(",")) == told


@BOTH
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_tokens": ..., "n_predict": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"guided_grammar": 'root ::= "yes" | "no"'}),
        ({"json_schema": {"enum": [1, 2]}}, {"guided_json": {"enum": [1, 2]}}),
        ({"logit_bias": [[7, 90], [8, False]]}, {"logit_bias": {"7": 90, "8": -100}}),
        ({"samplers": ["top_k"], "repeat_penalty": 1.9, "top_k": 1, "temperature": 0}, {"top_k": 1, "temperature": 1}),
        ({"grammar": "", "json_schema": {}, "logit_bias": []}, {}),
    ],
    ids=lambda value: ",".join(value),
)
def test_the_same_in_other_words(http: httpx.Client, path: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert tokens(http, path, **theirs) == tokens(http, path, **ours)


@BOTH
def test_nothing_of_the_cache_is_read(http: httpx.Client, path: str) -> None:
    long = " ".join(["the hen"] * 40)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    cached = [
        answered(http, path, **prompt, cache_prompt=wanted).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for wanted in (True, True, False)
    ]
    assert cached[1] > 0 and cached[2] == 0


@BOTH
@pytest.mark.parametrize("asked", [{"max_tokens": -1}, {"max_tokens": ..., "n_predict": -2}], ids=str)
def test_as_many_as_fit(http: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    usage = answered(http, path, **asked).json()["usage"]
    assert usage["total_tokens"] == model["max_model_len"]


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0.5),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("mirostat", 2),
        ("n_probs", 3),
        ("reasoning_format", "none"),
        ("parse_tool_calls", False),
        ("n_predict", 0),
        ("n_predict", -3),
        ("repeat_penalty", -1),
        ("repeat_penalty", "1"),
        ("grammar", "root ::= ("),
        ("samplers", 3),
        ("json_schema", {"type": "nothing"}),
    ],
)
def test_errors_have_the_names_of_the_request(http: httpx.Client, path: str, field: str, value: Any) -> None:
    response = answered(http, path, **{"max_tokens": ..., field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].partition(".")[0] == field


@BOTH
def test_one_thing_is_said_once(http: httpx.Client, path: str) -> None:
    error = answered(http, path, n_predict=8).json()["error"]
    assert (error["param"], error["message"]) == ("n_predict", "`n_predict` is max_tokens; give one of them")
