"""What a process that pulls a model is told, and what it answers: JSON lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmjax.pulled.names import PullName


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be pulled.

    Args:
        root: the folder of pulled models.
        registry: base URL of the registry.
        token: the hub's; None: that of the environment, or the stored login.
        known: whether a model of that name is served, whose files stay whatever comes.
    """

    name: PullName
    root: Path
    registry: str
    token: str | None = None
    known: bool = False

    def data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {**dataclasses.asdict(self), "root": str(self.root)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Order:
        return cls(**{**data, "name": PullName(**data["name"]), "root": Path(data["root"])})


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What has come of it; see `llmjax.checkpoint.pulled.PulledModel`."""

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
