"""Beam search: of all continuations of a prompt, the likeliest few are kept at each step. It needs only an engine's
log-probabilities of next tokens, which its user asks for; the prefix cache has what came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from llmjax.adapters.reference import Adaptation
from llmjax.outputs import BeamSearchSequence, CompletionOutput, TokenLogprobs
from llmjax.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams

Decode = Callable[[list[int]], str]
DecodeWhole = Callable[[list[int]], tuple[str, list[int]]]

# Of a search: its width times its length. Every token of every beam is a request of its own.
MAX_BEAM_TOKENS = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation, as its last token and the beam before it; beams share what they have in common."""

    before: Beam | None
    token: int
    cum_logprob: float
    length: int  # tokens, of the prompt too
    logprobs: TokenLogprobs | None  # log-probabilities from which the last token was chosen; None: they are not kept

    def path(self) -> list[Beam]:
        """The beam after each of its tokens."""
        beam: Beam | None = self
        beams = []
        while beam is not None:
            beams.append(beam)
            beam = beam.before
        return beams[::-1]


class BeamSearch:
    """A search under way: its user has the next token of each of ``prompts`` scored, and gives ``take`` the results.

    Args:
        prompt: its token ids.
        params: how to search.
        max_tokens: most tokens to generate: those that ``params`` asks for, as far as they fit.
        eos: tokens that end a text.
        keep_logprobs: whether continuations have log-probabilities.
        cache_salt: the cache salt of every request of the search.
        adaptation: adapters of every request; None: the model as it is.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        *,
        max_tokens: int,
        eos: frozenset[int],
        keep_logprobs: bool = True,
        cache_salt: str | None = None,
        adaptation: Adaptation | None = None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.cache_salt = cache_salt
        self.adaptation = adaptation
        self._end = len(prompt) + max_tokens
        self._eos = eos
        self._keep_logprobs = keep_logprobs
        self._beams: list[Beam] = []
        self._complete: list[Beam] = []  # the best of those that have ended, the best first
        self.steps = 0
        self.done = False

    @property
    def step_params(self) -> SamplingParams:
        """Sampling parameters with which each of ``prompts`` is computed."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=self.params.candidates,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompt with each continuation that still grows."""
        if not self.steps:
            return [self.prompt]
        return [self.prompt + [beam.token for beam in last.path()] for last in self._beams]

    def take(self, scores: Sequence[TokenLogprobs]) -> None:
        """Lets the continuations grow by one token.

        Args:
            scores: for each of ``prompts`` the likeliest next tokens.
        """
        width, candidates = self.params.beam_width, self.params.candidates
        grown: list[Beam] = []
        beams: list[Beam | None] = [*self._beams] or [None]
        for before, found in zip(beams, scores, strict=True):
            kept = found if self._keep_logprobs else None
            so_far, length = (0.0, len(self.prompt)) if before is None else (before.cum_logprob, before.length)
            for token, entry in found.items():
                if entry.rank is None or entry.rank <= candidates:
                    beam = Beam(before, token, so_far + entry.logprob, length + 1, kept)
                    (self._complete if self._ends(beam) else grown).append(beam)
        self._complete = nlargest(width, self._complete, key=self.score)
        self._beams = nlargest(width, grown, key=self.score)
        self.steps += 1
        self.done = len(self.prompt) + self.steps >= self._end or not self._beams or not self._may_improve()

    def score(self, beam: Beam) -> float:
        """The score by which beams are compared."""
        return float(beam.cum_logprob / (beam.length - (beam.token in self._eos)) ** self.params.length_penalty)

    def best(self) -> list[Beam]:
        """The best beams, the best first; those that have not ended are as long as they may be."""
        return nlargest(self.params.beam_width, self._complete + self._beams, key=self.score)

    def outputs(self, decode: DecodeWhole | None) -> list[CompletionOutput]:
        """The best, as the continuations of a request.

        Args:
            decode: gives the text of tokens that follow the prompt, and where each begins; None: they have none.
        """
        return [self._output(index, beam, decode) for index, beam in enumerate(self.best())]

    def _output(self, index: int, beam: Beam, decode: DecodeWhole | None) -> CompletionOutput:
        path, ended = beam.path(), self._ends(beam)
        said = path[:-1] if ended else path
        shown = path if self.params.include_stop_str_in_output else said
        text, offsets = ("", None) if decode is None else decode([part.token for part in said])
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=[part.token for part in shown],
            cumulative_logprob=beam.cum_logprob,
            logprobs=[part.logprobs for part in shown if part.logprobs is not None] if self._keep_logprobs else None,
            text_offsets=None if offsets is None else offsets[: len(shown)],
            finish_reason="stop" if ended else "length",
            stop_reason=beam.token if ended else None,
        )

    def sequences(self, decode: Decode | None) -> list[BeamSearchSequence]:
        """The best, with the prompt.

        Args:
            decode: gives the text of tokens; None: they have none.
        """
        sequences = []
        for beam in self.best():
            path, ended = beam.path(), self._ends(beam)
            tokens = self.prompt + [part.token for part in path]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=[part.logprobs for part in path if part.logprobs is not None],
                    cum_logprob=beam.cum_logprob,
                    text=None if decode is None else decode(tokens),
                    finish_reason="stop" if ended else "length",
                    stop_reason=beam.token if ended else None,
                )
            )
        return sequences

    def _ends(self, beam: Beam) -> bool:
        return beam.token in self._eos and not self.params.ignore_eos

    def _may_improve(self) -> bool:
        """Whether a beam can still become one of the best: at most its log-probability stays as it is, and its length
        becomes what is best for its score."""
        if len(self._complete) < self.params.beam_width:
            return True
        penalty = self.params.length_penalty
        last = self.score(self._complete[-1])
        return any(
            max(beam.cum_logprob / beam.length**penalty, beam.cum_logprob / self._end**penalty) > last
            for beam in self._beams
        )
