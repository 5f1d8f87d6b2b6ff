"""Where chat templates come from. How they are rendered: tests/templating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ChatTemplateError, TokenizerError
from llmjax.tokenizer import ChatTemplate
from llmjax.tokenizer.builtin_templates import BUILTIN_TEMPLATES

USER = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "S"},
    *USER,
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "B"},
]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate.from_text(source).conversation(messages, variables=variables).prompt()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST] A </s><s>[INST] B [/INST]"),
        ("mistral", "<s>[INST] S\n\nHi [/INST] A</s>[INST] B [/INST]"),
        ("mistral-v3-tekken", "<s>[INST]Hi[/INST]A</s>[INST]S\n\nB[/INST]"),
        ("mistral-v7-tekken", "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Hi[/INST]A</s>[INST]B[/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("zephyr", "<|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\nA</s>\n<|user|>\nB</s>\n<|assistant|>\n"),
    ],
)
def test_builtin_forms(name: str, text: str) -> None:
    assert render(name, CHAT, bos_token="<s>", eos_token="</s>", add_generation_prompt=True) == text


def test_mistrals_pictures_stand_where_they_are_said() -> None:
    seen = [{"type": "text", "text": "Is "}, {"type": "image", "text": "[IMG]"}, {"type": "text", "text": " it?"}]
    for name in ("mistral-v3-tekken", "mistral-v7-tekken"):
        assert render(name, [{"role": "user", "content": seen}], bos_token="<s>") == "<s>[INST]Is [IMG] it?[/INST]"


def test_models_without_a_chat_have_their_prompts_made(tmp_path: Path) -> None:
    """Pictures come first; BLIP's files need no template, for its prompts have one form."""
    seen = [{"type": "text", "text": "What?"}, {"type": "image", "text": "<image>"}]
    assert render("moondream", [{"role": "user", "content": seen}]) == "<image>\n\nQuestion: What?\n\nAnswer:"
    assert render("blip", [{"role": "user", "content": seen}]) == "<image>What?"
    assert render("blip", [{"role": "user", "content": seen[1:]}]) == "<image>"
    (tmp_path / "config.json").write_text('{"architectures": ["BlipForConditionalGeneration"]}')
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template is not None and template.sources == {"default": BUILTIN_TEMPLATES["blip"]}
    assert ChatTemplate.from_folder(tmp_path, {"chat_template": "own"}) == ChatTemplate({"default": "own"})
    for text in ('{"architectures": []}', "[]", "{", '{"architectures": ["LlamaForCausalLM"]}'):
        (tmp_path / "config.json").write_text(text)
        assert ChatTemplate.from_folder(tmp_path, {}) is None


def test_every_builtin_renders() -> None:
    for name in BUILTIN_TEMPLATES:
        assert "Hi" in render(name, add_generation_prompt=True)


def test_arguments_become_objects_and_input_stays() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a[1] }}{% endfor %}"
    assert render(source, messages) == "é"
    assert call["function"]["arguments"] == '{"a": [1, "é"]}'


def test_tool_use_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"})
    assert template.conversation(USER, variables={"tools": None}).prompt() == "d"
    assert template.conversation(USER, variables={"tools": [{}]}).prompt() == "t"


def test_not_a_template(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chatml"):
        ChatTemplate.from_text("nonsense")
    path = tmp_path / "t.jinja"
    path.write_text("{{ 1 + 1 }}")
    assert ChatTemplate.from_setting(str(path)).conversation(USER, variables={}).prompt() == "2"
    with pytest.raises(TokenizerError, match="neither Jinja, nor a file"):
        ChatTemplate.from_setting(str(tmp_path / "absent"))
    # A request may not read files.
    with pytest.raises(TokenizerError):
        ChatTemplate.from_text(str(path))


def test_folder_order(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": listed})
    assert found is not None and found.sources == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": "a"})
    assert found is not None and found.sources == {"default": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    found = ChatTemplate.from_folder(tmp_path, {})
    assert found is not None and found.sources == {"default": "d", "tool_use": "e"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"chat_template\.json"):
        ChatTemplate.from_folder(tmp_path, {})


@pytest.mark.parametrize("named", [{"default": "a", "rag": "b"}, [{"name": "rag", "template": "b"}]])
def test_templates_by_name(tmp_path: Path, named: Any) -> None:
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": named})
    assert found is not None and found.sources == {"default": "a" if isinstance(named, dict) else "b", "rag": "b"}


@pytest.mark.parametrize("value", [7, [7], [{"name": "a"}], {"default": 7}, [{"name": 1, "template": "x"}]])
def test_malformed_templates_name_their_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template is neither"):
        ChatTemplate.from_folder(tmp_path, {"chat_template": value})


def test_a_setting_is_compiled_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("\n{% for x in %}")
    for setting in (str(path), path.read_text()):
        with pytest.raises(ChatTemplateError, match="line 2: Expected an expression"):
            ChatTemplate.from_setting(setting)
    with pytest.raises(ChatTemplateError, match="longer than"):
        ChatTemplate.from_setting("{{ 1 }}" * 100_000)


async def test_asynchronously_too() -> None:
    conversation = ChatTemplate.from_text("{{ messages[0].content }}").conversation(USER, variables={})
    assert await conversation.prompt_async() == conversation.prompt() == "Hi"


def test_a_request_does_not_wait_for_templates_of_others() -> None:
    theirs = ChatTemplate.from_text("{{ 1 }}", of_request=True)
    assert theirs._pool is not ChatTemplate.from_text("{{ 1 }}")._pool
