"""Ollama's API: the request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from llmjax.durations import parse_duration
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import MAX_MESSAGES
from llmjax.serve.protocol.common import ApiModel, Ints, Strings, at_most
from llmjax.serve.protocol.llama_cpp import LlamaCppSampling
from llmjax.serve.protocol.tools import MAX_TOOLS

MAX_IMAGES = 256  # of a message
OWN_TEMPLATE = "is not supported: a model's chat template is its own"

Images = Annotated[Strings, at_most(MAX_IMAGES)]
Think = bool | Literal["low", "medium", "high"]
Format = Literal["", "json"] | dict[str, Any]


def a_duration(value: str | float) -> str | float:
    """A duration as it is given; others are errors."""
    try:
        parse_duration(value)
    except ValueError:
        raise PydanticCustomError("duration", "must be a duration such as 5m, or a number of seconds") from None
    return value


class OllamaOptions(LlamaCppSampling):
    """How tokens are sampled, and how many; None: as the model's makers recommend, and not as Ollama does."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None

    # How Ollama loads and runs a model.
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    low_vram: Any = None
    vocab_only: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    embedding_only: Any = None
    penalize_newline: Any = None

    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None

    def check(self) -> None:
        """Raises ``ApiError`` for ways of sampling that there are not."""
        for name, neutral in UNSAMPLED.items():
            if (value := getattr(self, name)) is not None and value != neutral:
                raise ApiError(
                    f"`options.{name}` is not supported: tokens are chosen by temperature, top_k, top_p and min_p",
                    param=f"options.{name}",
                    code="unsupported_parameter",
                )

    def without_effect(self) -> list[str]:
        """What is given and changes nothing."""
        return [f"options.{name}" for name in UNHEEDED if getattr(self, name) is not None]


UNSAMPLED: Mapping[str, float] = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}  # with what leaves them out
UNHEEDED = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"),
    *("low_vram", "vocab_only", "f16_kv", "logits_all", "embedding_only", "penalize_newline"),
    *("mirostat_tau", "mirostat_eta"),
)


class OllamaRequest(ApiModel):
    """What requests that a model answers have in common."""

    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: Annotated[str | float, AfterValidator(a_duration)] | None = None

    @property
    def lets_go(self) -> bool:
        """Whether the model is to be unloaded."""
        return self.keep_alive is not None and parse_duration(self.keep_alive) == 0

    def without_effect(self) -> list[str]:
        """What is given and changes nothing: the only model stays loaded, whatever is asked."""
        options = [] if self.options is None else self.options.without_effect()
        return [*options, *(["keep_alive"] if self.keep_alive is not None else []), *self.unheeded_hints()]


class OllamaGenerating(OllamaRequest):
    """What requests that generate have in common."""

    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    truncate: bool | None = None
    shift: bool | None = None

    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {"truncate": (False,), "shift": (False,)}
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"logprobs": (False,), "top_logprobs": (0,)}
    reasons: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("logprobs", "top_logprobs"), "is not supported here; /v1/chat/completions has log-probabilities"
    )

    @property
    def streams(self) -> bool:
        """Whether the answer comes in pieces, as it does unless a request says otherwise."""
        return self.stream is not False


class OllamaMessage(ApiModel):
    """One turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaGenerating):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaGenerating):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Ints | None = None
    raw: bool | None = None
    images: Images | None = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {**OllamaGenerating.neutral_values, "template": ("",)}
    reasons: ClassVar[Mapping[str, str]] = {
        **OllamaGenerating.reasons,
        "template": f"{OWN_TEMPLATE}; raw takes a prompt as it is",
    }

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes to the model as it is, without a chat's template."""
        return bool(self.raw or self.suffix)

    def check_plain(self) -> None:
        """Raises ``ApiError`` for what only a chat's template can bring into a prompt."""
        given = {"system": self.system, "images": self.images, "context": self.context, "think": self.think}
        for name, value in given.items():
            if value:
                mode = "raw" if self.raw else "suffix"
                raise ApiError(f"`{name}` cannot be combined with {mode}", param=name, code="unsupported_parameter")


class OllamaEmbedRequest(OllamaRequest):
    """POST /api/embed."""

    input: str | Strings
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsRequest(OllamaRequest):
    """POST /api/embeddings, Ollama's older route."""

    prompt: str


class OllamaNameRequest(ApiModel):
    """POST /api/show and /api/pull, DELETE /api/delete: a model by its name."""

    model: str | None = None
    name: str | None = None  # its older word
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None

    @property
    def wanted(self) -> str:
        """The name; raises ``ApiError`` where there is none."""
        if not (name := self.model or self.name):
            raise ApiError("`model` is required", param="model", code="missing_required_parameter")
        return name
