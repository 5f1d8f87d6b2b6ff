"""The requests of five coding agents, as they come over the wire: each writes the same session in its own way.

What these agents send was looked up in their public sources and documentation; texts are our own. Each has something at
its head, or beside it, that changes with every request.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.agents.session import Call, Session, Step, Tool

SAME = uuid.UUID("6f0c9e8e-3f0c-4f59-9d2c-0d3b7a7c5a11")  # names of calls and sessions are the same in every run


@dataclass(frozen=True, kw_only=True)
class Request:
    """An HTTP request."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


Dialect = Callable[[Session, str, int], Iterator[Request]]


def _id(prefix: str, *of: object) -> str:
    return prefix + uuid.uuid5(SAME, repr(of)).hex[:24]


def claude_code(session: Session, model: str, max_tokens: int) -> Iterator[Request]:
    """Anthropic's messages: blocks with marks of the cache, reminders in the user's turns, thoughts sent back."""
    tools = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in session.tools
    ]
    marked = {"cache_control": {"type": "ephemeral"}}
    for steps, asked, now in session.requests():
        billing = f"x-anthropic-billing-header: cc_version=2.1.{now.second}; cch={_id('', now)[:5]};"
        system = [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent for the command line.", **marked},
            {"type": "text", "text": session.rules, **marked},
        ]
        messages: list[dict[str, Any]] = []
        for i, step in enumerate(steps):
            messages += _claude_question(session, step.asked, first=not i)
            messages.append(
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": step.said},
                        *(
                            {"type": "tool_use", "id": _id("toolu_", i, j), "name": call.tool, "input": call.arguments}
                            for j, call in enumerate(step.calls)
                        ),
                    ],
                }
            )
            if step.calls:
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": _id("toolu_", i, j),
                        "content": [{"type": "text", "text": call.result}] if j else call.result,
                        "is_error": call.failed,
                    }
                    for j, call in enumerate(step.calls)
                ]
                messages.append({"role": "user", "content": results})
        messages += _claude_question(session, asked, first=not steps)
        content = messages[-1]["content"]
        messages[-1] = {**messages[-1], "content": [*content[:-1], {**content[-1], **marked}]}
        yield Request(
            path="/v1/messages?beta=true",
            headers={
                "anthropic-version": "2023-06-01",
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
                "x-app": "cli",
                "x-stainless-lang": "js",
            },
            body={
                "model": model,
                "system": system,
                "messages": messages,
                "tools": tools,
                "metadata": {"user_id": _id("user_", "claude")},
                "max_tokens": max_tokens,
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "stream": True,
            },
        )


def _claude_question(session: Session, asked: str | None, *, first: bool) -> list[dict[str, Any]]:
    if asked is None:
        return []
    reminder = (
        f"<system-reminder>\n{session.files if first else 'The list of what is left is empty.'}\n</system-reminder>"
    )
    content = [{"type": "text", "text": text} for text in (reminder, asked)]
    return [{"role": "user", "content": content}]


def codex(session: Session, model: str, max_tokens: int) -> Iterator[Request]:
    """OpenAI's Responses: nothing is stored, all items come again, and a patch is a custom tool's text."""
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "strict": False,
            "parameters": tool.schema,
        }
        for tool in session.tools
    ]
    tools.append({"type": "custom", "name": "apply_patch", "description": "Changes files.", "format": {"type": "text"}})
    for steps, asked, now in session.requests():
        context = f"<environment_context>\n  <cwd>/work</cwd>\n{session.files}\n</environment_context>"
        items = [_item("developer", "Answer in few words."), _item("user", context)]
        for i, step in enumerate(steps):
            if step.asked is not None:
                items.append(_item("user", step.asked))
            items.append(_item("assistant", step.said))
            for j, call in enumerate(step.calls):
                items += _codex_call(call, _id("call_", i, j))
        if asked is not None:
            items.append(_item("user", asked))
        yield Request(
            path="/v1/responses",
            headers={
                "originator": "codex_cli_rs",
                "session_id": _id("", "codex"),
                "x-request-id": _id("", now),
                "accept": "text/event-stream",
            },
            body={
                "model": model,
                "instructions": f"Current time: {now.isoformat(timespec='seconds')}\n{session.rules}",
                "input": items,
                "tools": tools,
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "reasoning": {"effort": "medium", "summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": _id("", "codex"),
                "text": {"verbosity": "low"},
                "max_output_tokens": max_tokens,
                "store": False,
                "stream": True,
            },
        )


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _codex_call(call: Call, id: str) -> list[dict[str, Any]]:
    if call.tool == "edit_file":
        patch = f"*** Begin Patch\n*** Update File: {call.arguments['path']}\n-{call.arguments['old']}\n*** End Patch"
        return [
            {"type": "custom_tool_call", "call_id": id, "name": "apply_patch", "input": patch},
            {"type": "custom_tool_call_output", "call_id": id, "output": call.result},
        ]
    output = json.dumps({"output": call.result, "metadata": {"exit_code": int(call.failed), "duration_seconds": 0.4}})
    return [
        {"type": "function_call", "call_id": id, "name": call.tool, "arguments": json.dumps(dict(call.arguments))},
        {"type": "function_call_output", "call_id": id, "output": output},
    ]


def opencode(session: Session, model: str, max_tokens: int) -> Iterator[Request]:
    """Chat completions of Vercel's AI SDK: two system messages, parts of text, empty contents beside calls."""
    for steps, asked, now in session.requests():
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": session.rules},
            {
                "role": "system",
                "content": f"<env>\n  Current time: {now:%a %b %d %Y %H:%M:%S}\n</env>\n{session.files}",
            },
        ]
        for i, step in enumerate(steps):
            if step.asked is not None:
                messages.append({"role": "user", "content": [{"type": "text", "text": step.asked}]})
            messages.append(_chat_answer(step, i, empty=True))
            messages += [
                {"role": "tool", "tool_call_id": _id("call_", i, j), "content": call.result}
                for j, call in enumerate(step.calls)
            ]
        if asked is not None:
            messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
        yield Request(
            path="/v1/chat/completions",
            headers={"user-agent": "ai-sdk/openai-compatible/2.0.4"},
            body={
                "model": model,
                "max_tokens": max_tokens,
                "messages": messages,
                "tools": [_function(tool) for tool in session.tools],
                "tool_choice": "auto",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


def _chat_answer(step: Step, number: int, *, empty: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if empty and step.calls else step.said}
    if step.calls:
        answer["tool_calls"] = [
            {
                "id": _id("call_", number, j),
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(dict(call.arguments))},
            }
            for j, call in enumerate(step.calls)
        ]
    return answer


def cline(session: Session, model: str, max_tokens: int) -> Iterator[Request]:
    """Chat completions without tools: they are told in the system prompt, calls are XML, results the user's words."""
    told = "\n".join(f"## {tool.name}\n{tool.description}\n{json.dumps(tool.schema)}" for tool in session.tools)
    for steps, asked, now in session.requests():
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{session.rules}\n\n# Tools\n{told}"}]
        said: list[str] = [f"<task>\n{session.files}\n</task>"]
        for i, step in enumerate(steps):
            said += [step.asked] if step.asked is not None else []
            messages.append(_cline_question(said, number=i))
            messages.append({"role": "assistant", "content": step.said + "".join(map(_as_xml, step.calls))})
            said = [f"[{call.tool}] Result:\n{call.result}" for call in step.calls]
        said += [asked] if asked is not None else []
        messages.append(_cline_question(said, number=len(steps)))
        yield Request(
            path="/v1/chat/completions",
            headers={"http-referer": "https://cline.bot", "x-title": "Cline", "x-request-id": _id("", now)},
            body={
                "model": model,
                "messages": messages,
                "temperature": 0,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )


def _cline_question(said: list[str], *, number: int) -> dict[str, Any]:
    """What the user's side says, with the time at which it was said, which stays what it was."""
    details = f"<environment_details>\n# Current Time\n9:{number % 60:02} AM\n</environment_details>"
    return {"role": "user", "content": [{"type": "text", "text": text} for text in (*said, details)]}


def _as_xml(call: Call) -> str:
    inner = "".join(f"<{name}>{value}</{name}>\n" for name, value in call.arguments.items())
    return f"\n\n<{call.tool}>\n{inner}</{call.tool}>"


def aider(session: Session, model: str, max_tokens: int) -> Iterator[Request]:
    """Chat completions without tools: an example, the map of the repository and the files, and a reminder at the end,
    after the newest question each time."""
    ready = "Ok, any changes I propose will be to those files."
    for steps, asked, now in session.requests():
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"Current time: {now:%Y-%m-%d %H:%M:%S}\n{session.rules}"},
            {"role": "user", "content": "Change get_factorial() to use math.factorial"},
            {"role": "assistant", "content": "```python\n<<<<<<< SEARCH\n=======\nimport math\n>>>>>>> REPLACE\n```"},
            {"role": "user", "content": f"Here are summaries of some files:\n\n{session.files}"},
            {"role": "assistant", "content": ready},
        ]
        for step in steps:
            results = "\n".join(call.result for call in step.calls)
            messages.append({"role": "user", "content": step.asked or "Go on."})
            messages.append({"role": "assistant", "content": step.said})
            if results:
                messages += [{"role": "user", "content": results}, {"role": "assistant", "content": "Ok."}]
        messages.append({"role": "user", "content": asked or "Go on."})
        messages.append({"role": "system", "content": "Use blocks of SEARCH and REPLACE."})
        yield Request(
            path="/v1/chat/completions",
            headers={"user-agent": "OpenAI/Python 2.8.0", "x-title": "Aider", "date": _http_date(now)},
            body={
                "model": model,
                "messages": messages,
                "temperature": 0,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )


def _http_date(now: datetime) -> str:
    return now.strftime("%a, %d %b %Y %H:%M:%S GMT")


DIALECTS: Mapping[str, Dialect] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "cline": cline,
    "aider": aider,
}
