"""What a call of a tool brings, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONNECTION_CLOSED, TIMED_OUT, INVALID_PARAMS = -32000, -32001, -32602  # codes of MCP and of JSON-RPC


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """The end of a call: one of the two.

    Args:
        output: what the tool says.
        error: why there is nothing, in OpenAI's form.
    """

    output: str | None = None
    error: dict[str, Any] | None = None


def refused(code: int, message: str) -> CallResult:
    """A call that did not come to the tool, or did not come back."""
    return CallResult(error={"type": "mcp_protocol_error", "code": code, "message": message})


def tool_failed(text: str) -> CallResult:
    """A call that the tool itself says has failed."""
    return CallResult(error={"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]})


def error_text(error: Any) -> str:
    """What a model is told of an error in OpenAI's form, or of one that is a text, as older clients have it."""
    if not isinstance(error, dict):
        return f"Error: {error}"
    content = error.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return f"Error: {content or error.get('message', 'the call failed')}"


def cut_to(text: str, *, most: int) -> str:
    """A text of at most ``most`` bytes in UTF-8, with a note where it has been cut, and ``?`` for half characters."""
    written = text.encode(errors="replace")
    if len(written) <= most:
        return written.decode()
    return f"{written[:most].decode(errors='ignore')}\n[cut here: {len(written)} bytes, of which {most} are shown]"
