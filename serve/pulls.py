"""Models that are fetched while the server runs: they join its models, and leave them when they are deleted."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llmjax.checkpoint.pulled import PulledModel, PulledModels, folder_of_pulled
from llmjax.config import OF_ONE_MODEL, EngineConfig
from llmjax.config_file import Configs, ServedModel
from llmjax.errors import InvalidRequest, ModelUnavailable
from llmjax.pulled.names import PullName, parse_name
from llmjax.pulled.order import Fetched, Order
from llmjax.pulled.process import fetched
from llmjax.pulled.progress import Step
from llmjax.serve.context import unknown_model
from llmjax.serve.errors import ApiError, retry_later
from llmjax.serve.models import Entry

if TYPE_CHECKING:
    from llmjax.serve.several import SeveralModels

logger = logging.getLogger(__name__)

MOST_PULLS = 4  # at the same time
BUSY_SECONDS = 30.0  # after which asking again makes sense where there are as many


@dataclass(eq=False)
class _Pull:
    """A pull that goes on.

    Attributes:
        steps: what has been told, the last of each kind and file.
        followers: requests that wait for it; without one it ends, unless it is ``joining``.
        joining: whether all has come.
    """

    steps: dict[tuple[str, str | None], Step] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    followers: int = 0
    joining: bool = False
    task: asyncio.Task[None] | None = None

    def note(self, step: Step) -> None:
        self.steps[step.status, step.digest] = step
        self.pulse()

    def pulse(self, _: object = None) -> None:
        self.changed.set()
        self.changed.clear()


class Pulls:
    """Fetches models for a server, and removes them.

    Args:
        models: they join these, and leave them.
        configs: the settings that all models have in common.
    """

    def __init__(self, models: SeveralModels, configs: Configs) -> None:
        self._models = models
        self._configs = configs
        self._registry = configs.server.ollama_registry
        self._records = records_of(configs.engine)
        self._running: dict[str, _Pull] = {}
        self._deleting: set[str] = set()

    @property
    def running(self) -> Sequence[_Pull]:
        """The pulls that go on."""
        return list(self._running.values())

    async def follow(self, name: str) -> AsyncGenerator[Step, None]:
        """What happens while a model is fetched; requests for the same one share a pull, which ends when all have gone.

        Args:
            name: without the tag that says nothing.

        Raises:
            InvalidRequest: it is not a name of a model to pull.
            ApiError: as many pulls go on as may, the model is being deleted, or the server is offline.
            CheckpointError: the model cannot be fetched.
            ModelUnavailable: the server shuts down.
        """
        pull = self._running.get(name) or self._begin(name)
        assert pull.task is not None
        pull.followers += 1
        seen: dict[tuple[str, str | None], Step] = {}
        try:
            while True:
                ended = pull.task.done()
                for key, step in list(pull.steps.items()):
                    if seen.get(key) != step:
                        seen[key] = step
                        yield step
                if ended:
                    break
                if all(seen.get(key) == step for key, step in pull.steps.items()) and not pull.task.done():
                    await pull.changed.wait()
            if pull.task.cancelled():
                raise ModelUnavailable("the pull has been ended", retry_after=BUSY_SECONDS)
            pull.task.result()
        finally:
            pull.followers -= 1
            if not pull.followers and not pull.joining and not pull.task.done():
                self._forget(name, pull)
                pull.task.cancel()

    def has(self, name: str) -> bool:
        """Whether a model has been pulled."""
        return self._records.find(name) is not None

    async def delete(self, name: str) -> None:
        """Takes a model that has been pulled out of the server, and removes its files.

        Args:
            name: one of the server's models.

        Raises:
            ApiError: the settings name the model, it is being pulled, or there is none.
        """
        if name in self._running:
            raise _busy(f"the model {name} is being pulled; it can be deleted when that has ended")
        if not self._models.has(name):
            await self._discard(name)
            return
        if not self.has(name) and not self._is_ours(self._models.find(name)):
            raise ApiError(
                f"the model {name} is named by the server's settings, and was not pulled: it is not deleted; "
                "without its files, which `llmjax rm` removes, the server could not start again",
                status=409,
                param="model",
                code="not_pulled",
            )
        self._deleting.add(name)
        try:
            await self._models.leave(name)
            await asyncio.to_thread(self._records.remove, name)
        finally:
            self._deleting.discard(name)
        logger.info("%s is deleted", name)

    def _is_ours(self, entry: Entry) -> bool:
        """Whether a model was pulled, also one that `llmjax rm` has removed since."""
        return Path(entry.config.model).is_relative_to(self._records.root)

    async def _discard(self, name: str) -> None:
        """Removes what has come of a pull that has broken off; raises ApiError (404) where there is nothing."""
        try:
            folder = self._records.root / parse_name(name, registry=self._registry).folder
        except InvalidRequest:
            folder = None
        if folder is None or not folder.is_dir():
            raise unknown_model(name, [entry.name for entry in self._models.entries], pulls=True)
        await asyncio.to_thread(shutil.rmtree, folder)

    async def shutdown(self) -> None:
        """Ends all pulls; what has come stays for the next ones."""
        tasks = [pull.task for pull in self._running.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: str) -> _Pull:
        order = Order(
            name=parse_name(name, registry=self._registry),
            root=self._records.root,
            registry=self._registry,
            token=self._configs.engine.hf_token,
            known=self.has(name),
        )
        if self._configs.engine.offline:
            raise ApiError("nothing is pulled: the server is offline", param="model", code="not_enabled")
        if name in self._deleting:
            raise _busy(f"the model {name} is being deleted; it can be pulled when that has ended")
        if len(self._running) >= MOST_PULLS:
            raise retry_later(f"{MOST_PULLS} models are being pulled", seconds=BUSY_SECONDS, code="queue_full")
        pull = self._running[name] = _Pull()
        pull.task = asyncio.create_task(self._pulled(pull, name, order))
        pull.task.add_done_callback(pull.pulse)
        return pull

    async def _pulled(self, pull: _Pull, name: str, order: Order) -> None:
        try:
            async with aclosing(fetched(order)) as steps:
                async for step in steps:
                    if isinstance(step, Step):
                        pull.note(step)
                    else:
                        pull.note(Step("writing manifest"))
                        pull.joining = True
                        await self._join(record_of(name, order.name, step))
            pull.note(Step("success"))
        finally:
            self._forget(name, pull)

    def _forget(self, name: str, pull: _Pull) -> None:
        if self._running.get(name) is pull:
            del self._running[name]

    async def _join(self, record: PulledModel) -> None:
        """Has a model served, in place of what its name meant before."""
        await asyncio.to_thread(self._records.put, record)
        await self._models.join(pulled_model(record, self._configs))
        logger.info("%s is pulled from %s%s", record.name, record.source, ignoring(record))


def _busy(message: str) -> ApiError:
    return ApiError(message, status=409, param="model", code="model_busy")


def records_of(common: EngineConfig) -> PulledModels:
    """The models that have been pulled, by whichever server with this folder of downloads."""
    return PulledModels(folder_of_pulled(common.download_dir))


def record_of(name: str, source: PullName, got: Fetched) -> PulledModel:
    """What is kept of a model that has just been fetched."""
    return PulledModel(
        name=name,
        source=source.source,
        folder=str(Path(source.folder)),
        model=got.model,
        sampling=got.sampling,
        ignored=got.ignored,
        pulled=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def pulled_model(record: PulledModel, configs: Configs) -> ServedModel:
    """A pulled model as one of the server's, which is loaded on demand.

    Args:
        configs: the settings that all models have in common; those that say which model it is are left out.
    """
    plain = EngineConfig()
    engine = configs.engine.replace(
        **{name: getattr(plain, name) for name in OF_ONE_MODEL},
        model=record.model,
        served_model_name=record.name,
        override_generation_config=dict(record.sampling),
        engine_process="process",
    )
    return ServedModel(record.name, engine, configs.server, replace(configs.manners, load="demand"))


def ignoring(record: PulledModel) -> str:
    return f"; ignored: {', '.join(record.ignored)}" if record.ignored else ""


def pulled_before(configs: Configs) -> list[ServedModel]:
    """Models that were pulled before this start. A name that the settings give to another model stays that one's.

    Raises:
        CheckpointError: the list of them cannot be read.
    """
    taken = {name for model in configs.models or () for name in model.engine.served_names}
    found = []
    for record in records_of(configs.engine).all():
        if record.name in taken:
            logger.warning("%s was pulled, but the settings give its name to another model", record.name)
        else:
            found.append(pulled_model(record, configs))
    return found
