"""The adapters that requests may name, on the users' side of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.adapters.request import LoRARequest
from llmjax.config import EngineConfig
from llmjax.errors import InvalidRequest, UnknownAdapter

MOST_ADAPTERS = 4096  # that requests may name at one time
MOST_NAME = 256  # characters


@dataclass(frozen=True, kw_only=True)
class NamedAdapter:
    """An adapter that requests may name.

    Attributes:
        source: where it came from, as a user has said it.
        base: the name of the model that it is said to be for; None: the model's own.
    """

    reference: AdapterReference
    source: str
    base: str | None = None


class AdapterRegistry:
    """Names of adapters, and what requests without a name get.

    It holds references alone: engines read the contents, so a request that has its adapter keeps it, whatever becomes
    of the name.

    Args:
        config: the settings.
        names: names of the model itself.
    """

    def __init__(self, config: EngineConfig, *, names: Iterable[str]) -> None:
        self.room = config.adapter_slots
        self._reserved = frozenset(names)
        self._adapters: dict[str, NamedAdapter] = {}
        self._numbers = 0
        self._fixed: list[AdapterReference] = []
        self._scales: list[float] = []

    @property
    def listed(self) -> list[NamedAdapter]:
        """All of them, in the order in which they were added."""
        return list(self._adapters.values())

    def find(self, name: str) -> Adaptation | None:
        """What requests get that name an adapter; None: there is none of that name."""
        found = self._adapters.get(name)
        return None if found is None else Adaptation.of([ScaledAdapter(reference=found.reference)])

    def named(self, name: str) -> NamedAdapter | None:
        """The adapter of that name; None: there is none."""
        return self._adapters.get(name)

    def known(self, asked: LoRARequest) -> Adaptation | None:
        """What a request gets that brings its adapter; None: it has to be added first."""
        found = self._adapters.get(asked.lora_name)
        if found is None or asked.load_inplace:
            return None
        same = (found.source, found.reference.number) == (asked.lora_path, asked.lora_int_id)
        return self.find(asked.lora_name) if same else None

    def check_new(self, name: str, *, number: int | None = None, replace: bool) -> None:
        """Checks the name of an adapter that is to be added.

        Args:
            number: its number; None: it gets a new one.
            replace: whether it may be the name of an adapter, which it replaces then.

        Raises:
            InvalidRequest: there is no room for adapters, or the name or the number is wrong or taken.
        """
        if not self.room:
            raise InvalidRequest("this engine has no room for adapters (--enable-lora)", field="lora_name")
        if not name or len(name) > MOST_NAME or not name.isprintable():
            raise InvalidRequest(
                f"an adapter's name has 1 to {MOST_NAME} printable characters, unlike {name[:80]!r}", field="lora_name"
            )
        if name in self._reserved:
            raise InvalidRequest(f"{name!r} is the name of the model; give the adapter another one", field="lora_name")
        if name in self._adapters and not replace:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already (load_inplace replaces it)", field="lora_name"
            )
        taken = {one.reference.number: one.reference.name for one in self._adapters.values()}
        if taken.get(number or 0, name) != name:
            raise InvalidRequest(
                f"lora_int_id {number} is that of the adapter {taken[number or 0]!r}", field="lora_int_id"
            )
        if name not in self._adapters and len(self._adapters) >= MOST_ADAPTERS:
            raise InvalidRequest(f"{MOST_ADAPTERS} adapters are loaded already", field="lora_name")

    def new_number(self) -> int:
        """A number for an adapter that is to be added."""
        self._numbers += 1
        return self._numbers

    def add(self, adapter: NamedAdapter) -> None:
        """Adds an adapter whose name has been checked, or puts it in the place of the one of that name."""
        self._numbers = max(self._numbers, adapter.reference.number)
        self._adapters[adapter.reference.name] = adapter

    def remove(self, name: str, *, number: int | None = None) -> None:
        """Takes an adapter out: no new request gets it.

        Args:
            number: what its number has to be; None: any.

        Raises:
            UnknownAdapter: there is none of that name and that number.
        """
        found = self._adapters.get(name)
        if found is None or number not in (None, found.reference.number):
            raise UnknownAdapter(name)
        del self._adapters[name]

    # llama-server's adapters: those of ``lora`` and ``lora_scaled``, by their place in this list.

    def fix(self, adapters: Sequence[tuple[AdapterReference, float]]) -> None:
        """Sets the adapters that requests without a name get, with the factor of each."""
        self._fixed = [reference for reference, _ in adapters]
        self._scales = [scale for _, scale in adapters]

    @property
    def fixed(self) -> list[ScaledAdapter]:
        """The adapters that requests without a name get, with their factors now."""
        return [ScaledAdapter(reference=one, scale=scale) for one, scale in zip(self._fixed, self._scales, strict=True)]

    def set_scales(self, scales: dict[int, float]) -> None:
        """Sets the factors of the fixed adapters, by their places; those that are not named get 0.

        Raises:
            InvalidRequest: a place is not there.
        """
        self._scales = self._checked_scales(scales)

    def scaled(self, scales: dict[int, float] | None = None) -> Adaptation:
        """What requests get that name no adapter.

        Args:
            scales: the request's own, as for ``set_scales``; None: those of all.

        Raises:
            InvalidRequest: a place is not there.
        """
        own = self._scales if scales is None else self._checked_scales(scales)
        return Adaptation.of(
            ScaledAdapter(reference=one, scale=scale) for one, scale in zip(self._fixed, own, strict=True)
        )

    def _checked_scales(self, scales: dict[int, float]) -> list[float]:
        if unknown := [place for place in scales if not 0 <= place < len(self._fixed)]:
            raise InvalidRequest(f"there is no adapter {unknown[0]}; --lora names {len(self._fixed)}", field="lora")
        return [scales.get(place, 0.0) for place in range(len(self._fixed))]
