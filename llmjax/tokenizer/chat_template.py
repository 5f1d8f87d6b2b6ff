"""Chat templates: where they come from, and conversations turned into prompts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmjax.errors import ChatTemplateError, TokenizerError
from llmjax.templating.pool import RenderPool
from llmjax.templating.wire import RenderRequest
from llmjax.tokenizer.builtin_templates import BUILTIN_TEMPLATES, OF_ARCHITECTURES, PAIR_TEMPLATES

MAX_TEMPLATE = 256 * 1024  # characters; the longest known template has about 30,000
NAMED = {**BUILTIN_TEMPLATES, **PAIR_TEMPLATES}
_JINJA_MARKS = ("{{", "{%", "{#")


@dataclass(frozen=True)
class Conversation:
    """Messages and the template that makes a prompt of them."""

    pool: RenderPool
    request: RenderRequest

    def prompt(self) -> str:
        """The text. Encode it with ``add_special_tokens=False``: templates write BOS themselves. Blocks.

        Raises:
            InvalidRequest: the messages are not of OpenAI's form, or the template refuses them.
            ChatTemplateError: the template does not compile, fails, or passes a limit.
        """
        return self.pool.render(self.request)

    async def prompt_async(self) -> str:
        """Like ``prompt``, without blocking the event loop."""
        return await self.pool.render_async(self.request)


@dataclass(frozen=True)
class ChatTemplate:
    """The templates of a model.

    Args:
        sources: name to Jinja source; ``default`` always, ``tool_use`` where there is one for requests with tools.
        of_request: it came in a request, and is rendered apart from others.
    """

    sources: Mapping[str, str]
    of_request: bool = False

    @staticmethod
    def from_text(text: str, *, of_request: bool = False) -> ChatTemplate:
        """A template given as Jinja source or as the name of a built-in one. It is compiled when it is first used.

        Raises:
            ChatTemplateError: it is neither.
        """
        if text in NAMED:
            text = NAMED[text]
        elif not any(mark in text for mark in _JINJA_MARKS):
            raise ChatTemplateError(
                f"chat_template {text[:80]!r} is neither Jinja nor one of {', '.join(sorted(NAMED))}"
            )
        return ChatTemplate({"default": text}, of_request=of_request)

    @staticmethod
    def from_setting(text: str) -> ChatTemplate:
        """Like ``from_text``, but compiles at once and also takes a file's path. Only for settings, never for requests.

        Raises:
            ChatTemplateError: it is neither, or does not compile; names the line.
            TokenizerError: the file cannot be read.
        """
        if any(mark in text for mark in _JINJA_MARKS) or text in NAMED:
            template = ChatTemplate.from_text(text)
        elif os.path.isfile(path := os.path.expanduser(text)):  # False, too, for what cannot be a path
            template = ChatTemplate({"default": _read(Path(path))})
        else:
            names = ", ".join(sorted(NAMED))
            raise ChatTemplateError(f"chat_template {text[:200]!r} is neither Jinja, nor a file, nor one of {names}")
        template.check()
        return template

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
        """The templates of a Hugging Face folder, or the built-in one of its architecture; None: there is none.

        Args:
            folder: may hold chat_template.jinja (with additional_chat_templates/NAME.jinja) or chat_template.json.
            tokenizer_config: the folder's tokenizer_config.json; its chat_template is a string, or a list or an
                object by name.

        Raises:
            TokenizerError: a file cannot be read, or the value is none of these; names it.
        """
        if (folder / "chat_template.jinja").exists():
            named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
            return ChatTemplate({p.stem: _read(p) for p in named} | {"default": _read(folder / "chat_template.jinja")})
        value, origin = tokenizer_config.get("chat_template"), folder / "tokenizer_config.json"
        if (path := folder / "chat_template.json").exists():
            try:
                value, origin = json.loads(_read(path))["chat_template"], path
            except (ValueError, KeyError, TypeError) as error:
                raise TokenizerError(f"{path}: is not a JSON object with a chat_template") from error
        if not value:
            name = OF_ARCHITECTURES.get(_architecture(folder))
            return None if name is None else ChatTemplate.from_text(name)
        if isinstance(value, str):
            return ChatTemplate({"default": value})
        try:
            sources = dict(value) if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        except (KeyError, TypeError):
            sources = {}
        if not sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
            raise TokenizerError(f"{origin}: chat_template is neither a string nor templates by name")
        # Without a default there is no template for ordinary requests but the first.
        return ChatTemplate({"default": next(iter(sources.values()))} | sources)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> Conversation:
        """A conversation under the template that is meant for it.

        Args:
            messages: OpenAI's form.
            variables: what the template sees besides ``messages``.
            continue_final_message: cut everything after the last message's text.

        Raises:
            ChatTemplateError: the template is too long.
        """
        request = RenderRequest(
            source=_bounded(self.source(with_tools=bool(variables.get("tools")))),
            messages=list(messages),
            variables=variables,
            continue_final_message=continue_final_message,
        )
        return Conversation(self._pool, request)

    def source(self, *, with_tools: bool) -> str:
        """The template for requests with tools, or without."""
        return self.sources["tool_use" if with_tools and "tool_use" in self.sources else "default"]

    def check(self) -> None:
        """Compiles the templates, which also makes the first rendering quick.

        Raises:
            ChatTemplateError: one does not compile; names the line.
        """
        for source in self.sources.values():
            self._pool.render(RenderRequest(source=_bounded(source)))

    @property
    def _pool(self) -> RenderPool:
        return _pool(of_requests=self.of_request)


def _bounded(source: str) -> str:
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(f"chat template: longer than {MAX_TEMPLATE} characters")
    return source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: {error}") from error


@functools.cache
def _pool(*, of_requests: bool) -> RenderPool:
    """The process's renderers. A template that came in a request never delays or meets what the model's own renders."""
    return RenderPool(size=1 if of_requests else 2)


def _architecture(folder: Path) -> str:
    """The first of the architectures in config.json; empty: there is none."""
    path = folder / "config.json"
    if not path.exists():
        return ""
    try:
        named = json.loads(_read(path)).get("architectures")
    except (ValueError, AttributeError):  # whoever reads the model says what is wrong with it
        return ""
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
