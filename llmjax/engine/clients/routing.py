"""Routing of requests to one of several equal engines: the one that has most of the prompt cached and least to do.

What engines have cached is estimated from the requests that they were sent. So it costs no messages, and a burst of
equal prompts finds the first one's engine before that has computed anything. The estimate is wrong if an engine has
dropped pages earlier than assumed here, which costs one computation of a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.request import EngineOutput, EngineRequest

FIRST_GUESS = 128.0  # tokens of a continuation, before any has ended
MEMORY = 32.0  # continuations that the guess goes back to


class PrefixIndex:
    """Digests of the pages that an engine should have, the most recently used ones.

    Args:
        capacity: pages at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def matched(self, digests: Iterable[bytes]) -> int:
        """How many of a prompt's pages are known, counted from its beginning."""
        count = 0
        for digest in digests:
            if digest not in self._pages:
                break
            count += 1
        return count

    def add(self, digests: Sequence[bytes]) -> None:
        """A prompt's pages have been used. Earlier pages are dropped last: without them later ones are of no use."""
        for digest in reversed(digests[: self._capacity]):
            self._pages[digest] = None
            self._pages.move_to_end(digest)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()


@dataclass(slots=True)
class _Routed:
    """A request that an engine has not finished."""

    engine: int
    prompt: int  # tokens still to compute, as far as is known
    left: dict[int, int]  # tokens still to generate, estimated, by continuation that has not ended
    generated: dict[int, int]


class Router:
    """Knows which engine has each request, and chooses one for the next. It is not thread-safe.

    An engine's queue is counted in tokens: those of prompts that have not brought a token yet, without what should be
    cached, and an estimate of those that continuations will generate: as many as past ones, at most ``max_tokens``.

    Args:
        engines: how many there are.
        page_size: tokens of a page of the engines' KV caches.
        capacity: pages that an engine can have cached; 0: it shares no prefixes.
    """

    def __init__(self, engines: int, *, page_size: int, capacity: int) -> None:
        self._page_size = page_size
        self._capacity = capacity
        self._indexes = [PrefixIndex(capacity) for _ in range(engines)]
        self._queued = [0] * engines
        self._open = [0] * engines
        self._last_use = [0] * engines
        self._uses = 0
        self._requests: dict[int, _Routed] = {}
        self._guess = FIRST_GUESS

    def queued(self, engine: int) -> int:
        """Tokens that an engine has still to compute, estimated."""
        return self._queued[engine]

    def engine_of(self, request_id: int) -> int | None:
        """The engine of a request that has not ended."""
        routed = self._requests.get(request_id)
        return None if routed is None else routed.engine

    def requests_of(self, engine: int) -> list[int]:
        """The requests that an engine has not finished."""
        return [request_id for request_id, routed in self._requests.items() if routed.engine == engine]

    def send(self, request: EngineRequest, among: Iterable[int]) -> int:
        """Chooses an engine: matched prefix minus queued tokens, then the fewest requests, then the longest unused.

        Args:
            among: the engines that take requests, at least one.
        """
        digests = self._digests(request)
        matched = {engine: self._page_size * self._indexes[engine].matched(digests) for engine in among}
        chosen = min(matched, key=lambda e: (self._queued[e] - matched[e], self._open[e], self._last_use[e], e))
        self._indexes[chosen].add(digests)
        self._uses += 1
        self._last_use[chosen] = self._uses
        left = self._expected(request)
        routed = _Routed(
            engine=chosen,
            prompt=len(request.prompt_token_ids) - matched[chosen],
            left=dict.fromkeys(range(request.params.n), left),
            generated=dict.fromkeys(range(request.params.n), 0),
        )
        self._requests[request.request_id] = routed
        self._queued[chosen] += routed.prompt + left * request.params.n
        self._open[chosen] += 1
        return chosen

    def note(self, outputs: Iterable[EngineOutput]) -> None:
        """Notes the outputs of engines."""
        for output in outputs:
            routed = self._requests.get(output.request_id)
            if routed is None or output.index not in routed.left:
                continue
            engine, index, count = routed.engine, output.index, len(output.new_token_ids)
            self._queued[engine] -= routed.prompt
            routed.prompt = 0
            routed.generated[index] += count
            before = routed.left[index]
            if output.finish_reason is None:
                after = routed.left[index] = max(1, before - count)
            else:
                after = 0
                del routed.left[index]
                if output.finish_reason in ("stop", "length"):
                    self._guess += (routed.generated[index] - self._guess) / MEMORY
            self._queued[engine] -= before - after
            if not routed.left:
                self._open[engine] -= 1
                del self._requests[output.request_id]

    def drop(self, engine: int) -> list[tuple[int, int]]:
        """Forgets everything about an engine that has died.

        Returns:
            The continuations that it has not finished: ids of requests, and numbers of their continuations.
        """
        lost = []
        for request_id in self.requests_of(engine):
            lost += [(request_id, index) for index in self._requests.pop(request_id).left]
        self._queued[engine] = self._open[engine] = 0
        self._indexes[engine].clear()
        return lost

    def reset_prefixes(self) -> None:
        """Notes that no engine has anything cached."""
        for index in self._indexes:
            index.clear()

    def _expected(self, request: EngineRequest) -> int:
        """Estimated number of tokens of a continuation."""
        params = request.params
        if params.ignore_eos:
            return request.max_tokens
        return max(1, min(request.max_tokens, max(round(self._guess), params.min_tokens)))

    def _digests(self, request: EngineRequest) -> list[bytes]:
        """The digests of the prompt's full pages that an engine may have cached, chained as engines chain them."""
        if not self._capacity or request.params.prompt_logprobs is not None:
            return []
        size, tokens = self._page_size, request.prompt_token_ids
        digest = PageKey.shared(request.cache_salt, None if request.adaptation is None else request.adaptation.digest)
        digests = []
        for start in range(0, (len(tokens) - 1) // size * size, size):
            digest = PageKey.chain(digest, tokens[start : start + size]).digest
            digests.append(digest)
        return digests
