"""Conversations that the server keeps: what is asked after the first turn is what would be asked with all messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.conversations import Conversations, Joined
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import ChatRequest
from tests.serve.conftest import Running

CHAT = "/v1/chat/completions"
MOST = 4


@pytest.fixture(scope="module")
def server(engine_config: EngineConfig, start_server: Callable[..., Any]) -> Iterator[Running]:
    settings = ServerConfig(port=0, api_key=["one", "two"], record_conversation=True, max_conversations=MOST)
    running, stop = start_server(engine_config, settings)
    yield running
    stop()


def ask(server: Running, *messages: Any, key: str = "one", **fields: Any) -> httpx.Response:
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    body = {"messages": said, "max_tokens": 8, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + CHAT, json=body, headers=headers, timeout=None)


def kept(server: Running, id: str, key: str = "one") -> httpx.Response:
    url = f"{server.url}/v1/conversations/{id}"
    return httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=None)


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_only_new_messages_are_sent(server: Running) -> None:
    system = {"role": "system", "content": "the end of the world"}
    first = ask(server, system, "Hello the world", conversation_id="a/b c").json()
    assert first["conversation"] == {"id": "a/b c", "messages": 0}
    second = ask(server, "and then", conversation_id="a/b c", stream=True, stream_options={"include_usage": True})
    chunks = streamed(second)
    assert {json.dumps(chunk["conversation"]) for chunk in chunks} == {'{"id": "a/b c", "messages": 3}'}
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    third = ask(server, "in the end", conversation_id="a/b c").json()
    history = [system, "Hello the world", {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    history += ["and then", {"role": "assistant", "content": text}, "in the end"]
    whole = ask(server, *history).json()
    assert "conversation" not in whole
    assert whole["usage"]["prompt_tokens"] == third["usage"]["prompt_tokens"]
    assert whole["choices"][0]["message"] == third["choices"][0]["message"]
    # The pages of the turn before are still there.
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    messages = kept(server, "a/b c").json()["messages"]
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3]
    assert messages[4] == {"role": "assistant", "content": text}


def test_the_server_names_a_conversation(server: Running) -> None:
    first = ask(server, "Hello", record_conversation=True).json()
    id = first["conversation"]["id"]
    assert id.startswith("conv_") and first["conversation"]["messages"] == 0
    second = ask(server, "again", conversation_id=id).json()
    assert second["conversation"] == {"id": id, "messages": 2}
    aside = ask(server, "aside", conversation_id=id, record_conversation=False).json()
    assert "conversation" not in aside
    assert len(kept(server, id).json()["messages"]) == 4


def test_what_another_key_said_is_not_there(server: Running) -> None:
    mine = ask(server, "a secret of mine", conversation_id="shared").json()
    yours = ask(server, "Hello", conversation_id="shared", key="two").json()
    assert mine["conversation"]["messages"] == yours["conversation"]["messages"] == 0
    assert kept(server, "shared", "two").json()["messages"][0]["content"] == "Hello"
    assert "secret" not in kept(server, "shared", "two").text
    ask(server, "Hello", conversation_id="mine alone")
    assert kept(server, "mine alone", "two").status_code == 404
    headers = {"Authorization": "Bearer two"}
    assert httpx.delete(f"{server.url}/v1/conversations/mine%20alone", headers=headers, timeout=None).status_code == 404
    assert kept(server, "mine alone").status_code == 200


def test_openais_client_retrieves_and_deletes(server: Running) -> None:
    ask(server, "Hello", conversation_id="gone")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        assert client.conversations.retrieve("gone").id == "gone"
        assert client.conversations.delete("gone").deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve("gone")


def test_what_fails_is_no_part_of_it(server: Running) -> None:
    ask(server, "Hello", conversation_id="safe")
    failures: list[dict[str, Any]] = [{"max_tokens": 10**6}, {"temperature": -1}, {"n": 2}, {"tools": [{}]}]
    for fields in failures:
        assert ask(server, "bad", conversation_id="safe", **fields).status_code == 400
    assert ask(server, "bad", conversation_id="never", max_tokens=10**6).status_code == 400
    assert kept(server, "never").status_code == 404
    assert [m["content"] for m in kept(server, "safe").json()["messages"] if m["role"] == "user"] == ["Hello"]


def test_who_leaves_may_ask_again(server: Running) -> None:
    ask(server, "Hello", conversation_id="left")
    body = {"messages": [{"role": "user", "content": "long"}], "conversation_id": "left", "stream": True}
    fields = {"max_tokens": 300, "ignore_eos": True}
    headers = {"Authorization": "Bearer one"}
    with httpx.stream("POST", server.url + CHAT, json={**body, **fields}, headers=headers, timeout=None) as stream:
        next(stream.iter_lines())
    server.wait_idle()
    again = ask(server, "short", conversation_id="left")
    while again.status_code == 409:  # the server has not noticed yet
        again = ask(server, "short", conversation_id="left")
    assert again.json()["conversation"]["messages"] in (2, 4)  # 4: the stream was faster


def test_one_request_at_a_time() -> None:
    store = Conversations(most=10, most_bytes=400, most_request_bytes=250, lifetime=60)
    first = store.begin("me", request("a", "x"))
    assert first is not None
    with pytest.raises(ApiError, match="by another request") as raised:
        store.begin("me", request("a", "y"))
    assert (raised.value.status, raised.value.code) == (409, "conflict")
    assert store.begin("you", request("a", "y")) is not None
    first.end()  # it was not answered
    second = store.begin("me", request("a", "z"))
    assert second is not None and second.before == 0
    assert [message.content for message in second.history()] == ["z"]


def test_the_oldest_make_room(server: Running) -> None:
    for number in range(MOST + 2):
        ask(server, "Hello", conversation_id=f"n{number}", key="two")
    found = [kept(server, f"n{number}", "two").status_code for number in range(MOST + 2)]
    assert found == [404, 404, *[200] * MOST]


def test_a_conversation_that_fills_the_context_says_so(server: Running) -> None:
    for _ in range(20):
        answer = ask(server, "Hello the world " * 4, conversation_id="full", max_tokens=16, ignore_eos=True)
        if answer.status_code != 200:
            break
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"conversation_id": ""}, "conversation_id"),
        ({"conversation_id": "x" * 513}, "conversation_id"),
        ({"record_conversation": "yes"}, "record_conversation"),
    ],
)
def test_what_nothing_can_follow(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = ask(server, "Hello", **{"conversation_id": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"conversation_id": "x"}, {"record_conversation": True}])
def test_a_server_that_keeps_none_says_so(running: Running, fields: dict[str, Any]) -> None:
    answer = ask(running, "Hello", **fields)
    (name,) = fields
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert "--record-conversation" in answer.json()["error"]["message"]
    assert ask(running, "Hello", record_conversation=False).status_code == 200


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(id: str, *texts: str) -> ChatRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return ChatRequest.model_validate({"messages": messages, "conversation_id": id})


def test_what_is_old_or_large_goes() -> None:
    clock = Clock()
    store = Conversations(most=10, most_bytes=400, most_request_bytes=250, lifetime=60, clock=clock)

    def say(id: str, text: str) -> int:
        turn = store.begin("me", request(id, text))
        assert turn is not None
        turn.record({"content": "yes", "refusal": None})
        turn.end()
        return turn.before

    assert [say("a", "x"), say("a", "y")] == [0, 2]
    clock.now = 59
    assert say("a", "z") == 4
    clock.now = 118  # it counts from the last message
    assert say("a", "z") == 6
    with pytest.raises(ApiError, match="too long"):
        store.begin("me", request("a", "z"))
    say("b", "x" * 200)
    assert store.find("me", "a") is None and store.find("me", "b") is not None
    clock.now = 178
    assert store.find("me", "b") is None and store.find("you", "b") is None


def test_a_conversation_that_is_deleted_in_the_middle_stays_deleted() -> None:
    store = Conversations(most=10, most_bytes=400, most_request_bytes=250, lifetime=60)
    turn = store.begin("me", request("a", "x"))
    assert turn is not None
    store.delete("me", "a")
    turn.record({"content": "yes"})
    turn.end()
    assert store.find("me", "a") is None


def test_deltas_make_the_message() -> None:
    joined = Joined()
    call: dict[str, Any] = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"reasoning": "a", "reasoning_content": "a"},
        {"content": "b"},
        {"content": "c"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    for delta in deltas:
        joined.add(delta)
    found = joined.message()
    assert (found["content"], found["reasoning"], found["reasoning_content"]) == ("bc", "a", "a")
    del call["index"]
    assert found["tool_calls"] == [{**call, "function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert Joined().message() == {"content": ""}


@pytest.mark.parametrize("setting", ["max_conversations", "max_conversation_bytes", "conversation_lifetime"])
def test_settings(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        ServerConfig(**{setting: -1})
