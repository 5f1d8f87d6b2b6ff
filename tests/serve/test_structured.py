"""Forms of answers as clients demand them of a real server, whose model is random: other forms would come out."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "the answer"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 30]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def ask(http: httpx.Client, path: str = CHAT, **body: Any) -> dict[str, Any]:
    what = {"messages": USER} if path == CHAT else {"prompt": "the answer"}
    response = http.post(path, json={**what, "max_tokens": 200, "temperature": 1, "seed": 1, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def content(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
)
def test_schemas(form: dict[str, Any], path: str, http: httpx.Client) -> None:
    text = content(ask(http, path, **form))
    jsonschema.validate(json.loads(text), SCHEMA)
    if form.get("structured_outputs", {}).get("disable_any_whitespace"):
        assert re.match(r'\{"city":"', text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, r"x\d\d"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9]'}, r"x\d\d"),
        ({"guided_decoding_backend": "guidance", "guided_regex": "[cd]"}, "[cd]"),
    ],
)
def test_other_forms(form: dict[str, Any], pattern: str, path: str, http: httpx.Client) -> None:
    assert re.fullmatch(pattern, content(ask(http, path, **form)))


def test_what_comes_with_nulls_is_free(http: httpx.Client) -> None:
    nothing = {"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None}
    assert ask(http, **nothing, max_tokens=8) is not None


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    class Trip(BaseModel):
        city: str
        nights: int | None
        fast: bool

    answer = client.chat.completions.parse(
        model="tiny-llama", messages=USER, response_format=Trip, seed=3, temperature=1, max_tokens=400
    )
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, Trip)


def test_a_stream_says_the_same(http: httpx.Client) -> None:
    form = {"structured_outputs": {"json": SCHEMA}}
    whole = content(ask(http, **form))
    body = {"messages": USER, "max_tokens": 200, "temperature": 1, "seed": 1, "stream": True, **form}
    with http.stream("POST", CHAT, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines) == whole


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format",
        "foo",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
    ({"structured_outputs": {}}, "structured_outputs", "no form"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "text"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "boolean"),
    (
        {
            "structured_outputs": {
                "regex": "(",
            }
        },
        "structured_outputs",
        "unclosed",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "x"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("form", "field", "message"), BAD)
def test_bad_forms(form: dict[str, Any], field: str, message: str, path: str, http: httpx.Client) -> None:
    for stream in (False, True):
        what = {"messages": USER} if path == CHAT else {"prompt": "the answer"}
        response = http.post(path, json={**what, "max_tokens": 4, "stream": stream, **form})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error
        assert message in error["message"]


def test_large_forms_do_not_hold_the_server(http: httpx.Client) -> None:
    """They are served or refused, whatever they are, and the next request is served."""
    large = [
        {"guided_json": {"enum": [f"number {i}" for i in range(20_000)]}},
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_choice": ["a" * 10] * 5000},
        {"guided_regex": "a" * (2**20 + 1)},
    ]
    for form in large:
        response = http.post(COMPLETIONS, json={"prompt": "the", "max_tokens": 2, **form})
        assert response.status_code in (200, 400), response.text
    assert content(ask(http, guided_choice=["fine"])) == "fine"
