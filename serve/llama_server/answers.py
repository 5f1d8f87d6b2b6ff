"""Answers in llama-server's form: an object for each prompt, of which a stream brings the parts first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from llmjax.sampling.params import RequestOutputKind, SamplingParams
from llmjax.serve.logprobs import TokenNames, chat_logprobs
from llmjax.serve.prompts import EncodedPrompt

Data = dict[str, Any]
NO_SLOT = -1  # requests have no places of their own
RANDOM_SEED = 2**32 - 1
# What llama-server samples by beside, with the values that leave it out.
SWITCHED_OFF: Data = {
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "top_n_sigma": -1.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}


def settings_of(params: SamplingParams, *, stream: bool) -> Data:
    """How an answer is sampled, in llama-server's names."""
    form = params.structured_outputs
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": most,
        "max_tokens": most,
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1 if params.repeat_last_n is None else params.repeat_last_n,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **SWITCHED_OFF,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "n_probs": params.logprobs or 0,
        "grammar": "" if form is None else form.grammar or "",
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
    }


def timings_of(times: RequestMetrics | None, *, prompt: int, cached: int, predicted: int) -> Data:
    """Tokens, and milliseconds that they took: those of the prompt from when it was begun to the first token of the
    answer, those of the answer from there to the last one.

    Args:
        times: None: not known.
        prompt: tokens of the prompt.
        cached: how many of them were in the prefix cache.
        predicted: tokens of the answer.
    """
    begun, first, last = (
        (None,) * 3 if times is None else (times.first_scheduled_time, times.first_token_time, times.last_token_time)
    )
    return {
        "cache_n": cached,
        **_speed("prompt", prompt - cached, _milliseconds(begun, first)),
        **_speed("predicted", predicted, _milliseconds(first, last)),
    }


def _speed(name: str, tokens: int, spent: float) -> Data:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": spent,
        f"{name}_per_token_ms": spent / tokens if tokens else 0.0,
        f"{name}_per_second": 1000 * tokens / spent if spent else 0.0,
    }


def _milliseconds(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else 1000 * max(0.0, end - start)


def selected(answer: Data, fields: Sequence[str]) -> Data:
    """The fields of an answer that a request names; ``a/b`` is the field ``b`` of ``a``, which the answer gets."""
    found: Data = {}
    for path in fields:
        *outer, name = path.split("/")
        inner: Any = answer
        for step in outer:
            inner = inner.get(step) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and name in inner:
            found[name] = inner[name]
    return found


@dataclass(kw_only=True)
class AnswerWriter:
    """Turns what a model writes after one prompt into the objects of an answer.

    Args:
        index: which prompt it is.
        names: how tokens are written.
        silent: nothing is to be generated: the one token that the engine makes is not shown.
        timed: parts of a stream have times, too.
        with_tokens: the end has the answer's tokens.
        fields: those of the end that are wanted; None: all.
    """

    index: int
    model: str
    prompt: EncodedPrompt
    params: SamplingParams
    names: TokenNames
    silent: bool
    timed: bool
    with_tokens: bool
    fields: Sequence[str] | None
    tokens: int = 0
    has_new_line: bool = False

    def part(self, choice: CompletionOutput, output: RequestOutput) -> Data | None:
        """What a piece of a stream brings; None: nothing that can be shown yet."""
        if self.silent or not (choice.text or choice.token_ids):
            return None
        self._count(choice)
        head = {"index": self.index, "content": choice.text, "tokens": choice.token_ids, "stop": False}
        counts = {"tokens_predicted": self.tokens, "tokens_evaluated": len(self.prompt.token_ids)}
        shown = {**head, "id_slot": NO_SLOT, **counts, **self._probabilities(choice)}
        return {**shown, "timings": self._timings(output)} if self.timed else shown

    def whole(self, choice: CompletionOutput, output: RequestOutput) -> Data:
        """The object of an answer that comes at once."""
        if self.silent:
            return self.end(choice, output)
        self._count(choice)
        tokens = choice.token_ids if self.with_tokens else []
        probabilities = self._probabilities(choice)
        return self._end(choice, output, {"content": choice.text, "tokens": tokens, **probabilities})

    def end(self, choice: CompletionOutput, output: RequestOutput) -> Data:
        """The object that ends a stream."""
        return self._end(choice, output, {"content": "", "tokens": []})

    def _end(self, choice: CompletionOutput, output: RequestOutput, said: Data) -> Data:
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        limit = self.silent or choice.finish_reason == "length"
        answer = {
            "index": self.index,
            **said,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": self.tokens,
            "tokens_evaluated": len(self.prompt.token_ids),
            "tokens_cached": output.num_cached_tokens,
            "generation_settings": settings_of(self.params, stream=self.params.output_kind is RequestOutputKind.DELTA),
            "prompt": self.prompt.text or "",
            "has_new_line": self.has_new_line,
            "truncated": False,
            "stop_type": "limit" if limit else "word" if word else "eos",
            "stopping_word": "" if limit else word,
            "timings": self._timings(output),
        }
        return answer if self.fields is None else selected(answer, self.fields)

    def _count(self, choice: CompletionOutput) -> None:
        self.tokens += len(choice.token_ids)
        self.has_new_line = self.has_new_line or "\n" in choice.text

    def _timings(self, output: RequestOutput) -> Data:
        prompt, cached = len(self.prompt.token_ids), output.num_cached_tokens
        return timings_of(output.metrics, prompt=prompt, cached=cached, predicted=self.tokens)

    def _probabilities(self, choice: CompletionOutput) -> Data:
        if self.params.logprobs is None or not choice.logprobs:
            return {}
        ids = choice.token_ids[: len(choice.logprobs)]
        found = chat_logprobs(ids, choice.logprobs, names=self.names, top=self.params.logprobs, with_ids=True)
        return {"completion_probabilities": found["content"]}
