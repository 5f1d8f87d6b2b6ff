"""The text side of the engine: prompts to token requests, token outputs to text. Runs where the caller runs."""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes, Vectors
from llmjax.engine.core.stats import RequestStats
from llmjax.engine.front.beam_search import MAX_BEAM_TOKENS, BeamSearch
from llmjax.engine.front.pairs import PairPrompts, TextPair
from llmjax.engine.front.stop import StopMatcher
from llmjax.engine.front.vectors import PooledTokens, finished, pooled_request, task_of
from llmjax.engine.info import EngineInfo
from llmjax.errors import GenerationFailed, InvalidRequest, LLMJaxError, PromptTooLong
from llmjax.outputs import (
    REPETITION,
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from llmjax.parsing.content import ContentReading
from llmjax.pooling_params import PoolingParams
from llmjax.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from llmjax.sampling.settings import request_sampling
from llmjax.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from llmjax.constraints.compiler import GrammarCompiler
    from llmjax.sampling.structured import StructuredOutputsParams
    from llmjax.turns import Turn

# A string, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt".
PromptInput = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
# vLLM's, for models that read more than text; here there are none yet.
UNSUPPORTED_PROMPT_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"})


@dataclass
class _Continuation:
    """What has been said so far in one of the n continuations."""

    index: int
    detokenizer: IncrementalDetokenizer | None
    stop: StopMatcher
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    times: SequenceTimes | None = None
    text_seen: int = 0  # characters, with those that a stop string keeps back or has swallowed
    token_starts: list[int] = field(default_factory=list)  # characters before each token, where the text may end it
    text_sent: int = 0  # for DELTA
    tokens_sent: int = 0
    tokens_due: int = 0  # when there was an output last, with ``stream_interval``

    @property
    def num_shown(self) -> int:
        """Tokens whose text has begun to be shown, or will not be kept back any longer."""
        return bisect_left(self.token_starts, len(self.text)) if self.token_starts else len(self.token_ids)

    def cut(self, end: int) -> None:
        """Leaves out the tokens that begin behind so many characters."""
        keep = bisect_left(self.token_starts, end)
        del self.token_ids[keep:], self.token_starts[keep:]
        if self.logprobs is not None:
            del self.logprobs[keep:]
            scored = zip(self.token_ids, self.logprobs, strict=True)
            self.cumulative_logprob = sum((entry[token].logprob for token, entry in scored), 0.0)

    def is_due(self, interval: int) -> bool:
        """Whether as many tokens are new since the last output; the first and the last are at once."""
        known = len(self.token_ids)
        due = self.finish_reason is not None or not self.tokens_due or known - self.tokens_due >= interval
        if due:
            self.tokens_due = known
        return due

    def output(self, *, delta: bool) -> CompletionOutput:
        """A snapshot, or only what is new since the last one: tokens come with their text."""
        text, tokens, logprobs = self.text, self.token_ids, self.logprobs
        if delta:
            end = self.num_shown if self.finish_reason is None else len(tokens)
            text, tokens = text[self.text_sent :], tokens[self.tokens_sent : end]
            logprobs = logprobs[self.tokens_sent : end] if logprobs is not None else None
            self.text_sent, self.tokens_sent = len(self.text), end
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(tokens),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=list(logprobs) if logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class _Open:
    """A request that has not ended."""

    name: str  # its user's id
    request: EngineRequest
    prompt: str | None
    continuations: list[_Continuation]
    engine: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: LLMJaxError | None = None
    pooling: PoolingParams | None = None
    vectors: Vectors | None = None

    @property
    def num_unfinished(self) -> int:
        return sum(c.finish_reason is None for c in self.continuations)


@dataclass(frozen=True)
class Constraint:
    """What outputs must match: a grammar, and a matcher at its beginning."""

    grammar: str
    matcher: LLMatcher


@dataclass(frozen=True)
class Processed:
    """What a batch of engine outputs means for the callers."""

    outputs: list[RequestOutput | PoolingRequestOutput]
    aborts: list[tuple[int, int]]  # continuations that a stop string ended: the engine must be told
    finished: list[RequestStats]


class Frontend:
    """Checks and tokenizes prompts, detokenizes outputs, finds stop strings.

    Args:
        config: limits and policies.
        info: of the engine that the requests are for.
        new_id: makes that engine's ids of requests; the ids that users give are known here alone.
        tokenizer: None: token ids in, token ids out.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: EngineInfo,
        new_id: Callable[[], int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config = config
        self.tokenizer = tokenizer
        self._new_id = new_id
        self._vocab_size = info.vocab_size
        self._max_model_len = info.max_model_len
        self._pooler = info.pooler
        self._pairs = None
        if tokenizer is not None and info.pooler is not None:
            self._pairs = PairPrompts.of(tokenizer, info.pooler, chosen=config.chat_template is not None)
        self._eos = info.eos_token_ids | (tokenizer.eos_token_ids if tokenizer is not None else frozenset())
        # The likely tokens of one position are likely in the next, too.
        self._text_of = functools.cache(self._decode)
        self._open: dict[int, _Open] = {}
        self._names: dict[str, int] = {}
        self._num_unfinished = 0

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler | None:
        if self.tokenizer is None:
            return None
        from llmjax.constraints.compiler import GrammarCompiler  # no start needs it

        return GrammarCompiler(self.tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def renders_pairs(self) -> bool:
        """Whether pairs of texts go through a template, which another process renders."""
        return self._pairs is not None and self._pairs.template is not None

    @property
    def num_unfinished(self) -> int:
        """Continuations that have not ended."""
        return self._num_unfinished

    def open(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        name: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        shown: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        thinking: ThinkingBudget | None = None,
        reading: ContentReading | None = None,
    ) -> EngineRequest:
        """Checks a request and remembers it.

        Args:
            name: its user's id; no other open request may have it.
            shown: special tokens that are part of the text even where others are left out.
            constraint: of these parameters, where `constraint` has been asked for it before.
            thinking: how long outputs may reason; None: for as long as they like.
            reading: which text is content, where stop strings are looked for; None: all of it.

        Returns:
            What to send to the engine.

        Raises:
            InvalidRequest: the request cannot be served; ``field`` names the reason.
        """
        arrival = time.monotonic()
        self._check_new(name, priority)
        self._check_generates()
        text, token_ids = self._tokens(prompt)
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_salt = _salt(prompt["cache_salt"], cache_salt)
        params = self._expanded(params)
        self._check(token_ids, params)
        room = self._max_model_len - len(token_ids)
        bad_words = self._bad_words(params.bad_words)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        # Resolved again by the engine for each continuation's seed; here for its errors.
        request_sampling(params, vocab_size=self._vocab_size, seed=0, eos_ids=stops, bad_words=bad_words)
        constraint = constraint or self.constraint(params)
        request = EngineRequest(
            request_id=self._new_id(),
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=stops,
            bad_words_token_ids=bad_words,
            grammar=None if constraint is None else constraint.grammar,
            matcher=None if constraint is None else constraint.matcher,
            thinking=thinking,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival,
        )
        continuations = [self._continuation(index, request, shown, reading) for index in range(params.n)]
        self._open[request.request_id] = _Open(name=name, request=request, prompt=text, continuations=continuations)
        self._names[name] = request.request_id
        self._num_unfinished += params.n
        return request

    def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        keep_logprobs: bool = True,
    ) -> BeamSearch:
        """Checks a search and begins it; arguments and errors as for `open`.

        Args:
            keep_logprobs: so that what is found has them.
        """
        self._check_generates()
        _, token_ids = self._tokens(prompt)
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_salt = _salt(prompt["cache_salt"], cache_salt)
        if params.candidates > self._config.max_logprobs:
            raise InvalidRequest(
                f"a beam_width of {params.beam_width} needs the log-probabilities of {params.candidates} tokens; the "
                f"server gives at most {self._config.max_logprobs} (--max-logprobs)",
                field="beam_width",
            )
        self._check(token_ids, SamplingParams())
        max_tokens = min(params.max_tokens, self._max_model_len - len(token_ids))
        if max_tokens * params.beam_width > MAX_BEAM_TOKENS:
            raise InvalidRequest(
                f"a search of {params.beam_width} beams may have at most {MAX_BEAM_TOKENS // params.beam_width} "
                f"max_tokens, not {max_tokens}",
                field="max_tokens",
            )
        return BeamSearch(
            token_ids,
            params,
            max_tokens=max_tokens,
            eos=self._eos,
            keep_logprobs=keep_logprobs,
            cache_salt=cache_salt,
        )

    def continued(self, prompt_ids: list[int], token_ids: list[int], **options: Any) -> str:
        """The text of tokens behind a prompt.

        Args:
            options: of ``Tokenizer.detokenizer``.
        """
        assert self.tokenizer is not None
        detokenizer = self.tokenizer.detokenizer(prompt_ids=prompt_ids, **options)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def sent(self, request_id: int, *, engine: int) -> None:
        """The open request went to the engine of that number."""
        if (found := self._open.get(request_id)) is not None:
            found.engine = engine

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What ``structured_outputs`` demands; None: nothing. Any thread may ask, and it may take seconds.

        Raises:
            InvalidRequest: its form is wrong, or takes too much.
        """
        form = params.structured_outputs
        return None if form is None else self.constraint_of(form, self.known_constraint(form)[0])

    def known_constraint(self, form: StructuredOutputsParams) -> tuple[str, Constraint | None]:
        """A form's grammar, and the constraint if it was asked for lately; errors as of ``constraint``. Any thread may
        ask; nothing is compiled."""
        if self._grammars is None:
            raise InvalidRequest(f"{form.field} needs a tokenizer", field=form.field)
        grammar = self._grammars.grammar(form)
        matcher = self._grammars.known(grammar, field=form.field)
        return grammar, None if matcher is None else Constraint(grammar, matcher)

    def constraint_of(self, form: StructuredOutputsParams, grammar: str, turn: Turn | None = None) -> Constraint:
        """The constraint of a form's grammar; errors as of ``constraint``.

        Args:
            turn: is told if it takes long; what it raises ends this.
        """
        assert self._grammars is not None
        return Constraint(grammar, self._grammars.matcher(grammar, field=form.field, turn=turn))

    def open_pooling(
        self,
        prompt: PromptInput | TextPair | PooledTokens,
        params: PoolingParams,
        name: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> EngineRequest:
        """Checks a request for a vector and remembers it; arguments, result and errors as for `open` and
        `pooled_tokens`."""
        arrival = time.monotonic()
        self._check_new(name, priority)
        tokens = self.pooled_tokens(prompt, params, add_special_tokens=add_special_tokens)
        assert self._pooler is not None
        request = EngineRequest(
            request_id=self._new_id(),
            prompt_token_ids=tokens.token_ids,
            params=SamplingParams(max_tokens=1),
            max_tokens=1,
            stop_token_ids=frozenset(),
            pooling=pooled_request(tokens, self._pooler),
            priority=priority,
            cache_salt=cache_salt if tokens.cache_salt is None else _salt(tokens.cache_salt, cache_salt),
            arrival_time=arrival,
        )
        continuation = _Continuation(index=0, detokenizer=None, stop=StopMatcher((), include=False))
        self._open[request.request_id] = _Open(
            name=name, request=request, prompt=None, continuations=[continuation], pooling=params
        )
        self._names[name] = request.request_id
        self._num_unfinished += 1
        return request

    def pooled_tokens(
        self,
        prompt: PromptInput | TextPair | PooledTokens,
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
    ) -> PooledTokens:
        """What the engine reads where a vector is asked for, checked. Any thread may ask.

        Args:
            add_special_tokens: those that the tokenizer puts around a text, and between those of a pair.

        Raises:
            InvalidRequest: the model is not made for it, there is no tokenizer or no such prompt, or a text is longer
                than the model takes.
        """
        if isinstance(prompt, PooledTokens):
            return prompt
        if self._pooler is None:
            raise InvalidRequest("this model generates text; it makes no vectors of texts (--runner pooling)")
        task = task_of(params, self._pooler)
        keep = params.truncate_prompt_tokens
        limit = self._max_model_len if keep == -1 else keep
        if limit is not None and limit > self._max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {limit}, above the {self._max_model_len} tokens that the model takes",
                field="truncate_prompt_tokens",
            )
        salt = None
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            salt = prompt.get("cache_salt")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", "")
        if isinstance(prompt, str | TextPair):
            token_ids, second_start = self._text_tokens(
                prompt, params, limit=limit, add_special_tokens=add_special_tokens
            )
        else:
            token_ids, second_start = _ids(prompt)[:limit], None
        self._check_ids(token_ids)
        if len(token_ids) > self._max_model_len:
            raise PromptTooLong(
                f"the text has {len(token_ids)} tokens; this model takes at most {self._max_model_len} "
                "(truncate_prompt_tokens: -1 leaves the rest out)",
                field="prompt",
                tokens=len(token_ids),
                limit=self._max_model_len,
            )
        return PooledTokens(task, token_ids, second_start, salt)

    def _text_tokens(
        self, prompt: str | TextPair, params: PoolingParams, *, limit: int | None, add_special_tokens: bool
    ) -> tuple[list[int], int | None]:
        """Token ids of a text or a pair, ``limit`` of them at most, and where the second text begins."""
        assert self._pooler is not None
        if self.tokenizer is None:
            raise InvalidRequest("there is no tokenizer: give token ids instead of text", field="prompt")
        texts = [prompt.first, prompt.second] if isinstance(prompt, TextPair) else [self._prompted(prompt, params)]
        if self._pooler.lowercase:
            texts = [text.lower() for text in texts]
        if limit is None:
            for text in texts:
                self.tokenizer.check_length(text, max_tokens=self._max_model_len)
        if not isinstance(prompt, TextPair):
            return self.tokenizer.encode_texts(*texts, limit=limit, add_special_tokens=add_special_tokens)
        assert self._pairs is not None
        pair = replace(prompt, first=texts[0], second=texts[1])
        return self._pairs.tokens(pair, limit=limit, add_special_tokens=add_special_tokens)

    def _prompted(self, text: str, params: PoolingParams) -> str:
        """A text behind the model's prompt for it."""
        assert self._pooler is not None
        name = self._pooler.default_prompt if params.prompt_name is None else params.prompt_name
        if name is None:
            return text
        if name not in self._pooler.prompts:
            known = ", ".join(sorted(self._pooler.prompts)) or "none"
            raise InvalidRequest(f"the model has no prompt {name[:80]!r}; it has: {known}", field="prompt_name")
        return self._pooler.prompts[name] + text

    def _check_new(self, name: str, priority: int) -> None:
        if name in self._names:
            raise InvalidRequest(f"request id {name!r} is in use", field="request_id")
        if priority and self._config.scheduling_policy != "priority":
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", field="priority")

    def _check_generates(self) -> None:
        if self._pooler is not None:
            does = "makes embeddings" if self._pooler.task == "embed" else "classifies texts"
            raise InvalidRequest(f"this model {does}; it does not generate text")

    def id_of(self, name: str) -> int | None:
        """The engine's id of the open request that its user calls so."""
        return self._names.get(name)

    def names(self, request_ids: Iterable[int]) -> list[str]:
        """What their users call these requests, those that are open."""
        return [self._open[request_id].name for request_id in request_ids if request_id in self._open]

    def forget(self, request_id: int) -> RequestStats | None:
        """Drops a request whose outputs nobody wants; returns its statistics if it was open."""
        if request_id not in self._open:
            return None
        found = self._close(request_id)
        self._num_unfinished -= found.num_unfinished
        return _stats(found)

    def process(self, engine_outputs: Iterable[EngineOutput]) -> Processed:
        """Turns what the engine brought into request outputs. Outputs of forgotten requests are dropped.

        Log-probabilities of prompts come as the engine has them, see ``decoded``.
        """
        touched: dict[int, dict[int, _Continuation]] = {}
        aborts = []
        for output in engine_outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue  # forgotten
            continuation = request.continuations[output.index]
            if continuation.finish_reason is not None:
                continue  # the engine was one step ahead of a stop string
            self._take(request, continuation, output)
            self._num_unfinished -= continuation.finish_reason is not None
            if continuation.stop.end is not None and output.finish_reason is None:
                aborts.append((output.request_id, output.index))
            touched.setdefault(output.request_id, {})[output.index] = continuation
        outputs, finished = [], []
        for request_id, continuations in touched.items():
            request = self._open[request_id]
            if (made := self._request_output(request, list(continuations.values()))) is not None:
                outputs.append(made)
            if not request.num_unfinished:
                finished.append(_stats(self._close(request_id)))
        return Processed(outputs=outputs, aborts=aborts, finished=finished)

    def _close(self, request_id: int) -> _Open:
        found = self._open.pop(request_id)
        del self._names[found.name]
        return found

    def _tokens(self, prompt: PromptInput) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", field="prompt")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.encode(prompt)
        return None, _ids(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Any thread may ask.

        Raises:
            InvalidRequest: there is no tokenizer, or the text is longer than the context can hold.
        """
        if self.tokenizer is None:
            raise InvalidRequest("there is no tokenizer: give token ids instead of text", field="prompt")
        self.tokenizer.check_length(text, max_tokens=self._max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _expanded(self, params: SamplingParams) -> SamplingParams:
        """With -1 log-probabilities as those of the whole vocabulary."""
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        return params.clone(**dict.fromkeys(names, self._vocab_size)) if names else params

    def _check_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            outside = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"the prompt holds token id {outside}; the vocabulary has {self._vocab_size} tokens", field="prompt"
            )

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        self._check_ids(token_ids)
        if len(token_ids) >= self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; this model's context of {self._max_model_len} leaves room "
                f"for a prompt of at most {self._max_model_len - 1}",
                field="prompt",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._config.max_logprobs:
                raise InvalidRequest(
                    f"{name} is {value}; the server allows at most {self._config.max_logprobs} (--max-logprobs)",
                    field=name,
                )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(f"{name} needs a tokenizer", field=name)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space."""
        if self.tokenizer is None:
            return ()
        found = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                if ids := self.tokenizer.encode(text, add_special_tokens=False):
                    found.append(tuple(ids))
        return tuple(dict.fromkeys(found))

    def _continuation(
        self, index: int, request: EngineRequest, shown: frozenset[int], reading: ContentReading | None
    ) -> _Continuation:
        params = request.params
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                shown=shown,
                prompt_ids=request.prompt_token_ids,
            )
        return _Continuation(
            index=index,
            detokenizer=detokenizer,
            stop=StopMatcher(params.stop, include=params.include_stop_str_in_output, reading=reading),
            logprobs=[] if params.wants_logprobs else None,
            cumulative_logprob=0.0 if params.wants_logprobs else None,
        )

    def _take(self, request: _Open, continuation: _Continuation, output: EngineOutput) -> None:
        continuation.times = output.times
        request.vectors = output.vectors
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = output.prompt_logprobs
        count = len(output.new_token_ids)
        # Where the text may end the continuation, token by token, so that it ends as if each had come by itself.
        size = 1 if continuation.stop.active else max(count, 1)
        for start in range(0, max(count, 1), size):
            self._take_tokens(request.request, continuation, output, start, min(start + size, count))
            if continuation.stop.end is not None:
                break
        if continuation.stop.end is None and output.finish_reason is not None:
            continuation.text += continuation.stop.finish()
        if continuation.stop.end is not None:
            continuation.finish_reason, continuation.stop_reason = "stop", continuation.stop.found
            continuation.cut(continuation.stop.end)
        elif output.finish_reason is not None:
            continuation.finish_reason, continuation.stop_reason = output.finish_reason, output.stop_reason
            if output.finish_reason == REPETITION:
                continuation.stop_reason = "repetition_detected"
            request.error = output.error or request.error

    def _take_tokens(
        self, request: EngineRequest, continuation: _Continuation, output: EngineOutput, start: int, end: int
    ) -> None:
        """Takes tokens ``start`` up to ``end`` of an output, and their text."""
        tokens, params = output.new_token_ids[start:end], request.params
        continuation.token_ids.extend(tokens)
        if output.new_logprobs is not None and continuation.logprobs is not None:
            for token, entry in zip(tokens, output.new_logprobs[start:end], strict=True):
                continuation.logprobs.append(self._decoded(entry))
                continuation.cumulative_logprob = (continuation.cumulative_logprob or 0.0) + entry[token].logprob
        if continuation.detokenizer is None:
            return
        last = end == len(output.new_token_ids)
        if last and output.finish_reason == "stop" and not params.include_stop_str_in_output:
            # The stop token; but a grammar may also end with what is part of the text.
            tokens = tokens[:-1] if tokens and tokens[-1] in request.stop_token_ids else tokens
        if continuation.stop.active:
            continuation.token_starts += [continuation.text_seen] * (end - start)
        text = continuation.detokenizer.add(tokens)
        if last and output.finish_reason is not None:
            text += continuation.detokenizer.finish()
        continuation.text_seen += len(text)
        may_stop = len(continuation.token_ids) > params.min_tokens
        continuation.text += continuation.stop.add(text, may_stop=may_stop)

    def _pooled_output(self, request: _Open) -> PoolingRequestOutput:
        made, error = request.vectors, request.error
        if made is None and error is None:
            error = GenerationFailed("the request was aborted")
        return PoolingRequestOutput(
            request_id=request.name,
            outputs=PoolingOutput(_unmade() if made is None else made),
            prompt_token_ids=request.request.prompt_token_ids,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def finish_vectors(self, output: PoolingRequestOutput, params: PoolingParams) -> PoolingRequestOutput:
        """An output of `process` as its request wants it: cut, normalized or activated. Any thread may ask, and should
        for the vectors of many tokens."""
        if output.error is None and self._pooler is not None:
            output.outputs = PoolingOutput(finished(output.outputs.data, params, self._pooler))
        return output

    def decoded(self, positions: Iterable[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt with the text of each token. Any thread may ask, and should for a long prompt:
        there are ``max_logprobs`` times as many as tokens."""
        return [None if entry is None else self._decoded(entry) for entry in positions]

    def _decoded(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self.tokenizer is None:
            return entry
        text = self._text_of
        return {token: Logprob(value.logprob, value.rank, text(token)) for token, value in entry.items()}

    def _decode(self, token: int) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _request_output(
        self, request: _Open, touched: list[_Continuation]
    ) -> RequestOutput | PoolingRequestOutput | None:
        if request.pooling is not None:
            return self._pooled_output(request)
        kind = request.request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            if request.num_unfinished:
                return None
            touched = request.continuations
        elif kind is RequestOutputKind.CUMULATIVE and not request.num_unfinished:
            touched = request.continuations
        else:
            interval = max(self._config.stream_interval, request.request.params.stream_interval or 1)
            if interval > 1 and not (touched := [c for c in touched if c.is_due(interval)]):
                return None
        prompt_logprobs = request.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            request.prompt_logprobs = None  # once
        return RequestOutput(
            request_id=request.name,
            prompt=request.prompt,
            prompt_token_ids=request.request.prompt_token_ids,
            outputs=[c.output(delta=kind is RequestOutputKind.DELTA) for c in touched],
            finished=not request.num_unfinished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            metrics=_metrics(request),
            error=request.error,
        )


def _unmade() -> Vectors:
    return np.zeros(0, np.float32)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        if key in PROMPT_KEYS:
            continue
        if key in UNSUPPORTED_PROMPT_KEYS:
            if value is None or (isinstance(value, Mapping) and not value):
                continue
            raise InvalidRequest(f"{key} is not supported yet: models here read text only", field=key)
        raise InvalidRequest(
            f"a prompt dict needs 'prompt' or 'prompt_token_ids', may have a 'cache_salt', and has no {key!r}",
            field="prompt",
        )


def _salt(own: Any, given: str | None) -> str:
    """The salt that a prompt brings; one given beside it must be the same."""
    if not isinstance(own, str) or not own:
        raise InvalidRequest("cache_salt must be a non-empty string", field="cache_salt")
    if given is not None and given != own:
        raise InvalidRequest("cache_salt is given twice, and differently", field="cache_salt")
    return own


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidRequest("the prompt must be text or token ids", field="prompt")
    ids = list(prompt)
    if set(map(type, ids)) <= {int}:
        return ids
    if any(isinstance(token, bool) or not hasattr(token, "__index__") for token in ids):
        raise InvalidRequest("the prompt must be text or a list of integers", field="prompt")
    return [int(token) for token in ids]


def _metrics(request: _Open) -> RequestMetrics:
    times = [c.times for c in request.continuations if c.times is not None]
    return RequestMetrics(
        arrival_time=request.request.arrival_time,
        first_scheduled_time=_earliest(t.scheduled for t in times),
        first_token_time=_earliest(t.first_token for t in times),
        last_token_time=max((t.last_token for t in times if t.last_token is not None), default=None),
        finished_time=None if request.num_unfinished else time.monotonic(),
        num_preemptions=sum(t.num_preemptions for t in times),
    )


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _stats(request: _Open) -> RequestStats:
    metrics = _metrics(request)
    arrival, end = metrics.arrival_time, metrics.finished_time or metrics.arrival_time
    scheduled = end if metrics.first_scheduled_time is None else metrics.first_scheduled_time
    first = end if metrics.first_token_time is None else metrics.first_token_time
    last = first if metrics.last_token_time is None else metrics.last_token_time
    reasons = [c.finish_reason or "abort" for c in request.continuations]
    params = request.request.params
    return RequestStats(
        engine=request.engine,
        request_id=request.name,
        finish_reason=next((r for r in ("error", "abort", REPETITION, "length") if r in reasons), "stop"),
        num_prompt_tokens=len(request.request.prompt_token_ids),
        num_generation_tokens=sum(len(c.token_ids) for c in request.continuations),
        num_cached_tokens=request.num_cached_tokens,
        max_tokens=params.max_tokens,
        n=params.n,
        num_preemptions=metrics.num_preemptions,
        e2e_seconds=end - arrival,
        queued_seconds=max(0.0, scheduled - arrival),
        prefill_seconds=max(0.0, first - scheduled),
        decode_seconds=max(0.0, last - first),
        inference_seconds=max(0.0, last - scheduled),
    )
