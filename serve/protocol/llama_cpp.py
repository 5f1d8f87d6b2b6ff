"""How tokens are sampled in llama.cpp's words, and what else clients of llama-server send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.common import AS_MANY_AS_FIT, ApiModel, GenerationRequest, Strings

OTHER_SAMPLERS = "is not supported: tokens are chosen by temperature, top_k, top_p and min_p"

# By the name of a sampler that `samplers` may leave out: the fields that it reads, with values that switch it off.
SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
LETTERS: Mapping[str, str] = {"k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature", "e": "penalties"}


def switched_off(samplers: Sequence[str] | None) -> dict[str, float]:
    """The fields of samplers that a request leaves out, with values that switch them off; None: it leaves out none."""
    if samplers is None:
        return {}
    return {name: value for one, off in SAMPLERS.items() if one not in samplers for name, value in off.items()}


def _spelled(value: Any) -> Any:
    """Names of samplers, of a text that has a letter for each."""
    return [LETTERS.get(letter, letter) for letter in value] if isinstance(value, str) else value


Samplers = Annotated[Strings, BeforeValidator(_spelled)]


class LlamaCppSampling(ApiModel):
    """Fields of sampling; None: as the model's makers recommend, and not as llama.cpp does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class LlamaCppOthers(ApiModel):
    """Fields of llama-server's that have no effect, or must not ask for one."""

    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_indent: Any = None
    n_cache_reuse: Any = None
    min_keep: Any = None
    t_max_prompt_ms: Any = None
    t_max_predict_ms: Any = None
    return_progress: Any = None
    sse_ping_interval: Any = None
    backend_sampling: Any = None
    dynatemp_exponent: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    xtc_threshold: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    adaptive_decay: Any = None

    typical_p: Any = None
    typ_p: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    top_n_sigma: Any = None
    mirostat: Any = None
    adaptive_target: Any = None
    post_sampling_probs: Any = None


HINTS: Mapping[str, tuple[Any, ...]] = {
    "id_slot": (-1,),
    **dict.fromkeys(("n_keep", "n_discard", "n_indent", "n_cache_reuse", "min_keep"), (0,)),
    **dict.fromkeys(("t_max_prompt_ms", "t_max_predict_ms"), (0,)),
    **dict.fromkeys(("return_progress", "backend_sampling"), (False,)),
    "sse_ping_interval": (),
    **dict.fromkeys(("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n"), ()),
    **dict.fromkeys(("dry_sequence_breakers", "xtc_threshold", "mirostat_tau", "mirostat_eta"), ()),
    "adaptive_decay": (),
}
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "typ_p"), (1, 1.0)),
    **dict.fromkeys(("dynatemp_range", "dry_multiplier", "xtc_probability"), (0, 0.0)),
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), (-1, -1.0)),
    "mirostat": (0,),
    "post_sampling_probs": (False,),
}
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("typical_p", "typ_p", "dynatemp_range", "dry_multiplier", "xtc_probability"), OTHER_SAMPLERS),
    **dict.fromkeys(("top_n_sigma", "adaptive_target", "mirostat"), OTHER_SAMPLERS),
    "post_sampling_probs": "is not supported: n_probs gives log-probabilities of the model",
}


OWN_WORDS: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
}


class LlamaCppGeneration(GenerationRequest, LlamaCppOthers):
    """A request of OpenAI's API that may say things in llama-server's words, as its clients do there, too."""

    n_predict: Annotated[int, Field(ge=-2)] | None = None
    repeat_penalty: float | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    samplers: Samplers | None = None

    timings_per_token: Any = None
    return_tokens: Any = None
    response_fields: Any = None
    n_probs: Any = None
    reasoning_format: Any = None
    parse_tool_calls: Any = None

    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **HINTS,
        **dict.fromkeys(("timings_per_token", "return_tokens"), (False,)),
        "response_fields": ([],),
    }
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral_values,
        **NEUTRAL_VALUES,
        "n_probs": (0,),
        "reasoning_format": ("auto", "deepseek", "deepseek-legacy"),
        "parse_tool_calls": (True,),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.reasons,
        **REASONS,
        **dict.fromkeys(("n_probs", "post_sampling_probs"), "is not supported here; logprobs gives log-probabilities"),
        "reasoning_format": "is not supported; start the server without a reasoning parser, or leave it out",
        "parse_tool_calls": "is not supported; start the server without a tool parser, or leave it out",
    }

    @property
    def llama_names(self) -> dict[str, str]:
        """The request's names of fields, by those that are known elsewhere, for errors."""
        return {ours: theirs for theirs, ours in OWN_WORDS.items() if getattr(self, theirs) is not None}

    @model_validator(mode="after")
    def _in_own_words(self) -> Self:
        for theirs, ours in OWN_WORDS.items():
            value = getattr(self, theirs)
            if value in (None, "", {}):
                continue
            if getattr(self, ours) is not None:
                raise ApiError(f"`{theirs}` is {ours}; give one of them", param=theirs, code="invalid_value")
            setattr(self, ours, max(value, AS_MANY_AS_FIT) if theirs == "n_predict" else value)
        if self.cache_prompt is False:
            self.skip_reading_prefix_cache = True
        for name, value in switched_off(self.samplers).items():
            setattr(self, OWN_WORDS.get(name, name), value)
        return self
