"""Which adapters each slot of the device has, and whose sequences may run next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.engine.core.media import EncoderAdapter
from llmjax.errors import LLMJaxError

READ_SECONDS = 1.0  # how long one look at an adapter that is being read may take


class AdapterLoader(Protocol):
    """Brings adapters to the device."""

    def can_load(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool:
        """Whether adapters are ready to be loaded, after waiting up to ``seconds`` for it. If they are not, they are
        being read from now on.

        Raises:
            LLMJaxError: they never are.
        """

    def of_encoder(self, adaptation: Adaptation) -> EncoderAdapter | None:
        """What adapters that are ready to be loaded change of the encoder of images; None: nothing."""

    def load_adapter(self, slot: int, adaptation: Adaptation) -> None:
        """Writes adapters into a slot, after all earlier dispatches have run and before all later ones."""


@dataclass
class _Slot:
    number: int
    digest: str | None = None  # whose contents it has; None: nobody's
    of_encoder: EncoderAdapter | None = None  # what these change of the encoder of images; None: nothing
    holders: int = 0  # running sequences that use it
    dispatch: int = 0  # number of the last dispatch that used it
    last_use: int = 0  # counts admissions


@dataclass(frozen=True)
class _Chosen:
    """The slots of those that wait."""

    now: dict[str, _Slot] = field(default_factory=dict)  # by digest: those that may run at once
    reserved: set[int] = field(default_factory=set)  # numbers of slots that are kept for one that waits


class AdapterSlots:
    """The device's slots for adapters. Slot 0 is the model as it is, which all may use.

    The adapter that has not been used for longest makes room. A slot is given to another one only when the last
    dispatch that used it has ended. Nobody starves: slots are reserved for the first sequences that wait, and a
    reserved one takes no other new sequences, so it becomes free when those that run there have ended. Contents are
    read for those that have a slot to go to, so host memory needs no more of them than there are slots.

    Args:
        count: number of the slots, without slot 0.
        loader: reads contents, and writes them into slots.

    An example with one slot, which adapter A has: two sequences of A run, then one of B comes, then another of A. B's
    came first, so the slot is reserved for it, and A's new one waits. When both of A have ended, B gets the slot, and
    it is reserved for A.
    """

    def __init__(self, count: int, loader: AdapterLoader) -> None:
        self._loader = loader
        self._slots = [_Slot(number) for number in range(1, count + 1)]
        self._loads: dict[int, Adaptation] = {}  # by slot
        self._failed: dict[str, LLMJaxError] = {}
        self._awaited: Adaptation | None = None
        self._uses = 0
        self._dispatched = 0
        self._ended = 0

    @property
    def loaded(self) -> dict[str, int]:
        """The slot of each adaptation that has one, by digest."""
        return {slot.digest: slot.number for slot in self._slots if slot.digest is not None}

    def holders(self, digest: str) -> int:
        """Running sequences that use an adaptation."""
        return sum(slot.holders for slot in self._slots if slot.digest == digest)

    def passing(self, waiting: Sequence[Adaptation]) -> set[str]:
        """The digests of those whose sequences may run now.

        Args:
            waiting: what sequences wait for, each once, in the order of their first ones.
        """
        return set(self._choose(waiting).now)

    def take(self, adaptation: Adaptation, waiting: Sequence[Adaptation]) -> int:
        """Gives a sequence its slot, which gets the contents if it has others.

        Args:
            waiting: as for ``passing``, which has let it pass.
        """
        slot = self._choose(waiting).now[adaptation.digest]
        if slot.digest != adaptation.digest:
            slot.digest, slot.of_encoder = adaptation.digest, self._loader.of_encoder(adaptation)
            self._loads[slot.number] = adaptation
        slot.holders += 1
        self._uses += 1
        slot.last_use = self._uses
        return slot.number

    def of_encoder(self, adaptation: Adaptation) -> EncoderAdapter | None:
        """What the adapters of a sequence change of the encoder of images; None: nothing.

        Args:
            adaptation: a sequence's that has a slot, or that `passing` lets pass.
        """
        slot = next((slot for slot in self._slots if slot.digest == adaptation.digest), None)
        return self._loader.of_encoder(adaptation) if slot is None else slot.of_encoder

    def release(self, number: int) -> None:
        """A sequence that had a slot runs no more."""
        self._slots[number - 1].holders -= 1

    def take_failed(self) -> dict[str, LLMJaxError]:
        """Why contents cannot be had, by digest; each is returned once."""
        taken, self._failed = self._failed, {}
        return taken

    def read(self, adapter: AdapterReference) -> None:
        """Returns when an adapter has been read; any thread may call this. Raises LLMJaxError if it cannot be."""
        while not self._loader.can_load(Adaptation.of([ScaledAdapter(reference=adapter)]), seconds=READ_SECONDS):
            pass

    def wait(self, seconds: float) -> bool:
        """Whether somebody would run if contents had been there that are being read; waits for them up to so long."""
        if self._awaited is None:
            return False
        with suppress(LLMJaxError):  # the next choice gets it, too
            self._loader.can_load(self._awaited, seconds=seconds)
        return True

    def dispatch(self, numbers: Iterable[int]) -> None:
        """Notes the next dispatch, whose rows have these slots, and loads what it needs."""
        loads, self._loads = self._loads, {}
        for slot, adaptation in loads.items():
            self._loader.load_adapter(slot, adaptation)
        self._dispatched += 1
        for number in set(numbers) - {0}:
            self._slots[number - 1].dispatch = self._dispatched

    def ended(self) -> None:
        """Notes that the oldest dispatch which had not ended has."""
        self._ended += 1

    def forget(self) -> None:
        """Notes that all slots have lost their contents; nothing runs."""
        for slot in self._slots:
            slot.digest = slot.of_encoder = None
        self._loads = {}

    def _choose(self, waiting: Sequence[Adaptation]) -> _Chosen:
        chosen, resident = _Chosen(), {slot.digest: slot for slot in self._slots}
        self._awaited = None
        for adaptation in waiting:
            digest = adaptation.digest
            if digest in self._failed:
                continue
            if (own := resident.get(digest)) is not None:
                if own.number not in chosen.reserved:
                    chosen.now[digest] = own
                continue
            first = {slot.number for slot in chosen.now.values()}  # slots of those that come before
            free = [slot for slot in self._slots if slot.number not in chosen.reserved | first]
            if not free:
                continue
            slot = min(free, key=lambda slot: (slot.holders > 0, slot.dispatch > self._ended, slot.last_use))
            try:
                ready = self._loader.can_load(adaptation)
            except LLMJaxError as error:
                self._failed[digest] = error
                continue
            chosen.reserved.add(slot.number)
            if slot.holders or slot.dispatch > self._ended:
                continue
            if ready:
                chosen.now[digest] = slot
            elif self._awaited is None:
                self._awaited = adaptation
        return chosen
