"""The frontend: turns prompts into token requests, and token outputs into text. It runs where the caller runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llmjax.adapters.reference import Adaptation
from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.core.stats import RequestStats
from llmjax.engine.front.images import Images
from llmjax.engine.front.outputs import Continuation, OpenRequest, Outputs, stats_of
from llmjax.engine.front.pooling import PoolingPrompts
from llmjax.engine.front.requests import CheckedForm, PromptInput, Requests, salt_of
from llmjax.engine.front.scores import PoolingInput
from llmjax.engine.front.vectors import PooledTokens, pooled_request
from llmjax.engine.info import EngineInfo
from llmjax.errors import InvalidRequest
from llmjax.outputs import PoolingRequestOutput, RequestOutput
from llmjax.parsing.content import ContentReading
from llmjax.pooling_params import PoolingParams
from llmjax.sampling.params import SamplingParams
from llmjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Processed:
    """What a batch of engine outputs means for the callers."""

    outputs: list[RequestOutput | PoolingRequestOutput]
    aborts: list[tuple[int, int]]  # continuations that a stop string ended: the engine must be told
    finished: list[RequestStats]


class Frontend:
    """The open requests: their users' names for them, and their outputs so far.

    Args:
        config: limits and policies.
        info: describes the engine that the requests are for.
        new_id: makes that engine's ids of requests; the ids that users give are known here alone.
        tokenizer: None: token ids in, token ids out.
        compiles: whether grammars are compiled here, because the engine is in this process.
        images: makes prompts with images; None: the model sees none.

    Attributes:
        requests: checks and tokenizes prompts.
        pooling: does so where vectors are asked for.
        outputs: detokenizes outputs and finds stop strings.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: EngineInfo,
        new_id: Callable[[], int],
        tokenizer: Tokenizer | None,
        compiles: bool,
        images: Images | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.requests = Requests(
            config, info=info, new_id=new_id, tokenizer=tokenizer, compiles=compiles, images=images
        )
        self.pooling = PoolingPrompts(
            self.requests, info=info, tokenizer=tokenizer, chosen_template=config.chat_template is not None
        )
        self.outputs = Outputs(tokenizer, stream_interval=config.stream_interval)
        self._new_id = new_id
        self._open: dict[int, OpenRequest] = {}
        self._names: dict[str, int] = {}
        self._num_unfinished = 0

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

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
        form: CheckedForm | None = None,
        thinking: ThinkingBudget | None = None,
        reading: ContentReading | None = None,
        adaptation: Adaptation | None = None,
    ) -> EngineRequest:
        """Checks a request and remembers it.

        Args:
            name: its user's id; no other open request may have it.
            shown: special tokens that are part of the text even where others are left out.
            form: the checked form of these parameters, where that has been asked for before.
            thinking: how long outputs may reason; None: for as long as they like.
            reading: which text is content, where stop strings are looked for; None: all of it.
            adaptation: adapters that it is computed with; None: the model as it is.

        Returns:
            What to send to the engine.

        Raises:
            InvalidRequest: the request cannot be served; ``field`` names the reason.
        """
        arrival = time.monotonic()
        self._check_new(name, priority)
        read = self.requests.prompt(prompt, cache_salt=cache_salt)
        request = self.requests.request(
            read,
            params,
            arrival=arrival,
            priority=priority,
            form=form,
            thinking=thinking,
            adaptation=adaptation,
        )
        continuations = [self.outputs.continuation(index, request, shown, reading) for index in range(params.n)]
        self._add(OpenRequest(name=name, request=request, prompt=read.text, continuations=continuations))
        return request

    def open_pooling(
        self,
        prompt: PoolingInput | PooledTokens,
        params: PoolingParams,
        name: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        adaptation: Adaptation | None = None,
    ) -> EngineRequest:
        """Checks a request for a vector and remembers it; arguments, result and errors as for `open` and
        `PoolingPrompts.tokens`."""
        arrival = time.monotonic()
        self._check_new(name, priority)
        tokens = self.pooling.tokens(prompt, params, add_special_tokens=add_special_tokens)
        request = EngineRequest(
            request_id=self._new_id(),
            prompt_token_ids=tokens.token_ids,
            params=SamplingParams(max_tokens=1),
            max_tokens=1,
            stop_token_ids=frozenset(),
            pooling=pooled_request(tokens, self.pooling.pooler),
            media=tokens.media,
            adaptation=self.requests.adapted(tokens.media, adaptation),
            priority=priority,
            cache_salt=cache_salt if tokens.cache_salt is None else salt_of(tokens.cache_salt, cache_salt),
            arrival_time=arrival,
        )
        continuation = self.outputs.continuation(0, request, frozenset(), None)
        self._add(OpenRequest(name=name, request=request, prompt=None, continuations=[continuation]))
        return request

    def _add(self, opened: OpenRequest) -> None:
        self._open[opened.request.request_id] = opened
        self._names[opened.name] = opened.request.request_id
        self._num_unfinished += len(opened.continuations)

    def continued(self, prompt_ids: list[int], token_ids: list[int], **options: Any) -> tuple[str, list[int]]:
        """The text of tokens that follow a prompt, and where each begins, as `IncrementalDetokenizer.whole` says it.

        Args:
            options: keyword arguments of ``Tokenizer.detokenizer``.
        """
        assert self.tokenizer is not None
        return self.tokenizer.detokenizer(prompt_ids=prompt_ids, **options).whole(token_ids)

    def sent(self, request_id: int, *, engine: int) -> None:
        """The open request went to the engine of that number."""
        if (found := self._open.get(request_id)) is not None:
            found.engine = engine

    def _check_new(self, name: str, priority: int) -> None:
        if name in self._names:
            raise InvalidRequest(f"request id {name!r} is in use", field="request_id")
        self.requests.limits.check_priority(priority)

    def id_of(self, name: str) -> int | None:
        """The engine's id of an open request, by its user's name for it."""
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
        return stats_of(found)

    def process(self, engine_outputs: Iterable[EngineOutput]) -> Processed:
        """Turns what the engine brought into request outputs. Outputs of forgotten requests are dropped.

        Log-probabilities of prompts come as the engine has them, see `Outputs.decoded`.
        """
        touched: dict[int, dict[int, Continuation]] = {}
        aborts = []
        for output in engine_outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue  # forgotten
            continuation = request.continuations[output.index]
            if continuation.finish_reason is not None:
                continue  # the engine was one step ahead of a stop string
            self.outputs.take(request, continuation, output)
            self._num_unfinished -= continuation.finish_reason is not None
            if continuation.stop.end is not None and output.finish_reason is None:
                aborts.append((output.request_id, output.index))
            touched.setdefault(output.request_id, {})[output.index] = continuation
        outputs, finished = [], []
        for request_id, continuations in touched.items():
            request = self._open[request_id]
            if (made := self.outputs.made(request, list(continuations.values()))) is not None:
                outputs.append(made)
            if not request.num_unfinished:
                finished.append(stats_of(self._close(request_id)))
        return Processed(outputs=outputs, aborts=aborts, finished=finished)

    def _close(self, request_id: int) -> OpenRequest:
        found = self._open.pop(request_id)
        del self._names[found.name]
        return found
