"""What the sampler needs to know of one request, worked out once on the host."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from llmjax.arrays import Floats, Ints
from llmjax.errors import InvalidRequest
from llmjax.sampling.params import MAX_BAD_WORDS, SamplingParams

# A bad word is tokenized twice, with and without a space before it.
MAX_BANS = 2 * MAX_BAD_WORDS
# Factors past this change nothing more, but they or their reciprocals leave float32 and turn infinities into NaN.
EXTREME = 1e30


class Feature(enum.IntFlag):
    """What a request asks of the sampler beyond the largest logit. A step does the union of its rows' work."""

    RANDOM = 1  # temperature above 0
    FILTER = 2  # top_k, top_p or min_p
    PENALTY = 4  # repetition, frequency or presence
    BIAS = 8  # logit_bias, allowed_token_ids, one-token bad words, min_tokens
    BAN = 16  # bad words of several tokens
    LOGPROBS = 32
    WINDOW = 64  # penalties look at the last tokens alone
    SCORED = 128  # log-probabilities of named tokens


SETTINGS = np.dtype(
    [
        ("key", np.uint32, 2),  # the 64-bit seed, high word first: the data of jax.random.key(seed)
        ("temperature", np.float32),  # 0: greedy
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0: off
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("window", np.int32),  # tokens that penalties look at; 0: all
        ("features", np.int32),
    ]
)
SETTINGS_WORDS = SETTINGS.itemsize // 4


@dataclass(frozen=True)
class RequestSampling:
    """One request's sampling, ready to be packed.

    Attributes:
        words: i32 [SETTINGS_WORDS], the ``SETTINGS`` as integers. The packer keeps one table [slots, SETTINGS_WORDS]
            and gathers from it each step; ``SamplingBatch.from_words`` takes it apart on the device. All zeros: greedy.
        features: what the request uses; slot set-up is needed only if ``uses_slot``.
        bias_fill: the bias of tokens that ``bias_ids`` does not name: 0, or -inf with ``allowed_token_ids``.
        bias_ids: i32 [K], distinct, in ``[0, vocab_size)``.
        bias_values: f32 [K], -inf where the token is forbidden.
        min_tokens: outputs before which ``stop_ids`` are forbidden on top.
        stop_ids: i32 [L], the end-of-sequence and stop ids; empty if ``min_tokens`` is 0.
        stop_values: f32 [L], the bias of ``stop_ids`` from the ``min_tokens``-th output on.
        bad_words: token ids of the bad words of two tokens or more.
        window: tokens that penalties look at; 0: all.
        scored: tokens whose log-probabilities are asked for.
    """

    words: Ints = field(repr=False)
    features: Feature
    bias_fill: float
    bias_ids: Ints
    bias_values: Floats
    min_tokens: int
    stop_ids: Ints
    stop_values: Floats
    bad_words: tuple[tuple[int, ...], ...]
    window: int = 0
    scored: tuple[int, ...] = ()

    @property
    def uses_slot(self) -> bool:
        """Whether the request's slot on the device must be set up before its first step."""
        return bool(self.features & (Feature.PENALTY | Feature.BIAS | Feature.BAN | Feature.SCORED))

    def with_seed(self, seed: int) -> RequestSampling:
        """The same for another of the ``n`` outputs: the seed is all that they differ in."""
        words = self.words.copy()
        words.view(SETTINGS)["key"] = _key(seed)
        words.flags.writeable = False
        return replace(self, words=words)

    @property
    def bans_vary(self) -> bool:
        """Whether ``bans`` depends on the history: some bad word has three tokens or more."""
        return any(len(word) > 2 for word in self.bad_words)

    def bans(self, history: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Pairs (previous, token): token is forbidden at the next position if the last token is previous.

        The last token is still on the device when the step is packed, hence the pairs. Prompt and output count as one
        text, so a bad word that the prompt begins cannot be completed either.

        Args:
            history: prompt and output ids without the last token.
        """
        return tuple(dict.fromkeys((w[-2], w[-1]) for w in self.bad_words if _ends_with(history, w[:-2])))


def request_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int,
    eos_ids: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> RequestSampling:
    """Resolves ``params`` against a model.

    Args:
        params: what the user asked for.
        vocab_size: number of logits.
        seed: ``params.seed``, or one that the engine drew; the i-th of ``n`` outputs takes ``seed + i``. 64 bits count.
        eos_ids: the model's end-of-sequence ids; those past the vocabulary can never be sampled and are left out.
        bad_words: ``params.bad_words`` as token ids, each in every tokenization to be forbidden.

    Raises:
        InvalidRequest: a token id lies outside the vocabulary, or no token may be sampled at all.
    """
    logit_bias = params.logit_bias or {}
    _check_ids("logit_bias", logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    words = _distinct_words(bad_words, vocab_size)

    forbidden = {word[0] for word in words if len(word) == 1}
    fill = 0.0 if params.allowed_token_ids is None else -np.inf
    bias = dict.fromkeys(params.allowed_token_ids or (), 0.0)
    bias |= {token: value for token, value in logit_bias.items() if fill == 0.0 or token in bias}
    bias |= dict.fromkeys(forbidden, -np.inf)
    stops: list[int] = []
    if params.min_tokens:
        eos = () if params.ignore_eos else [token for token in eos_ids if 0 <= token < vocab_size]
        stops = sorted({*params.stop_token_ids, *eos})
    _check_something_left(bias, fill, stops, vocab_size)

    several = tuple(word for word in words if len(word) > 1)
    settings = _settings(params, vocab_size, seed)
    if bias or fill or stops:
        settings["features"] |= Feature.BIAS
    if several:
        settings["features"] |= Feature.BAN
    packed = settings.reshape(1).view(np.int32)
    packed.flags.writeable = False
    return RequestSampling(
        words=packed,
        features=Feature(int(settings["features"])),
        bias_fill=fill,
        bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
        bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
        min_tokens=params.min_tokens,
        stop_ids=np.array(stops, np.int32),
        stop_values=np.array([bias.get(token, fill) for token in stops], np.float32),
        bad_words=several,
        window=int(settings["window"]),
        scored=tuple(params.logprob_token_ids or ()),
    )


def _settings(params: SamplingParams, vocab_size: int, seed: int) -> npt.NDArray[np.void]:
    settings = np.zeros((), SETTINGS)
    settings["key"] = _key(seed)
    settings["top_p"] = params.top_p
    settings["top_k"] = params.top_k if 0 < params.top_k < vocab_size else 0
    settings["min_p"] = params.min_p
    settings["presence"] = params.presence_penalty
    settings["frequency"] = params.frequency_penalty
    settings["repetition"] = np.clip(params.repetition_penalty, 1 / EXTREME, EXTREME)
    features = Feature(0)
    if not params.greedy:
        settings["temperature"] = min(params.temperature, EXTREME)
        features |= Feature.RANDOM
        if settings["top_k"] or settings["top_p"] < 1 or settings["min_p"] > 0:
            features |= Feature.FILTER
    penalized = params.presence_penalty or params.frequency_penalty or settings["repetition"] != 1
    if penalized and params.repeat_last_n != 0:
        features |= Feature.PENALTY
        if params.repeat_last_n not in (None, -1):
            settings["window"] = params.repeat_last_n
            features |= Feature.WINDOW
    if params.logprobs is not None or params.logprob_token_ids:
        features |= Feature.LOGPROBS
    if params.logprob_token_ids:
        features |= Feature.SCORED
    settings["features"] = features
    return settings


def _key(seed: int) -> list[int]:
    return [(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]


def _distinct_words(bad_words: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    words = tuple(dict.fromkeys(tuple(word) for word in bad_words))
    if () in words:
        raise InvalidRequest("bad_words holds a word that has no tokens", field="bad_words")
    if len(words) > MAX_BANS:
        message = f"bad_words has {len(words)} tokenizations; at most {MAX_BANS} are allowed"
        raise InvalidRequest(message, field="bad_words")
    for word in words:
        _check_ids("bad_words", word, vocab_size)
    return words


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token in ids:
        if not 0 <= token < vocab_size:
            message = f"{name} holds token id {token}; the vocabulary has {vocab_size} tokens"
            raise InvalidRequest(message, field=name)


def _check_something_left(bias: dict[int, float], fill: float, stops: list[int], vocab_size: int) -> None:
    others = vocab_size - len(bias) if fill == 0.0 else 0
    left = {token for token, value in bias.items() if value != -np.inf}
    if not others and not left:
        raise InvalidRequest("bad_words forbids every token that may be sampled", field="bad_words")
    if not left.difference(stops) and others <= len(set(stops).difference(bias)):
        raise InvalidRequest("min_tokens forbids every token that may be sampled", field="min_tokens")


def _ends_with(history: Sequence[int], tail: Sequence[int]) -> bool:
    return len(history) >= len(tail) and all(history[i - len(tail)] == token for i, token in enumerate(tail))
