"""Ollama's API against Ollama's own client and types: a real server, and a model that says what a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.routes.ollama import VERSION
from tests.pooled_models import write_with_tokenizer
from tests.serve.javascript import run_program
from tests.serve.scripted import scripted_engine

KEY = "the-key"
CONTEXT = 512
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What it will be like",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SCRIPTS = {
    "plain": "Nothing to <do> here, is there?",
    "thought": "<think>\nThe city is Paris.\n</think>\n\nIt rains.",
    "two calls": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm \\"S\\"", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    "object": '{"town":"Wien","size":1931}',
}
# The last message of the user names the script.
TEMPLATE = (
    "{# <tool_call> <think></think> #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}\n"
    "{% endfor %}{% if enable_thinking is defined and enable_thinking %}+{% endif %}"
    "{% if add_generation_prompt %}[[{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}]]"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str) -> Iterator[Any]:
    config = scripted_engine(
        tmp_path_factory.mktemp("models") / "scripted",
        SCRIPTS,
        special=["<think>"],
        template=TEMPLATE,
        context=CONTEXT,
        compile_cache_dir=compile_cache_dir,
    )
    server, stop = start_server(config, ServerConfig(port=0, api_key=[KEY]))
    yield server
    stop()


@pytest.fixture
def client(running: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=running.url, headers={"authorization": f"Bearer {KEY}"}, timeout=None) as client:
        yield client


def ask(script: str) -> dict[str, Any]:
    """A conversation that the model answers with a script."""
    return {"model": "scripted", "messages": [{"role": "user", "content": script}], "options": {"temperature": 0}}


def test_a_chat_whole_and_in_pieces(client: ollama.Client) -> None:
    whole = client.chat(**ask("plain"))
    assert (whole.message.role, whole.message.content) == ("assistant", SCRIPTS["plain"])
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "scripted")
    *parts, end = client.chat(**ask("plain"), stream=True)
    assert len(parts) > 1 and not any(part.done for part in parts)
    assert "".join(part.message.content or "" for part in parts) == SCRIPTS["plain"]
    assert end.done and end.message.content == ""
    assert (end.prompt_eval_count, end.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert min(whole.eval_count, whole.prompt_eval_count, whole.total_duration, whole.eval_duration) > 0
    assert whole.total_duration >= whole.eval_duration


def test_lines_are_json_and_come_unless_they_are_not_wanted(running: Any) -> None:
    with httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {KEY}"}, timeout=None) as http:
        response = http.post("/api/chat", json=ask("plain"))
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_thinking_is_a_field_of_its_own(client: ollama.Client) -> None:
    *parts, _ = client.chat(**ask("thought"), think=True, stream=True)
    assert "".join(part.message.thinking or "" for part in parts).strip() == "The city is Paris."
    assert "".join(part.message.content or "" for part in parts).strip() == "It rains."
    whole = client.generate("scripted", "thought", think=True)
    assert (whole.thinking or "").strip() == "The city is Paris." and whole.response.strip() == "It rains."
    more = client.chat(**ask("plain"), think=True).prompt_eval_count - client.chat(**ask("plain")).prompt_eval_count
    assert more == 1  # the template's +


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(client: ollama.Client, stream: bool) -> None:
    found = client.chat(**ask("two calls"), tools=[WEATHER], stream=stream)
    messages = [part.message for part in found] if stream else [found.message]
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert [(call.name, dict(call.arguments)) for call in calls] == [
        ("get_weather", {"city": 'Ulm "S"', "days": 3}),
        ("get_weather", {"city": "Bonn"}),
    ]
    assert "".join(message.content or "" for message in messages).strip() == "I look."


def test_results_of_tools_go_back(client: ollama.Client) -> None:
    """The client sends calls back as it got them, and results by the names of tools."""
    body = ask("plain")
    said = client.chat(**ask("two calls"), tools=[WEATHER]).message
    results = [{"role": "tool", "tool_name": "get_weather", "content": text} for text in ("sun", "rain")]
    body["messages"] += [said, *results]
    assert client.chat(**body, tools=[WEATHER]).message.content == SCRIPTS["plain"]


TOWN = {"type": "object", "properties": {"town": {"type": "string"}, "size": {"type": "integer"}}}


@pytest.mark.parametrize("form", ["json", TOWN], ids=["json", "schema"])
def test_answers_in_a_form(client: ollama.Client, form: Any) -> None:
    found = client.generate("scripted", "object", format=form, options={"temperature": 0, "num_predict": 60})
    assert json.loads(found.response)["town"] == "Wien"


def test_a_context_goes_on_with_a_conversation(client: ollama.Client) -> None:
    first = client.generate("scripted", "plain", options={"temperature": 0})
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    alone, after = (client.generate("scripted", "object", context=given) for given in (None, first.context))
    assert after.response == alone.response == SCRIPTS["object"]
    assert after.prompt_eval_count == alone.prompt_eval_count + len(first.context)
    with pytest.raises(ollama.ResponseError, match="`context` must have token ids from 0 to"):
        client.generate("scripted", "plain", context=[10**6])
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("scripted", "plain", context=[1] * CONTEXT)


def test_a_raw_prompt_goes_to_the_model_as_it_is(client: ollama.Client) -> None:
    whole = client.generate("scripted", "[[plain]]", raw=True, options={"temperature": 0})
    assert (whole.response, whole.done_reason, whole.context) == (SCRIPTS["plain"], "stop", None)
    assert whole.prompt_eval_count < client.generate("scripted", "plain").prompt_eval_count
    *parts, end = client.generate("scripted", "[[plain]]", raw=True, stream=True, options={"num_predict": 4})
    assert end.done_reason == "length" and end.eval_count == 4
    assert SCRIPTS["plain"].startswith("".join(part.response for part in parts))
    with pytest.raises(ollama.ResponseError, match="`system` cannot be combined with raw"):
        client.generate("scripted", "x", raw=True, system="y")
    with pytest.raises(ollama.ResponseError, match=r"`suffix`: .* no tokens for filling a gap"):
        client.generate("scripted", "x", suffix="y")


@pytest.mark.parametrize("tokens", [10**6, 0, -1, -2])
def test_more_tokens_than_fit_may_be_asked_for(client: ollama.Client, tokens: int) -> None:
    options = {"temperature": 0, "num_predict": tokens}
    assert client.chat(**{**ask("plain"), "options": options}).message.content == SCRIPTS["plain"]
    assert client.generate("scripted", "[[plain]]", raw=True, options=options).response == SCRIPTS["plain"]


def test_loading_a_model_that_is_there(client: ollama.Client) -> None:
    assert client.generate("scripted", "").done_reason == "load"
    assert client.chat("scripted:latest", []).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.generate("other", "")
    assert error.value.status_code == 404


def test_what_cannot_be_is_named_by_ollamas_names(client: ollama.Client) -> None:
    for more, why in (
        ({"options": {"mirostat": 1}}, "`options.mirostat` is not supported"),
        ({"options": {"top_p": 7}}, "options.top_p"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"logprobs": True}, "`logprobs` is not supported here"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "`messages.0.images.0`: this model reads",
        ),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as error:
            client.chat(**{**ask("plain"), **more})
        assert error.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_named_by_ollamas_names(client: ollama.Client, stream: bool) -> None:
    """A schema is compiled when its request begins."""
    form: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    for answer in (
        lambda: client.chat(**ask("plain"), format=form, stream=stream),
        lambda: client.generate("scripted", "plain", format=form, stream=stream),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            list(answer())
        assert "format" in str(error.value) and "response_format" not in str(error.value)


def test_a_model_stays_for_a_duration(client: ollama.Client) -> None:
    for wrong in ("soon", "5 minutes or so"):
        with pytest.raises(ollama.ResponseError, match=r"keep_alive.*a duration such as 5m"):
            client.chat(**ask("plain"), keep_alive=wrong)


def test_a_key_is_needed(running: Any) -> None:
    with ollama.Client(host=running.url) as client, pytest.raises(ollama.ResponseError, match="key") as error:
        client.chat(**ask("plain"))
    assert error.value.status_code == 401


def test_what_is_without_effect_is_told(running: Any) -> None:
    body = {**ask("plain"), "keep_alive": "5m", "stream": False, "options": {"num_ctx": 4096, "temperature": 0}}
    response = httpx.post(
        f"{running.url}/api/chat", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=None
    )
    assert response.headers["x-ignored-fields"] == "options.num_ctx,keep_alive"
    body = {**ask("plain"), "truncate": True, "shift": False, "stream": False}
    response = httpx.post(
        f"{running.url}/api/chat", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=None
    )
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "truncate")


def test_the_model_is_shown(client: ollama.Client, running: Any) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == "scripted" and listed.size > 0
    assert loaded.context_length == CONTEXT and loaded.digest == listed.digest
    shown = client.show("scripted")
    assert shown.template == TEMPLATE
    assert {"completion", "tools", "thinking"} == set(shown.capabilities)
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == CONTEXT
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{running.url}/api/version", headers=headers, timeout=None).json() == {"version": VERSION}


def test_the_only_model_is_there_and_stays(client: ollama.Client) -> None:
    assert client.pull("scripted").status == "success"
    assert [part.status for part in client.pull("scripted", stream=True)] == ["pulling manifest", "success"]
    for ask_for in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match=r"one model .* --load demand") as error:
            ask_for("other")
        assert error.value.status_code == 501


async def test_the_async_client(running: Any) -> None:
    async with ollama.AsyncClient(host=running.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        parts = [part async for part in await client.chat(**ask("plain"), stream=True)]
    assert "".join(part.message.content or "" for part in parts) == SCRIPTS["plain"]


@pytest.fixture(scope="module")
def embedder(
    tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str, start_server: Callable[..., Any]
) -> Iterator[Any]:
    settings = EngineConfig(
        model=str(write_with_tokenizer("qwen3-embedding", tmp_path_factory.mktemp("models"), ends=False)),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        served_model_name="tiny",
        compilation_cache_dir=compile_cache_dir,
    )
    server, stop = start_server(settings, ServerConfig(port=0))
    yield server
    stop()


def test_vectors(embedder: Any) -> None:
    with ollama.Client(host=embedder.url, timeout=None) as client:
        both = client.embed("tiny", ["w1 w2 w3", "w4"])
        one = client.embeddings("tiny", "w4")
        assert client.embed("tiny", []).embeddings == []
        assert client.show("tiny").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="makes embeddings"):
            client.chat("tiny", [{"role": "user", "content": "w1"}])
    openai = httpx.post(
        f"{embedder.url}/v1/embeddings", json={"model": "tiny", "input": ["w1 w2 w3", "w4"]}, timeout=None
    )
    expected = [entry["embedding"] for entry in openai.json()["data"]]
    np.testing.assert_allclose(both.embeddings, expected, rtol=1e-5)
    np.testing.assert_allclose(one.embedding, expected[1], rtol=1e-5)
    assert both.prompt_eval_count == openai.json()["usage"]["prompt_tokens"]


def test_a_program_in_javascript(running: Any, embedder: Any) -> None:
    run_program("ollama.mjs", running.url, KEY, embedder.url, package="ollama")
    running.wait_idle()
    assert running.engine.kv_stats().used == 0
