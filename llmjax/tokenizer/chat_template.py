"""Chat templates: where they come from, and conversations turned into prompts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes as nodes

from llmjax.errors import InvalidRequest, TokenizerError
from llmjax.tokenizer.builtin_templates import BUILTIN_TEMPLATES
from llmjax.tokenizer.messages import ContentFormat, prepare_messages
from llmjax.tokenizer.template_sandbox import BoundedEnvironment, render_bounded

MAX_TEMPLATE = 256 * 1024  # characters; the longest known template has about 30,000
_JINJA_MARKS = ("{{", "{%", "{#")


@dataclass(frozen=True)
class _Compiled:
    template: jinja2.Template
    content_format: ContentFormat


@dataclass(frozen=True)
class ChatTemplate:
    """The templates of a model.

    Args:
        sources: name to Jinja source; ``default`` always, ``tool_use`` where there is one for requests with tools.
    """

    sources: Mapping[str, str]

    @staticmethod
    def from_text(text: str) -> ChatTemplate:
        """A template given as Jinja source or as the name of a built-in one.

        Raises:
            TokenizerError: it is neither, or does not compile.
        """
        if text in BUILTIN_TEMPLATES:
            text = BUILTIN_TEMPLATES[text]
        elif not any(mark in text for mark in _JINJA_MARKS):
            raise TokenizerError(
                f"chat_template {text[:80]!r} is neither Jinja nor one of {', '.join(sorted(BUILTIN_TEMPLATES))}"
            )
        _compile(text)
        return ChatTemplate({"default": text})

    @staticmethod
    def from_setting(text: str) -> ChatTemplate:
        """As ``from_text``, and ``text`` may also be the path of a file. Only for settings, never for requests."""
        if not any(mark in text for mark in _JINJA_MARKS) and text not in BUILTIN_TEMPLATES:
            path = Path(text).expanduser()
            if not path.is_file():
                names = ", ".join(sorted(BUILTIN_TEMPLATES))
                raise TokenizerError(f"chat_template {text[:200]!r} is neither Jinja, nor a file, nor one of {names}")
            source = _read(path)
            _compile(source)
            return ChatTemplate({"default": source})
        return ChatTemplate.from_text(text)

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """``tokenizer.chat_template`` and ``tokenizer.chat_template.NAME`` of a GGUF file; None: there is none."""
        key = "tokenizer.chat_template"
        sources = {
            k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".") and isinstance(v, str)
        }
        if isinstance(default := metadata.get(key), str):
            sources["default"] = default
        return ChatTemplate(sources) if "default" in sources else None

    @staticmethod
    def from_folder(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """The templates of a Hugging Face folder; None: there is none.

        Args:
            folder: may hold chat_template.jinja (with additional_chat_templates/NAME.jinja) or chat_template.json.
            tokenizer_config: the folder's tokenizer_config.json; its chat_template is a string or a list by name.

        Raises:
            TokenizerError: a file cannot be read; names it.
        """
        if (folder / "chat_template.jinja").exists():
            named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
            return ChatTemplate({p.stem: _read(p) for p in named} | {"default": _read(folder / "chat_template.jinja")})
        value = tokenizer_config.get("chat_template")
        if (path := folder / "chat_template.json").exists():
            try:
                value = json.loads(_read(path))["chat_template"]
            except (ValueError, KeyError, TypeError) as error:
                raise TokenizerError(f"{path}: is no JSON object with a chat_template") from error
        if isinstance(value, list):
            sources = {entry["name"]: entry["template"] for entry in value}
            # A list without a default has no template for ordinary requests but the first.
            return ChatTemplate({"default": next(iter(sources.values()))} | sources) if sources else None
        return ChatTemplate({"default": value}) if isinstance(value, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: OpenAI's form.
            variables: what the template sees besides ``messages``.
            continue_final_message: cut everything behind the last message's text.

        Raises:
            InvalidRequest: the messages are not of that form, or the template refuses them.
            TokenizerError: the template does not compile, fails, or passes a limit.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self.sources else "default"
        compiled = _compile(self.sources[name])
        prepared = prepare_messages(messages, compiled.content_format)
        prompt = render_bounded(compiled.template, {**variables, "messages": prepared})
        return _cut_after_final_message(prompt, messages[-1]) if continue_final_message else prompt


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def _cut_after_final_message(prompt: str, message: Mapping[str, Any]) -> str:
    [prepared] = prepare_messages([message], "string")
    text: str = prepared["content"]
    # Many templates trim what they are given, so the trimmed text is looked for and blanks are kept if they are there.
    start = prompt.rfind(text.strip()) if text.strip() else -1
    if start < 0:
        raise InvalidRequest(
            "continue_final_message: the template does not show the last message's text", field="messages"
        )
    whole = text.lstrip()
    return prompt[: start + len(whole if prompt.startswith(whole, start) else text.strip())]


@functools.cache
def _environment() -> BoundedEnvironment:
    return BoundedEnvironment()


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> _Compiled:
    if len(source) > MAX_TEMPLATE:
        raise TokenizerError(f"chat template: longer than {MAX_TEMPLATE} characters")
    environment = _environment()
    try:
        return _Compiled(environment.from_string(source), _content_format(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"chat template: line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
        raise TokenizerError(f"chat template: does not compile ({type(error).__name__})") from error


def _content_format(template: nodes.Template) -> ContentFormat:
    """Whether the template loops over a message's content, and so wants parts, or takes it as a string."""
    names = {
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    loops = template.find_all(nodes.For)
    return "parts" if any(_is_content(loop.iter, frozenset(names)) for loop in loops) else "string"


def _is_content(expression: nodes.Node, names: frozenset[str]) -> bool:
    while isinstance(expression, nodes.Filter) and expression.node is not None:
        expression = expression.node
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem):
        return isinstance(expression.arg, nodes.Const) and expression.arg.value == "content"
    return isinstance(expression, nodes.Name) and expression.name in names
