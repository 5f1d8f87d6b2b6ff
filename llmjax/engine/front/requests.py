"""Makes engine requests from users' requests: prompts as tokens, limits checked, structured outputs as grammars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

from llmjax.adapters.reference import Adaptation, ScaledAdapter
from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.core.media import PromptMedia
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.front.beam_search import MAX_BEAM_TOKENS, BeamSearch
from llmjax.engine.front.images import TEXT_ONLY, Images, media_of
from llmjax.engine.front.limits import RequestLimits
from llmjax.engine.info import EngineInfo
from llmjax.errors import InvalidRequest
from llmjax.sampling.params import BeamSearchParams, SamplingParams
from llmjax.sampling.settings import request_sampling
from llmjax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from llmjax.constraints.compiler import GrammarCompiler
    from llmjax.sampling.structured import StructuredOutputsParams
    from llmjax.turns import Turn

# A string, token ids, a dict with "prompt" or "prompt_token_ids", perhaps images and "cache_salt", or a `Prompt`.
PromptInput = Union[str, Sequence[int], Mapping[str, Any], "Prompt"]

MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", *MEDIA_KEYS})
# vLLM's, for which there is nothing here yet.
UNSUPPORTED_PROMPT_KEYS = frozenset({"prompt_embeds"})


@dataclass(frozen=True)
class CheckedForm:
    """What outputs must match: a grammar, and a matcher in its initial state if the engine is in this process."""

    grammar: str
    matcher: LLMatcher | None


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
        text: what it was before; None: it came as tokens.
        cache_salt: only requests with the same salt share cached prefixes.
        media: its images; None: it has none.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    media: PromptMedia | None = None


class Requests:
    """Checks what users ask for, and makes engine requests of it.

    Args:
        config: limits and policies.
        info: describes the engine that the requests are for.
        new_id: makes that engine's ids of requests.
        tokenizer: None: token ids in, token ids out.
        compiles: whether grammars are compiled here, because the engine is in this process.
        images: makes prompts with images; None: the model sees none.

    Attributes:
        limits: what requests may ask of that engine.
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
        self.limits = RequestLimits.of(config, info)
        self.images = images
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._compiles = compiles
        self._pooler = info.pooler
        own = None if info.vision is None else info.vision.adapter
        self._own = None if own is None else Adaptation.of([ScaledAdapter(reference=own)])
        self._eos = info.eos_token_ids | (tokenizer.eos_token_ids if tokenizer is not None else frozenset())

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival: float,
        priority: int,
        form: CheckedForm | None,
        thinking: ThinkingBudget | None,
        adaptation: Adaptation | None,
    ) -> EngineRequest:
        """A request to generate; other arguments and errors as for `Frontend.open`.

        Args:
            arrival: when it came, in seconds of time.monotonic().
        """
        params = self._expanded(params)
        self._check(params)
        room = self._room(prompt)
        bad_words = self._bad_words(params.bad_words)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        # Resolved again by the engine for each continuation's seed; here for its errors.
        request_sampling(params, vocab_size=self.limits.vocab_size, seed=0, eos_ids=stops, bad_words=bad_words)
        form = form or self.checked(params)
        return EngineRequest(
            request_id=self._new_id(),
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=stops,
            bad_words_token_ids=bad_words,
            grammar=None if form is None else form.grammar,
            matcher=None if form is None else form.matcher,
            thinking=thinking,
            media=prompt.media,
            adaptation=self.adapted(prompt.media, adaptation),
            priority=priority,
            cache_salt=prompt.cache_salt,
            arrival_time=arrival,
        )

    def adapted(self, media: PromptMedia | None, adaptation: Adaptation | None) -> Adaptation | None:
        """What a prompt is computed with: where it has pictures and names no adapter, the model's own one."""
        return self._own if adaptation is None and media is not None else adaptation

    def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        keep_logprobs: bool = True,
        adaptation: Adaptation | None = None,
    ) -> BeamSearch:
        """Checks a search and begins it; arguments and errors as for `Frontend.open`.

        Args:
            keep_logprobs: so that what is found has them.
        """
        read = self.prompt(prompt, cache_salt=cache_salt)
        if read.media is not None:
            raise InvalidRequest("a beam search does not take images", field="multi_modal_data")
        if params.candidates > self.limits.max_logprobs:
            raise InvalidRequest(
                f"a beam_width of {params.beam_width} needs the log-probabilities of {params.candidates} tokens; the "
                f"server gives at most {self.limits.max_logprobs} (--max-logprobs)",
                field="beam_width",
            )
        max_tokens = min(params.max_tokens, self._room(read))
        if max_tokens * params.beam_width > MAX_BEAM_TOKENS:
            raise InvalidRequest(
                f"a search of {params.beam_width} beams may have at most {MAX_BEAM_TOKENS // params.beam_width} "
                f"max_tokens, not {max_tokens}",
                field="max_tokens",
            )
        return BeamSearch(
            read.token_ids,
            params,
            max_tokens=max_tokens,
            eos=self._eos,
            keep_logprobs=keep_logprobs,
            cache_salt=read.cache_salt,
            adaptation=adaptation,
        )

    def checked(self, params: SamplingParams) -> CheckedForm | None:
        """What ``structured_outputs`` demands; None: nothing. Any thread may ask, and it may take seconds.

        Raises:
            InvalidRequest: its form is wrong, or takes too much.
        """
        form = params.structured_outputs
        return None if form is None else self.check(form, self.known(form)[0])

    def known(self, form: StructuredOutputsParams) -> tuple[str, CheckedForm | None]:
        """A form's grammar, and the checked form if it was used recently. Raises what ``checked`` raises. Any thread
        may call this; it does not wait."""
        if self._grammars is None:
            raise InvalidRequest(f"{form.field} needs a tokenizer", field=form.field)
        grammar = self._grammars.grammar(form)
        return grammar, self._form(grammar) if self._grammars.known(grammar, field=form.field) else None

    def check(self, form: StructuredOutputsParams, grammar: str, turn: Turn | None = None) -> CheckedForm:
        """Checks a form's grammar. Raises what ``checked`` raises.

        Args:
            turn: called if this takes long; an error that it raises ends it.
        """
        assert self._grammars is not None
        self._grammars.check(grammar, field=form.field, turn=turn)
        return self._form(grammar)

    def _form(self, grammar: str) -> CheckedForm:
        assert self._grammars is not None
        return CheckedForm(grammar, self._grammars.matcher(grammar) if self._compiles else None)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler | None:
        if self._tokenizer is None:
            return None
        from llmjax.constraints.compiler import GrammarCompiler  # no start needs it

        return GrammarCompiler(self._tokenizer, vocab_size=self.limits.vocab_size, eos_token_ids=self._eos)

    def prompt(self, prompt: PromptInput, *, cache_salt: str | None = None) -> Prompt:
        """The tokens of a prompt, not yet checked against the context.

        Args:
            cache_salt: given beside it.

        Raises:
            InvalidRequest: it is not a prompt, or brings another salt; or the model does not generate.
        """
        self._check_generates()
        if isinstance(prompt, Prompt):
            return replace(prompt, cache_salt=cache_salt)
        text, token_ids = self._tokens(prompt)
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_salt = salt_of(prompt["cache_salt"], cache_salt)
        token_ids, media = self.placed(prompt, token_ids)
        return Prompt(text, token_ids, cache_salt, media)

    def placed(self, prompt: PromptInput, token_ids: list[int]) -> tuple[list[int], PromptMedia | None]:
        """The tokens of a prompt with those of its images and videos in place of the placeholders, and the images.

        Raises:
            InvalidRequest: as ``Images.prepared`` and ``placed``, or the model sees none.
        """
        given = {name: prompt[name] for name in MEDIA_KEYS if prompt.get(name)} if isinstance(prompt, Mapping) else {}
        if self.images is None:
            if given:
                raise InvalidRequest(f"{min(given)}: {TEXT_ONLY}", field=min(given))
            return token_ids, None
        images, uuids = self.images.with_keywords(given.get("mm_processor_kwargs")), given.get("multi_modal_uuids")
        pictures, videos = media_of(given.get("multi_modal_data", {}))
        return images.placed(token_ids, images.prepared(pictures, uuids), images.prepared_videos(videos, uuids))

    def _tokens(self, prompt: PromptInput) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            check_keys(prompt)
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), ids_of(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", field="prompt")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.encode(prompt)
        return None, ids_of(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Any thread may ask.

        Raises:
            InvalidRequest: there is no tokenizer, or the text is longer than the context can hold.
        """
        if self._tokenizer is None:
            raise InvalidRequest("there is no tokenizer: give token ids instead of text", field="prompt")
        text = text if self.images is None else self.images.processor.spelled(text)
        self._tokenizer.check_length(text, max_tokens=self.limits.max_model_len)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, kept_for="")

    def _check_generates(self) -> None:
        if self._pooler is not None:
            does = "makes embeddings" if self._pooler.task == "embed" else "classifies texts"
            raise InvalidRequest(f"this model {does}; it does not generate text")

    def _expanded(self, params: SamplingParams) -> SamplingParams:
        """With -1 log-probabilities as those of the whole vocabulary."""
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        return params.clone(**dict.fromkeys(names, self.limits.vocab_size)) if names else params

    def _room(self, prompt: Prompt) -> int:
        """Checks a prompt's tokens, and returns for how many the context has room after them."""
        room = self.limits.check_prompt(len(prompt.token_ids))
        self.limits.check_ids(prompt.token_ids if prompt.media is None else prompt.media.others(prompt.token_ids))
        return room

    def _check(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            self.limits.check_logprobs(getattr(params, name), field=name)
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(f"{name} needs a tokenizer", field=name)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space."""
        if self._tokenizer is None:
            return ()
        tokenizations = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                if ids := self._tokenizer.encode(text, add_special_tokens=False):
                    tokenizations.append(tuple(ids))
        return tuple(dict.fromkeys(tokenizations))


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a prompt dict has a key that means nothing here."""
    for key, value in prompt.items():
        if key in PROMPT_KEYS:
            continue
        if key in UNSUPPORTED_PROMPT_KEYS:
            if value is None or (isinstance(value, Mapping) and not value):
                continue
            raise InvalidRequest(f"{key} is not supported yet", field=key)
        raise InvalidRequest(
            f"a prompt dict needs 'prompt' or 'prompt_token_ids', may have 'multi_modal_data', "
            f"'mm_processor_kwargs', 'multi_modal_uuids' and a 'cache_salt', and has no {key!r}",
            field="prompt",
        )


def salt_of(own: Any, given: str | None) -> str:
    """The salt that a prompt brings; one given beside it must be the same."""
    if not isinstance(own, str) or not own:
        raise InvalidRequest("cache_salt must be a non-empty string", field="cache_salt")
    if given is not None and given != own:
        raise InvalidRequest("cache_salt is given twice, and differently", field="cache_salt")
    return own


def ids_of(prompt: Any) -> list[int]:
    """Token ids as integers; raises InvalidRequest if they are none."""
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidRequest("the prompt must be text or token ids", field="prompt")
    ids = list(prompt)
    if set(map(type, ids)) <= {int}:
        return ids
    if any(isinstance(token, bool) or not hasattr(token, "__index__") for token in ids):
        raise InvalidRequest("the prompt must be text or a list of integers", field="prompt")
    return [int(token) for token in ids]
