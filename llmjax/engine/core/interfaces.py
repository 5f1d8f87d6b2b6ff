"""The interfaces that the engine's core uses: the runner, which computes steps, and speculation, which makes drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.arrays import Ints

if TYPE_CHECKING:
    from llmjax.adapters.reference import Adaptation
    from llmjax.engine.core import media as images
    from llmjax.engine.core import media_rows, request, scheduler
    from llmjax.engine.drafts.drafter import Drafter
    from llmjax.sampling.settings import RequestSampling

NO_TOKEN = -1  # among the tokens of a step: nothing was sampled
NOT_FINITE = -2  # among the tokens of a step: there were NaN or infinities among the logits


class Logprobs(Protocol):
    """Log-probabilities on the device. N stands for the dimensions of the tokens that are scored, K for the most likely
    tokens of each, and S for the tokens of each that were named."""

    @property
    def logprob(self) -> Any: ...  # f32 [N], of the token itself
    @property
    def rank(self) -> Any: ...  # i32 [N], from 1
    @property
    def top_ids(self) -> Any: ...  # i32 [N, K]; -1 where there are fewer
    @property
    def top_logprobs(self) -> Any: ...  # f32 [N, K]
    @property
    def scored(self) -> Any: ...  # f32 [N, S]


class StepOutput(Protocol):
    """The results that a step leaves on the device for the host. R rows, T tokens."""

    @property
    def logprobs(self) -> Logprobs | None: ...  # for the sampled tokens, by step and row
    @property
    def prompt_logprobs(self) -> Logprobs | None: ...  # for the prompt token after each token [T]
    @property
    def vectors(self) -> Any: ...  # f32 [R, size], pooled; None: the model generates
    @property
    def token_vectors(self) -> Any: ...  # f32 [T, size]


class Bucket(Protocol):
    """The shape of the program that a step ran."""

    @property
    def rows(self) -> int: ...
    @property
    def decode(self) -> bool: ...


class PendingStep(Protocol):
    """A dispatched step whose result has not been read. One whose plan ``waits`` has none before `Runner.sample`."""

    @property
    def plan(self) -> scheduler.StepPlan: ...
    @property
    def bucket(self) -> Bucket: ...
    @property
    def output(self) -> StepOutput: ...

    def tokens(self) -> list[tuple[int, ...]]:
        """Waits for the tokens that each row sampled."""


class EncoderRun(Protocol):
    """A run of the encoder, which goes in parts."""

    @property
    def encodings(self) -> Sequence[images.Encoding]:
        """Its images."""

    @property
    def left(self) -> int:
        """Parts that have not been started."""

    def start_part(self) -> None:
        """Starts the next part, before all later dispatches run."""


class Runner(Protocol):
    """Computes steps on the devices."""

    def most_steps(self, rows: int) -> int:
        """Decode steps that a dispatch of this many rows may take now."""

    def most_drafts(self, rows: int) -> int:
        """Drafts of its next tokens that each of this many rows may have now."""

    def prepare_masks(self) -> None:
        """Compiles what masked steps need, if that has not begun."""

    def can_sample_masked(self, *, seconds: float = 0.0) -> bool:
        """Whether steps can be sampled under masks, after waiting up to ``seconds`` for it.

        Raises:
            CompileError: they never can.
        """

    def can_encode(self, media: images.PromptMedia, adaptation: Adaptation | None, *, seconds: float = 0.0) -> bool:
        """Whether the images of a prompt can be encoded, with the adapters of its request, after waiting up to
        ``seconds`` for it.

        Raises:
            CompileError: they never can.
        """

    def encoder_run(self, encodings: Sequence[images.Encoding]) -> EncoderRun:
        """A run of the encoder on the first of some images: on as many as go together."""

    def dispatch(
        self,
        plan: scheduler.StepPlan,
        *,
        tables: Any,
        sampling: Mapping[request.Sequence, RequestSampling],
        media: media_rows.MediaRows,
    ) -> PendingStep:
        """Starts a step and returns without waiting for it.

        Args:
            tables: what has changed in the page tables since the dispatch before.
            sampling: resolved sampling of the plan's sequences.
            media: where the rows of the plan's images are.
        """

    def sample(self, pending: PendingStep, mask: Ints) -> PendingStep:
        """Starts what a dispatch of this runner, whose plan ``waits``, has left to do.

        Args:
            mask: bits of the tokens that its rows may sample: i32 [rows, words].
        """

    def read_pages(self, group: int, pages: Sequence[int]) -> Any:
        """Starts to read pages of a group of layers, with the content after all earlier dispatches have run."""

    def write_pages(self, group: int, pages: Sequence[int], contents: Sequence[Any]) -> None:
        """Writes pages of a group of layers before all later dispatches run."""


class Speculation(Protocol):
    """Drafts the next tokens of sequences."""

    def drafter(self, tokens: list[int]) -> Drafter:
        """The drafter of a sequence with these tokens, which may grow."""

    def drafts(self, running: list[request.Sequence], *, most: int) -> dict[request.Sequence, tuple[int, ...]]:
        """Drafts of the next tokens of sequences, at most ``most`` for each; none where they do not pay."""

    def record(self, *, rows: int, seconds: float, drafts: int) -> None:
        """Notes what a step took.

        Args:
            rows: rows of the program, which may be more than the step had.
            drafts: most drafts that a row had; 0: there were none.
        """
