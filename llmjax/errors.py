"""The errors llmjax raises on purpose. Each says what is wrong and where in one line, and what to do."""

from __future__ import annotations

PREFIX, HINT = "llmjax: error: ", "  hint: "


class LLMJaxError(Exception):
    """Base of every deliberate error; command-line tools print it without a traceback.

    Args:
        message: what is wrong, and where, in one line.
        hint: what to do, where the message does not say it; command-line tools give it a line of its own.
    """

    hint: str = ""

    def __init__(self, *message: object, hint: str = "") -> None:
        super().__init__(*message)
        if hint:
            self.hint = hint

    @property
    def message(self) -> str:
        """What is wrong, without the hint."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(LLMJaxError):
    """A setting is unknown, out of range or contradicts another."""


class CheckpointError(LLMJaxError):
    """A model cannot be found, read or mapped; the message names the file, key or tensor."""


class TokenizerError(LLMJaxError):
    """A tokenizer or chat template cannot be loaded or rendered."""


class CompileError(LLMJaxError):
    """XLA refuses the program of an engine step; the cause is what it raised."""


class InvalidRequest(LLMJaxError, ValueError):
    """A request asks for something impossible or unsupported.

    Args:
        message: one line for the user.
        field: the request field at fault, or None when no single field is.
        hint: what to do.
    """

    def __init__(self, message: str, *, field: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class UnknownAdapter(InvalidRequest):
    """No adapter has the name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The lora adapter '{name[:200]}' cannot be found.", field="lora_name")


class PromptTooLong(InvalidRequest):
    """A prompt has more tokens than the context can hold.

    Args:
        message: one line for the user.
        field: the request field that the prompt came in.
        tokens: how many it has, or has at least.
        limit: how many it may have.
    """

    def __init__(self, message: str, *, field: str | None = None, tokens: int, limit: int) -> None:
        super().__init__(message, field=field)
        self.tokens = tokens
        self.limit = limit


class ChatTemplateError(InvalidRequest, TokenizerError):
    """A chat template does not compile, fails, or takes too much time or memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="chat_template")


class QueueFull(LLMJaxError):
    """The engine accepts no more requests now.

    Args:
        message: one line for the user.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Asleep(LLMJaxError):
    """The engine sleeps; nothing is computed before it is woken."""

    def __init__(self, message: str = "the model sleeps; it has to be woken first (wake_up)") -> None:
        super().__init__(message)


class ModelUnavailable(LLMJaxError):
    """A model of several is not loaded, and cannot be now; the others go on.

    Args:
        message: one line for the user.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 30.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GenerationFailed(LLMJaxError):
    """A request ended inside the engine by no fault of its own; others go on."""


class EngineDead(LLMJaxError):
    """The engine loop has stopped; no request can be served any more."""


def written(error: LLMJaxError) -> str:
    """An error as command-line tools print it: a line, and a line with what to do."""
    return f"{PREFIX}{error.message}" + (f"\n{HINT}{error.hint}" if error.hint else "")


def last_error(output: str, status: int | None) -> tuple[str, str]:
    """Why a program has ended that was to go on: the message and the hint that it printed last.

    Args:
        output: what it has printed.
        status: its exit status, which is all that is known where it has printed nothing.
    """
    lines = output.strip().splitlines() or [f"exit status {status}"]
    hint = lines.pop().removeprefix(HINT) if lines[-1].startswith(HINT) and len(lines) > 1 else ""
    return lines[-1].removeprefix(PREFIX), hint
