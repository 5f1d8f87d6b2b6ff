"""Items of responses as messages of a chat."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.serve.errors import ApiError
from llmjax.serve.responses.conversation import PREFIXES, listed, messages_of
from llmjax.serve.responses.rounds import id_in_round, new_round
from llmjax.serve.sealing import sealed, unsealed

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
TEMPLATE_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def turns(items: list[dict[str, Any]], instructions: str | None = None) -> list[dict[str, Any]]:
    ignored: list[str] = []
    found = [message.model_dump(exclude_unset=True) for message in messages_of(instructions, [], items, ignored)]
    # What is listed is read as the same conversation.
    again = [message.model_dump(exclude_unset=True) for message in messages_of(instructions, listed(items), [], [])]
    assert [{**turn, "content": plain(turn)} for turn in again] == [{**turn, "content": plain(turn)} for turn in found]
    return found


def plain(turn: dict[str, Any]) -> str | None:
    content = turn["content"]
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def test_what_follows_each_other_is_one_answer() -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    found = turns([{"role": "user", "content": "hi"}, thought, said, CALL, RESULT, {"role": "user", "content": "so?"}])
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool", "user"]
    assert found[1]["reasoning_content"] == "hm" and plain(found[1]) == "I look."
    assert found[1]["tool_calls"] == [TEMPLATE_CALL]
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_two_messages_of_the_assistant_stay_two() -> None:
    said = {"role": "assistant", "content": "one"}
    assert [plain(turn) for turn in turns([said, {**said, "content": "two"}])] == ["one", "two"]
    assert [plain(turn) for turn in turns([CALL, said])] == [None, "one"]


def test_the_system_message_is_one_with_the_instructions() -> None:
    items = [
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "C"},
        {"role": "system", "content": "D"},
    ]
    found = turns(items, "A")
    assert [(turn["role"], plain(turn)) for turn in found] == [("system", "A\n\nB"), ("user", "C"), ("system", "D")]
    parts = [{"role": "system", "content": [{"type": "input_text", "text": "x"}]}, {"role": "system", "content": "y"}]
    assert [plain(turn) for turn in turns(parts)] == ["x\n\ny"]


def test_reasoning_that_another_server_sealed_is_said_to_be_ignored() -> None:
    ignored: list[str] = []
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}, {"role": "user", "content": "x"}]
    assert [message.role for message in messages_of(None, [], items, ignored)] == ["user"]
    assert ignored == ["input.0.encrypted_content"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_was_sealed_is_unsealed(text: str) -> None:
    assert unsealed(sealed(text)) == text
    assert unsealed(text) is None or text == sealed(unsealed(text) or "")


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TYPES = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "output_text", "refusal"]
PART = st.fixed_dictionaries({}, optional={"type": st.sampled_from(TYPES) | JSON, "text": JSON, "refusal": JSON})
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.lists(PART | JSON, max_size=2) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "call_id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": st.lists(PART, max_size=2) | JSON,
        "encrypted_content": JSON,
    },
)


@given(st.lists(ITEM, max_size=4))
def test_any_items_are_read_or_refused(items: list[dict[str, Any]]) -> None:
    try:
        turns(items)
    except ApiError as error:
        assert error.status == 400 and (error.param or "").startswith("input.")


@pytest.mark.parametrize("field", ["role", "content"])
def test_the_place_of_what_is_wrong_is_named(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        turns([{"role": "user", "content": "x"}, {"role": "user", "content": "x", field: 1}])
    assert caught.value.param == f"input.1.{field}"


def test_calls_of_tool_servers_are_calls_with_results() -> None:
    def made(id: str, **end: Any) -> dict[str, Any]:
        return {"type": "mcp_call", "id": id, "server_label": "s", "name": "f", "arguments": '{"a": 1}', **end}

    failed = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no file"}]}
    lost = {"type": "mcp_protocol_error", "code": -32000, "message": "closed"}
    items = [
        {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "f"}]},
        {"role": "user", "content": "hi"},
        *(
            made("1", output="one"),
            CALL,
            made("2", error=failed),
            made("3", error=lost),
            made("4", error="bad"),
            made("5"),
        ),
        RESULT,
        {"role": "assistant", "content": "so"},
        made("6", output="six"),
    ]
    found = turns(items)
    # Nothing says which calls of another server were one answer.
    assert [turn["role"] for turn in found] == ["user", *["assistant", "tool"] * 5, "tool", "assistant", "tool"]
    names = [call["function"]["name"] for turn in found for call in turn.get("tool_calls", [])]
    assert names == ["s__f", "f", *["s__f"] * 5]
    results = {turn["tool_call_id"]: turn["content"] for turn in found if turn["role"] == "tool"}
    assert results == {
        "1": "one",
        "2": "Error: no file",
        "3": "Error: closed",
        "4": "Error: bad",
        "5": "Error: the call was not run",
        "c1": "done",
        "6": "six",
    }
    assert listed(items)[0]["tools"] == [{"name": "f"}]


# As Qwen's template has it: results that follow each other stand in one message.
PROMPT = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</user>{% endif %}"
    "{% else %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments }}</call>{% endfor %}</{{ m.role }}>"
    "{% endif %}{% endfor %}"
)


def rendered(items: list[dict[str, Any]]) -> str:
    messages = [{**turn, "content": plain(turn)} for turn in turns(items)]
    return jinja2.Template(PROMPT).render(messages=messages)


def of_round(round: str, arguments: str, **more: Any) -> dict[str, Any]:
    fields = {"type": "mcp_call", "server_label": "s", "name": "f", "arguments": arguments}
    return {**fields, "id": id_in_round(PREFIXES[more.get("type", "mcp_call")], round), **more}


def test_rounds_are_rendered_as_they_were() -> None:
    user = {"role": "user", "content": "hi"}
    one, two, three = new_round(), new_round(), new_round()
    items = [
        user,
        of_round(one, "a", output="A"),
        of_round(one, "b", output="B"),
        of_round(two, "c", output="C"),
        of_round(three, "d", output="D"),
        {**of_round(three, "e", type="function_call"), "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "E"},
    ]
    first = "<user>hi</user><assistant><call>a</call><call>b</call></assistant>"
    second = "<user><result>A</result><result>B</result></user><assistant><call>c</call></assistant>"
    third = "<user><result>C</result></user><assistant><call>d</call><call>e</call></assistant>"
    assert rendered(items) == f"{first}{second}{third}<user><result>D</result><result>E</result></user>"


@pytest.mark.parametrize("approve", [True, False])
def test_results_of_approved_calls_stand_where_the_model_has_called(approve: bool) -> None:
    one, two = new_round(), new_round()
    asked = of_round(one, "a", type="mcp_approval_request")
    reply = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": approve}
    items = [{"role": "user", "content": "hi"}, asked, of_round(one, "b", output="B"), reply]
    if approve:
        items.append(of_round(two, "a", output="A", approval_request_id=asked["id"]))
    items.append(of_round(two, "c", output="C"))
    result = "A" if approve else "Error: the user did not approve this call"
    assert rendered(items) == (
        "<user>hi</user><assistant><call>a</call><call>b</call></assistant>"
        f"<user><result>{result}</result><result>B</result></user><assistant><call>c</call></assistant>"
        "<user><result>C</result></user>"
    )


@pytest.mark.parametrize("field", ["id", "server_label", "name", "arguments"])
def test_a_call_of_a_tool_server_is_whole(field: str) -> None:
    item = {"type": "mcp_call", "id": "1", "server_label": "s", "name": "f", "arguments": "{}"}
    del item[field]
    with pytest.raises(ApiError) as refused:
        turns([item])
    assert refused.value.param == f"input.0.{field}"
