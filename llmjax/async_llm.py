"""Online generation: requests come and go while others run. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from llmjax.adapters.locate import locate
from llmjax.adapters.reference import Adaptation, AdapterReference
from llmjax.adapters.request import LoRARequest
from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.clients.client import Control, RunningEngine
from llmjax.engine.clients.data_parallel import DataParallelEngine
from llmjax.engine.clients.process import ProcessEngine, begin_loading
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.core.stats import FORMS_FULL, QUEUE_FULL
from llmjax.engine.front.adapters import NamedAdapter
from llmjax.engine.front.beam_search import BeamSearch
from llmjax.engine.front.pairs import Side, TextPair
from llmjax.engine.front.requests import CheckedForm, PromptInput
from llmjax.engine.front.scores import PoolingInput
from llmjax.engine.front.vectors import PooledTokens
from llmjax.engine.info import EngineState, ProgramInfo
from llmjax.engine.report import ThroughputLog
from llmjax.engine.setup import KV_CACHE, WEIGHTS, LoadedLLM, asleep_at, sleep_control, wake_controls
from llmjax.errors import Asleep, EngineDead, GenerationFailed, InvalidRequest, LLMJaxError, QueueFull
from llmjax.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput, TokenLogprobs
from llmjax.parsing.content import ContentReading
from llmjax.pooling_params import PoolingParams
from llmjax.sampling.params import BeamSearchParams, SamplingParams
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.turns import Turns

logger = logging.getLogger(__name__)

Stream = asyncio.Queue[RequestOutput | PoolingRequestOutput | Exception]
LONG_TEXT = 20_000  # characters from which tokenizing leaves the event loop's thread
LONG_VECTORS = 2**18  # numbers from which work on them does


class AsyncLLM(LoadedLLM):
    """A model that serves concurrent requests. Made by ``from_config``."""

    client: RunningEngine

    def __init__(self, config: EngineConfig, client: RunningEngine) -> None:
        super().__init__(config, client)
        self._streams: dict[str, Stream] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._changing = False  # between sleeping and waking, which may take minutes
        self._changed = asyncio.Event()  # set for those who wait in `_until`, and cleared at once
        self._goes_on = asyncio.Event()  # cleared while the engine is paused
        self._goes_on.set()
        self._frozen = False
        self._held_back = 0  # requests that wait for it
        self._searches = 0
        self._loading = asyncio.Lock()  # of the one who changes the adapters
        self._form_checks = Turns("forms of answers")
        if not config.disable_log_stats:
            self.add_stat_logger(ThroughputLog())
        self.client.start(deliver=self._from_engine, died=self._engine_died)

    @classmethod
    def from_config(cls, config: EngineConfig, loading: ProcessEngine | None = None) -> AsyncLLM:
        """Loads the model and starts the engine, where ``engine_process`` says.

        Args:
            config: everything.
            loading: what `llmjax.engine.clients.process.begin_loading` has begun with this configuration.
        """
        return cls(config, _client(config, loading or begin_loading(config)))

    @property
    def exit_status(self) -> int:
        """What a process that cannot do without the engine should end with: 0 unless the engine has died."""
        return self.client.exit_status

    async def wait_died(self) -> int:
        """Returns the ``exit_status`` when the engine has died."""
        await self._until(lambda: bool(self.exit_status))
        return self.exit_status

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self._frontend.num_requests

    @property
    def request_ids(self) -> list[str]:
        """The ids of requests whose streams have not ended."""
        return list(self._streams)

    @property
    def num_waiting(self) -> int:
        """Continuations, of all requests, beyond those that can run at once. Counted on this side of the
        engine, so that requests that have left count no more."""
        return max(0, self._frontend.num_unfinished - self.info.max_num_seqs)

    @property
    def states(self) -> tuple[EngineState, ...]:
        """How each engine is: one, or ``data_parallel_size`` of them."""
        return self.client.states

    def check_health(self) -> None:
        """Raises EngineDead when the engine has stopped or hangs; of several engines, when none serves."""
        if not self._changing or not self.client.running:
            self.client.check_health()

    async def wait_ready(self) -> None:
        """Returns when requests can be computed without waiting for the compiler."""
        await asyncio.wrap_future(self.client.control(Control.WAIT_READY))

    async def warm_up(self) -> None:
        """Returns when every program is compiled."""
        await asyncio.wrap_future(self.client.control(Control.WARM_UP))

    async def reset_prefix_cache(self) -> None:
        """Forgets what past requests have computed."""
        await asyncio.wrap_future(self.client.control(Control.RESET_PREFIX_CACHE))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the device's memory until ``wake_up``; requests are refused meanwhile.

        Args:
            level: see ``LLM.sleep``.
            mode: what becomes of requests: "abort" ends them, "wait" lets them end.

        Raises:
            InvalidRequest: there is no such level or mode, or the engine is about to sleep or to wake.
        """
        if mode == "keep":
            raise InvalidRequest("mode keep is not supported: requests lose their keys and values", field="mode")
        if mode not in ("abort", "wait"):
            raise InvalidRequest(f"mode must be abort or wait, not {mode[:80]!r}", field="mode")
        if mode == "wait" and self._frozen:
            raise InvalidRequest("running requests are kept: they do not end before they are resumed", field="mode")
        control = sleep_control(level)
        with self._one_change():
            before, self._away = self._away, frozenset({WEIGHTS, KV_CACHE})  # no new requests from now on
            try:
                await self._until(lambda: not self.num_requests, abort=mode == "abort")
                await asyncio.wrap_future(self.client.control(control))
                self._asleep = asleep_at(level)
            except BaseException:
                self._away = before
                raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes back what ``sleep`` has freed; arguments and errors are those of ``LLM.wake_up``."""
        controls = wake_controls(tags, self._away)
        with self._one_change():
            for tag, control in controls.items():
                await asyncio.wrap_future(self.client.control(control))
                self._away -= {tag}

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait for ``resume_generation``."""
        return not self._goes_on.is_set()

    @property
    def num_held_back(self) -> int:
        """Requests that wait for ``resume_generation``."""
        return self._held_back

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Holds new requests back until ``resume_generation``; returns when those before them are out of the way.

        Args:
            mode: what becomes of running requests: "abort" ends them, "wait" lets them end, "keep" has them stop where
                they are and go on later.
            clear_cache: forget what requests have computed. With "keep" nothing is forgotten.

        Raises:
            InvalidRequest: there is no such mode, requests that are kept are waited for, or the engine is about to
                sleep or to wake.
        """
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequest(f"mode must be abort, wait or keep, not {mode[:80]!r}", field="mode")
        if mode == "wait" and self._frozen:
            raise InvalidRequest("running requests are kept: they do not end before they are resumed", field="mode")
        if self._changing:
            raise InvalidRequest("the engine is about to sleep or to wake")
        self._goes_on.clear()
        if mode == "keep":
            self._frozen = True
            await asyncio.wrap_future(self.client.control(Control.FREEZE))
            return
        await self._until(
            lambda: not self.is_paused or not (self.num_requests or self._searches), abort=mode == "abort"
        )
        if clear_cache and self.is_paused:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Lets requests go on that ``pause_generation`` holds back; does nothing if there is nothing to resume."""
        if self._frozen:
            await asyncio.wrap_future(self.client.control(Control.GO_ON))
            self._frozen = False
        self._goes_on.set()
        self._wake()

    async def _until_resumed(self) -> None:
        """What a new request waits for.

        Raises:
            QueueFull: as many as a queue has room for wait already.
        """
        self._event_loop = asyncio.get_running_loop()
        if not self.is_paused:
            return
        if self._held_back >= self.config.max_num_seqs + self.config.max_num_queued_reqs:
            self._refuse_another(self._held_back)
        self._held_back += 1
        try:
            while self.is_paused and not self._stopped and self.client.running:
                await self._goes_on.wait()
        finally:
            self._held_back -= 1
        self._check_open()

    async def _until(self, condition: Callable[[], bool], *, abort: bool = False) -> None:
        """Waits for a condition, which may depend on requests, on pauses and on the engine's end.

        Args:
            abort: end all requests that are there meanwhile.
        """
        self._event_loop = asyncio.get_running_loop()
        while not condition():
            if abort:
                for request_id in self.request_ids:
                    await self.abort(request_id)
            await self._changed.wait()

    def _wake(self) -> None:
        """Has everybody who waits in `_until` look at the condition again."""
        self._changed.set()
        self._changed.clear()

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        """Allows one change at a time of what is on the device."""
        if self._changing:
            raise InvalidRequest("the engine is about to sleep or to wake")
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    async def start_profile(self) -> None:
        """Starts JAX's profiler; see ``LLM.start_profile``."""
        await asyncio.wrap_future(self.client.control(Control.START_PROFILE))

    async def stop_profile(self) -> None:
        """Ends JAX's profiler; see ``LLM.stop_profile``."""
        await asyncio.wrap_future(self.client.control(Control.STOP_PROFILE))

    async def load_adapter(
        self, name: str, path: str | Path, *, number: int | None = None, base: str | None = None, replace: bool = False
    ) -> None:
        """Reads an adapter, which requests may name from then on.

        Args:
            path: its PEFT folder or GGUF file.
            number: its number, which no other adapter has; None: a new one.
            base: the name of the model that it is said to be for.
            replace: whether it may take the place of one of the same name. Requests that are there keep the old one.

        Raises:
            InvalidRequest: there is no room for adapters, or the name or the number is wrong or taken.
            CheckpointError: it cannot be read, or does not fit the model or the settings.
        """
        async with self._loading:
            await self._load_adapter(name, path, number=number, base=base, replace=replace)

    async def _load_adapter(
        self, name: str, path: str | Path, *, number: int | None, base: str | None, replace: bool
    ) -> None:
        self.adapters.check_new(name, number=number, replace=replace)
        number = number or self.adapters.new_number()
        found = await asyncio.to_thread(locate, path, self.config)
        reference = await asyncio.to_thread(AdapterReference.read, name, found, number=number)
        await asyncio.wrap_future(self.client.control(Control.LOAD_ADAPTER, reference))
        self.adapters.add(NamedAdapter(reference=reference, source=str(path), base=base))

    async def unload_adapter(self, name: str, *, number: int | None = None) -> None:
        """Takes an adapter's name away. Requests that are there keep it.

        Args:
            number: what its number has to be; None: any.

        Raises:
            UnknownAdapter: there is none of that name and that number.
        """
        async with self._loading:
            self.adapters.remove(name, number=number)

    async def _adaptation(self, asked: LoRARequest | Adaptation | None) -> Adaptation | None:
        """What a request is computed with; its adapter is loaded if it is new."""
        if asked is None:
            asked = self.adapters.scaled()
        if isinstance(asked, Adaptation):
            return asked if asked.parts else None
        async with self._loading:
            if self.adapters.known(asked) is None:
                await self._load_adapter(
                    asked.lora_name,
                    asked.lora_path,
                    number=asked.lora_int_id,
                    base=asked.base_model_name,
                    replace=asked.load_inplace,
                )
            return self.adapters.find(asked.lora_name)

    async def programs(self) -> list[ProgramInfo]:
        """The engine's step programs, and which of them are ready."""
        programs: list[ProgramInfo] = await asyncio.wrap_future(self.client.control(Control.PROGRAMS))
        return programs

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        shown: frozenset[int] = frozenset(),
        thinking: ThinkingBudget | None = None,
        reading: ContentReading | None = None,
        client: str = "",
        lora_request: LoRARequest | Adaptation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams a request; closing the generator or cancelling its task aborts it.

        Args:
            prompt: text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``, perhaps with a ``cache_salt`` and
                ``multi_modal_data``.
            request_id: unique among running requests.
            priority: smaller first; needs ``scheduling_policy="priority"``.
            cache_salt: only requests with the same salt share cached prefixes.
            shown: special tokens that are part of the text even where ``sampling_params`` leaves them out.
            thinking: how long outputs may reason; None: for as long as they like.
            reading: which text is content, where stop strings are looked for; None: all of it.
            client: the client that asks; clients take turns where grammars are checked, which may take seconds.
            lora_request: the adapter that it is computed with; None: what requests get that name none.

        Yields:
            Outputs as ``sampling_params.output_kind`` says; the last one has ``finished``.

        Raises:
            InvalidRequest: before the first output.
            QueueFull: too many requests wait, or too many forms that are to be checked.
            EngineDead: the engine has stopped.
        """
        self._check_open()
        fields = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = fields.get("prompt")
        if fields.get("multi_modal_data"):
            read = await asyncio.to_thread(self._frontend.requests.prompt, fields, cache_salt=cache_salt)
            prompt, cache_salt = read, read.cache_salt
            self._check_open()  # much may have happened since
        elif isinstance(text, str) and len(text) > LONG_TEXT and "prompt_token_ids" not in fields:
            prompt = {**fields, "prompt_token_ids": await asyncio.to_thread(self._frontend.requests.encode, text)}
            self._check_open()  # much may have happened since
        form = None
        if sampling_params.structured_outputs is not None:
            form = await self._checked(sampling_params.structured_outputs, client)
            self._check_open()
        adaptation = await self._adaptation(lora_request)
        await self._until_resumed()
        request = self._frontend.open(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            shown=shown,
            form=form,
            thinking=thinking,
            reading=reading,
            adaptation=adaptation,
        )
        scores: list[TokenLogprobs | None] = []
        with self._submitted(request, request_id) as stream:
            finished = False
            while not finished:
                output = await _next(stream)
                assert isinstance(output, RequestOutput)
                if output.prompt_logprobs is not None:  # the same in all outputs that have any
                    scores = scores or await asyncio.to_thread(self._frontend.outputs.decoded, output.prompt_logprobs)
                    output.prompt_logprobs = scores
                finished = output.finished
                yield output

    async def _checked(self, form: StructuredOutputsParams, client: str) -> CheckedForm:
        grammar, known = await asyncio.to_thread(self._frontend.requests.known, form)
        if known is not None:
            return known
        try:
            checked = self._form_checks.submit(client, partial(self._frontend.requests.check, form, grammar))
            return await asyncio.wrap_future(checked)
        except QueueFull:
            self._record_rejection(FORMS_FULL)
            raise

    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        logprobs: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        lora_request: LoRARequest | Adaptation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Searches for the likeliest continuations of a prompt; other arguments and errors as for ``generate``.

        Args:
            logprobs: continuations have those of the tokens that they were chosen from.

        Yields:
            One output: ``beam_width`` continuations, the best first.
        """
        self._check_open()
        adaptation = await self._adaptation(lora_request)
        await self._until_resumed()
        search = self._frontend.requests.beam_search(
            prompt, params, cache_salt=cache_salt, keep_logprobs=logprobs, adaptation=adaptation
        )
        num_cached = 0
        self._searches += 1
        try:
            while not search.done:
                made = await self._grow(search, request_id, priority=priority)
                if not search.steps:
                    num_cached = made[0].num_cached_tokens
                # An aborted request has an output without a token.
                if any(output.outputs[0].finish_reason == "abort" for output in made):
                    yield self._searched(search, request_id, [CompletionOutput(0, "", [], finish_reason="abort")], 0)
                    return
                search.take([scores for output in made for scores in output.outputs[0].logprobs or ()])
        finally:
            self._searches -= 1
            self._wake()
        decode = None
        if self.tokenizer is not None:
            decode = partial(
                self._frontend.continued,
                search.prompt,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                shown=shown,
            )
        yield self._searched(search, request_id, search.outputs(decode), num_cached)

    def _searched(
        self, search: BeamSearch, request_id: str, found: list[CompletionOutput], num_cached_tokens: int
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=search.prompt,
            outputs=found,
            finished=True,
            num_cached_tokens=num_cached_tokens,
        )

    async def _grow(self, search: BeamSearch, request_id: str, *, priority: int) -> list[RequestOutput]:
        """The next token of each of a search's continuations; none of them is left behind when it fails."""

        async def last(name: str, ids: list[int]) -> RequestOutput:
            request = self._frontend.open(
                ids, params, name, priority=priority, cache_salt=search.cache_salt, adaptation=search.adaptation
            )
            with self._submitted(request, name) as stream:
                output = await _next(stream)
            assert isinstance(output, RequestOutput)
            return output

        params, name = search.step_params, f"{request_id}/{search.steps}"
        tasks = [asyncio.create_task(last(f"{name}.{number}", ids)) for number, ids in enumerate(search.prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def pooled_tokens(
        self, prompt: PoolingInput, pooling_params: PoolingParams, *, add_special_tokens: bool = True
    ) -> PooledTokens:
        """What the engine reads where a vector is asked for, checked: ``encode`` takes it for a prompt. Any thread may
        ask, and should for long texts.

        Args:
            add_special_tokens: those that the tokenizer puts around a text, and between those of a pair.

        Raises:
            InvalidRequest: the model cannot make it.
        """
        return self._frontend.pooling.tokens(prompt, pooling_params, add_special_tokens=add_special_tokens)

    async def encode(
        self,
        prompt: PoolingInput | PooledTokens,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | Adaptation | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Makes a vector, or a number for each label, of a text; arguments and errors as for ``generate`` and
        ``pooled_tokens``.

        Yields:
            One output.
        """
        self._check_open()
        if _num_chars(prompt) > LONG_TEXT:
            prompt = await asyncio.to_thread(
                self._frontend.pooling.tokens, prompt, pooling_params, add_special_tokens=add_special_tokens
            )
            self._check_open()
        adaptation = await self._adaptation(lora_request)
        await self._until_resumed()
        request = self._frontend.open_pooling(
            prompt,
            pooling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            adaptation=adaptation,
        )
        with self._submitted(request, request_id) as stream:
            output = await _next(stream)
        assert isinstance(output, PoolingRequestOutput)
        if output.outputs.data.size > LONG_VECTORS:
            yield await asyncio.to_thread(self._frontend.pooling.finished, output, pooling_params)
        else:
            yield self._frontend.pooling.finished(output, pooling_params)

    @contextmanager
    def _submitted(self, request: EngineRequest, request_id: str) -> Iterator[Stream]:
        """Has the engine compute a request that has been opened, and gives what comes of it. The end of the block
        aborts the request if it has not ended."""
        stream: Stream = asyncio.Queue()
        self._streams[request_id] = stream
        try:
            self._frontend.sent(request.request_id, engine=self.client.submit(request))
            self._wake()
            # If the engine has died by now, it may not have known whom to tell; if it dies later, it tells this stream.
            self.client.check_health()
            yield stream
        finally:
            # The id may be another request's by now: its last output ends a request, not when this code runs.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
            if (stats := self._frontend.forget(request.request_id)) is not None:
                self.client.abort(request.request_id)
                self._record(stats)
            self._wake()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish reason "abort"."""
        if (number := self._frontend.id_of(request_id)) is not None:
            self.client.abort(number)

    async def shutdown(self, *, drain_timeout: float = 0.0) -> None:
        """Stops: no new requests, running ones get ``drain_timeout`` seconds to finish, the rest are aborted. Programs
        that are being compiled are not waited for.

        A second call goes on where a first one was cancelled, else it does nothing.
        """
        self._stopped = True
        self._goes_on.set()
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout):
                await self._until(lambda: not self.num_requests)
        for request_id in list(self._streams):
            await self.abort(request_id)
        self.client.stop()
        while self.client.running:  # no thread waits for it: a caller that is tired of waiting can leave
            await asyncio.sleep(0.01)
        self.client.close()
        await asyncio.sleep(0)  # what the engine said last may wait for its turn on this loop
        self._fail(list(self._streams), EngineDead("the engine has stopped"))  # streams that have not ended by now

    def _check_open(self) -> None:
        if self._stopped:
            raise QueueFull("the server is shutting down", retry_after=5.0)
        self.check_health()
        if self.is_sleeping:
            raise Asleep
        if self.num_waiting >= self.config.max_num_queued_reqs:
            self._refuse_another(self.config.max_num_queued_reqs)

    def _refuse_another(self, waiting: int) -> NoReturn:
        self._record_rejection(QUEUE_FULL)
        raise QueueFull(f"{waiting} requests are waiting already", retry_after=1.0)

    def _record_rejection(self, limit: str) -> None:
        for stat_logger in self.client.loggers:
            stat_logger.record_rejection(limit)

    def _from_engine(self, outputs: list[EngineOutput]) -> None:
        """On the engine's thread: hands outputs to the event loop."""
        self._on_event_loop(partial(self._deliver, outputs))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """On the event loop's thread: text, stop strings, streams."""
        try:
            processed = self._frontend.process(outputs)
        except Exception as failure:
            # Whose fault it was is not known; none of these requests may be left waiting forever.
            logger.exception("outputs could not be turned into text")
            failed = GenerationFailed(f"internal error: {failure}")
            self._fail(self._frontend.names({output.request_id for output in outputs}), failed)
            return
        for request_id, index in processed.aborts:
            self.client.abort(request_id, index)
        for stats in processed.finished:
            self._record(stats)
        self._wake()
        for output in processed.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output if output.error is None else output.error)

    def _engine_died(self, error: BaseException) -> None:
        """On the engine's thread: every open request ends with an error."""
        dead = EngineDead(f"the engine stopped: {error}")
        dead.__cause__ = error

        def end() -> None:
            self._goes_on.set()  # callers that wait for it find the engine dead
            self._wake()
            self._fail(list(self._streams), dead)

        self._on_event_loop(end)

    def _on_event_loop(self, call: Callable[[], None]) -> None:
        if self._event_loop is None:
            return
        try:
            self._event_loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed: the listener has gone
            logger.debug("outputs came after the event loop had closed")

    def _fail(self, request_ids: Iterable[str], error: LLMJaxError) -> None:
        for request_id in request_ids:
            if (stream := self._streams.get(request_id)) is not None:
                stream.put_nowait(error)


def _client(config: EngineConfig, loading: ProcessEngine | None) -> RunningEngine:
    if loading is not None:
        return loading
    if config.data_parallel_size > 1:
        return DataParallelEngine(config)
    # Where the engine is in a process of its own, this one does not need JAX.
    from llmjax.engine.build import build_engine
    from llmjax.engine.clients.loop import ThreadEngine

    return ThreadEngine(build_engine(config))


async def _next(stream: Stream) -> RequestOutput | PoolingRequestOutput:
    """The next output of a request; raises the error that ends it."""
    output = await stream.get()
    if isinstance(output, Exception):
        raise output
    return output


def _num_chars(prompt: PoolingInput | PooledTokens) -> int:
    """The number of characters that have to be tokenized."""
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, Side):
        prompt = prompt.content if isinstance(prompt.content, str) else prompt.content.prompt
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0
