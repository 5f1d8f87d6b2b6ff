"""Perplexity of a text, scored by the engine's own step.

Perplexity is ``exp`` of the mean negative log-probability of the scored tokens. Which tokens are scored, and after how
much text, changes the figure, so there are two conventions, those of the tools that publish such figures:

* halves (the default, llama.cpp's ``llama-perplexity``): disjoint windows of ``context`` tokens, of which the second
  half is scored; where the tokenizer begins texts with BOS, so does every window, in place of its first token. What is
  left at the end and fills no window is not scored.
* stride (Hugging Face, "Perplexity of fixed-length models"): windows of ``context`` tokens begin ``stride`` tokens
  apart, each scores the tokens that no window before it held. With ``stride`` below ``context`` every token but the
  first is scored once; with ``stride`` equal to it, the first token of every window is not. BOS begins the text alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmjax.config import setting
from llmjax.engine.clients.inline import InlineEngine
from llmjax.engine.clients.waited import WaitedEngine
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.errors import ConfigError
from llmjax.sampling.params import SamplingParams
from llmjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """A stretch of text that the model sees at once.

    Attributes:
        token_ids: what it sees.
        first_scored: index of the first token whose log-probability counts; all after it count too.
    """

    token_ids: list[int]
    first_scored: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


@dataclass(frozen=True, kw_only=True)
class Windowing:
    """How a text is cut into windows; see the module.

    Raises:
        ConfigError: a number is out of range.
    """

    context: int = setting(512, "tokens that the model sees at once", unit="tokens", section="windows")
    stride: int | None = setting(
        None,
        "windows begin this many tokens apart and score what is new, as Hugging Face does "
        "(default: disjoint windows, second half scored, as llama.cpp does)",
        unit="tokens",
    )
    max_tokens: int | None = setting(None, "use the first N tokens of the text (default: all)", unit="tokens")

    def __post_init__(self) -> None:
        least = 3 if self.stride is None else 2  # so that at least one token is scored
        if self.context < least:
            raise ConfigError(f"context must be at least {least}, not {self.context}")
        if self.stride is not None and not 1 <= self.stride <= self.context:
            raise ConfigError(f"stride must lie in [1, {self.context}] (the context), not {self.stride}")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"max_tokens must be at least 2, not {self.max_tokens}")

    def describe(self) -> str:
        """The convention in words."""
        if self.stride is None:
            return f"windows of {self.context} tokens, second half scored (as llama-perplexity)"
        return f"windows of {self.context} tokens, {self.stride} apart, new tokens scored (as Hugging Face)"

    def cut(self, token_ids: Sequence[int], *, bos: int | None) -> list[Window]:
        """The windows of a text.

        Args:
            token_ids: token ids of the text, without special tokens.
            bos: the token that texts begin with; None: there is none.

        Raises:
            ConfigError: the text is too short for one window.
        """
        used = list(token_ids[: self.max_tokens])
        ids = used if bos is None else [bos, *used]
        windows = self._halves(ids, bos) if self.stride is None else self._strided(ids, self.stride)
        if not windows:
            needed = self.context if self.stride is None else 2
            raise ConfigError(f"the text has {len(ids)} tokens, which fill no window of {needed}: use more text")
        return windows

    def _halves(self, ids: list[int], bos: int | None) -> list[Window]:
        windows = []
        for start in range(0, len(ids) - self.context + 1, self.context):
            window = ids[start : start + self.context]
            if bos is not None:
                window[0] = bos
            # llama.cpp scores what is predicted at positions context/2 … context-2.
            windows.append(Window(window, self.context // 2 + 1))
        return windows

    def _strided(self, ids: list[int], stride: int) -> list[Window]:
        windows, seen = [], 0
        for start in range(0, len(ids), stride):
            stop = min(start + self.context, len(ids))
            first = max(seen - start, 1)  # nothing predicts a window's own first token
            if first < stop - start:
                windows.append(Window(ids[start:stop], first))
            seen = stop
            if stop == len(ids):
                break
        return windows


@dataclass
class Perplexity:
    """Sums over the tokens scored so far.

    Attributes:
        num_tokens: scored tokens.
        num_windows: windows that they come from.
        nll: sum of their negative log-probabilities, in nats.
        nll_squares: sum of the squares of these.
    """

    num_tokens: int = 0
    num_windows: int = 0
    nll: float = 0.0
    nll_squares: float = 0.0

    def add(self, logprobs: npt.NDArray[np.float64]) -> None:
        """Counts a window's scored tokens [n]."""
        self.num_tokens += logprobs.size
        self.num_windows += 1
        self.nll -= float(logprobs.sum())
        self.nll_squares += float(np.square(logprobs).sum())

    @property
    def mean_nll(self) -> float:
        """Nats a token."""
        return self.nll / self.num_tokens

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def standard_error(self) -> float:
        """Standard error of ``value`` as in llama.cpp (independent tokens): value * sqrt(var(nll) / (tokens - 1))."""
        if self.num_tokens < 2:
            return math.inf
        variance = self.nll_squares / self.num_tokens - self.mean_nll**2
        return self.value * math.sqrt(max(variance, 0.0) / (self.num_tokens - 1))


def text_tokens(tokenizer: Tokenizer, text: str) -> tuple[list[int], int | None]:
    """Token ids of a text as plain text, and the BOS that the tokenizer would put before them, if it would."""
    start = tokenizer.encode("a")[:1]
    bos = start[0] if start == [tokenizer.bos_token_id] else None
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False), bos


def score_windows(engine: InlineEngine | WaitedEngine, windows: Sequence[Window]) -> Iterator[npt.NDArray[np.float64]]:
    """Log-probabilities f64 [scored] of each window's scored tokens, in the order in which windows finish.

    Only a few windows are in the engine at a time. The values are those of ``prompt_logprobs``: log-softmax in f32 of
    the logits that the engine's step computes, prefill chunks included.

    Raises:
        ConfigError: a window is longer than the engine's context.
    """
    longest = max((len(window.token_ids) for window in windows), default=0)
    if longest > engine.info.max_model_len:
        raise ConfigError(
            f"windows of {longest} tokens do not fit this model's context of {engine.info.max_model_len}: "
            "lower --context"
        )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    waiting = iter(windows)
    running: dict[int, Window] = {}
    in_flight = 2 * engine.info.max_num_seqs  # a step's windows, and the next step's
    try:
        while True:
            for window in itertools.islice(waiting, in_flight - len(running)):
                request = _request(engine.new_id(), window, params)
                running[request.request_id] = window
                engine.submit(request)
            if not running:
                return
            for output in engine.outputs():
                if output.error is not None:
                    raise output.error
                if output.finish_reason is not None:
                    yield _scored(running.pop(output.request_id), output)
    finally:
        for request_id in running:
            engine.abort(request_id)


def _request(request_id: int, window: Window, params: SamplingParams) -> EngineRequest:
    # The token sampled at the end is never fed back, so a window may be as long as the engine's context.
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=window.token_ids,
        params=params,
        max_tokens=1,
        stop_token_ids=frozenset(),
    )


def _scored(window: Window, output: EngineOutput) -> npt.NDArray[np.float64]:
    entries = (output.prompt_logprobs or [])[window.first_scored :]
    tokens = window.token_ids[window.first_scored :]
    return np.array([entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry is not None])
