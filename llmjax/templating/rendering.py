"""From a template's source and messages to a prompt."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from llmjax.errors import ChatTemplateError, InvalidRequest
from llmjax.templating.environment import chat_environment
from llmjax.templating.forms import Forms, forms_of
from llmjax.templating.messages import checked_messages
from llmjax.templating.wire import RenderRequest

# Appended to the last message's text to find where it ends in the prompt. The blank tells whether blanks are kept.
_END = "END_OF_THE_FINAL_MESSAGE "


@dataclass(frozen=True)
class Compiled:
    template: jinja2.Template
    forms: Forms


def render(request: RenderRequest, *, max_chars: int) -> str:
    """The prompt of a conversation.

    Args:
        request: what to render.
        max_chars: the longest prompt, in characters.

    Raises:
        InvalidRequest: the messages are not of OpenAI's form, or the template refuses them.
        ChatTemplateError: the template does not compile, fails, or makes too long a prompt.
    """
    compiled = compile_template(request.source)
    if request.messages is None:
        return ""
    messages = compiled.forms.fitted(checked_messages(request.messages))
    if not request.continue_final_message:
        return _text(compiled.template, {**request.variables, "messages": messages}, max_chars)
    last, text = _marked(messages[-1])
    prompt = _text(compiled.template, {**request.variables, "messages": [*messages[:-1], last]}, max_chars)
    end = prompt.rfind(_END.strip())
    if end < 0 or text.strip() not in prompt:
        raise InvalidRequest(
            "continue_final_message: the template does not show the last message's text", field="messages"
        )
    # A template that trims has removed the mark's blank, and would have removed the text's.
    return prompt[:end] if prompt.startswith(_END, end) else prompt[:end].rstrip()


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> Compiled:
    """Raises ``ChatTemplateError``: the source is not Jinja; names the line."""
    try:
        template = chat_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise ChatTemplateError(f"chat template: does not compile ({type(error).__name__})") from error
    return Compiled(template, forms_of(template))


def _text(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    left = max_chars
    try:
        for piece in template.generate(variables):
            left -= len(piece)
            if left < 0:
                raise ChatTemplateError(f"chat template: makes more than {max_chars} characters")
            pieces.append(piece)
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # a template may fail in any way
        what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        message = " ".join(str(error).split())[:500]
        raise ChatTemplateError(f"chat template: line {_line(error)}: {what}{message}") from error
    return "".join(pieces)


def _line(error: BaseException) -> int:
    """The line of the template that failed; Jinja puts it into the traceback."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with the mark after its text, and that text."""
    content = message["content"]
    if isinstance(content, str) and content:
        return {**message, "content": content + _END}, content
    if isinstance(content, list) and content and content[-1]["text"]:
        text: str = content[-1]["text"]
        return {**message, "content": [*content[:-1], {**content[-1], "text": text + _END}]}, text
    raise InvalidRequest("continue_final_message: the last message has no text", field="messages")
