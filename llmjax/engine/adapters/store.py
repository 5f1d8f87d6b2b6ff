"""Adapters in the host's memory: read by a thread while steps run, and ready to be written to the devices."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from llmjax.adapters.adapter import Adapter
from llmjax.adapters.read import AdapterReader
from llmjax.adapters.reference import Adaptation, AdapterReference
from llmjax.engine.adapters.of_encoder import EncoderAdapters
from llmjax.engine.adapters.stacks import AdapterStacks, Values
from llmjax.engine.programs.threads import CompileThreads
from llmjax.errors import CheckpointError

MOST_KNOWN = 1024  # sums of adapters of which it is known whether they change the encoder


@dataclass(frozen=True)
class _Read:
    """The values of adapters: for a place, and for the encoder of images, of which they may change nothing."""

    values: Values
    of_encoder: Values | None


class AdapterStore:
    """The adapters that have been read. Any thread may ask for them.

    Args:
        reader: reads them.
        stacks: the places that they go to.
        of_encoder: the form of what they change of the encoder of images; None: there is none.
        most: adapters that are kept in memory, and sums of them: at least as many as there are places.
    """

    def __init__(
        self, reader: AdapterReader, stacks: AdapterStacks, *, most: int, of_encoder: EncoderAdapters | None = None
    ) -> None:
        self._reader, self._stacks, self._of_encoder = reader, stacks, of_encoder
        self._most = most
        self._lock = threading.Lock()  # guards the futures
        self._kept: OrderedDict[str, Adapter] = OrderedDict()  # by digest; the thread's alone
        self._under_way: OrderedDict[str, Future[_Read]] = OrderedDict()  # by digest, in the order of their use
        self._changing: OrderedDict[str, bool] = OrderedDict()  # by digest: whether the encoder changes
        self._thread = CompileThreads(1)  # which the interpreter does not wait for

    def ready(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool:
        """Whether `values` need not wait, after waiting up to ``seconds`` for it.

        Raises:
            CheckpointError: adapters cannot be read, or do not fit the model or the settings.
        """
        future = self._values(adaptation)
        if not future.done() and wait([future], timeout=seconds).not_done:
            return False
        self._result(adaptation, future)
        return True

    def values(self, adaptation: Adaptation) -> Values:
        """The values of adapters for a place, which are then no longer kept; raises as `ready`."""
        read = self._result(adaptation, self._values(adaptation))
        self._under_way.pop(adaptation.digest, None)
        return read.values

    def changes_encoder(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool | None:
        """Whether adapters change the encoder of images, after waiting up to ``seconds`` to know it; None: that is not
        known yet, and they are being read. Raises as `ready`."""
        if self._of_encoder is None:
            return False
        if adaptation.digest not in self._changing and self.ready(adaptation, seconds=seconds):
            self._changing[adaptation.digest] = self.of_encoder(adaptation) is not None
            while len(self._changing) > MOST_KNOWN:
                self._changing.popitem(last=False)
        return self._changing.get(adaptation.digest)

    def of_encoder(self, adaptation: Adaptation) -> Values | None:
        """The values of adapters for the encoder of images; None: they change nothing of it. Raises as `ready`."""
        return self._result(adaptation, self._values(adaptation)).of_encoder

    def close(self, *, wait: bool = True) -> None:
        """Stops reading, as `CompileThreads.close` does."""
        self._thread.close(wait=wait)

    def _values(self, adaptation: Adaptation) -> Future[_Read]:
        with self._lock:
            future = self._under_way.get(adaptation.digest)
            if future is None:
                future = self._under_way[adaptation.digest] = self._thread.submit(self._read, adaptation)
                while len(self._under_way) > self._most:  # whose requests have gone
                    self._under_way.popitem(last=False)
            self._under_way.move_to_end(adaptation.digest)
            return future

    def _result(self, adaptation: Adaptation, future: Future[_Read]) -> _Read:
        try:
            return future.result()
        except BaseException:
            self._under_way.pop(adaptation.digest, None)  # the files may be other ones the next time
            raise

    def _read(self, adaptation: Adaptation) -> _Read:
        scaled = [(self._adapter(part.reference), part.scale) for part in adaptation.parts]
        whole = Adapter.sum_of(scaled, digest=adaptation.digest)
        if whole.rank > self._stacks.layout.rank:
            raise CheckpointError(
                f"{adaptation.name}: the ranks of these adapters add up to {whole.rank}; max_lora_rank is "
                f"{self._stacks.layout.rank}"
            )
        form, parts = self._of_encoder, whole.of_encoder
        of_encoder = None if form is None or not parts else form.values_of(parts)
        return _Read(self._stacks.values_of(whole), of_encoder)

    def _adapter(self, reference: AdapterReference) -> Adapter:
        if (kept := self._kept.get(reference.digest)) is None:
            kept = self._kept[reference.digest] = self._reader.read(Path(reference.path), reference.digest)
        self._kept.move_to_end(reference.digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept
