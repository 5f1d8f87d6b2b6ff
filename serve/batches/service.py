"""Batches that run beside other requests: from a file to files of results and of errors."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp

from llmjax.errors import LLMJaxError
from llmjax.serve.batches.answering import AHEAD, answers
from llmjax.serve.batches.inner import Answer, ask
from llmjax.serve.batches.lines import BadLine, BatchLine, read_lines, result_line
from llmjax.serve.errors import ApiError, as_api_error, cut
from llmjax.serve.files import FileStore, StoredFile
from llmjax.serve.limits import BodyLimits
from llmjax.serve.records import RECORD, Records, storing

log = logging.getLogger("serve")

WINDOW = 24 * 3600  # seconds that a batch may take
MOST_REQUESTS = 50_000  # of one batch, as OpenAI has it
MOST_UNFINISHED = 16  # batches of one owner
MOST_ENDED = 1000  # that are kept of one owner's, beside those that have not ended
RECORD_BYTES = 16 * 1024  # for what is known of a batch
NOT_WRITTEN = "the results cannot be written"
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(kw_only=True)
class Batch:
    """OpenAI's ``Batch``, and whose it is; times in seconds since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = field(default_factory=dict)

    __pydantic_config__ = RECORD

    def turn(self, status: str) -> None:
        """Its next status, from now on."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    def body(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("owner", "total", "completed", "failed", "times", "errors"):
            del fields[name]
        return {
            **fields,
            "object": "batch",
            "completion_window": "24h",
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            **self.times,
        }


class Batches:
    """All batches of a server.

    Args:
        files: where they read and write; they are kept there, too.
        app: answers their requests.
        limits: limits on a request's body.
        width: how many requests of all batches are asked at once.
    """

    def __init__(self, files: FileStore, app: ASGIApp, *, limits: BodyLimits, width: int) -> None:
        self._files = files
        self._app = app
        self._limits = limits
        self._turns = asyncio.Semaphore(width)
        self._ahead = AHEAD * width
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._batches: dict[str, Batch] = {}
        self._records = Records(files.folder, Batch, names="batch_*")
        files.charge(self._records)
        for batch in sorted(self._records.load(), key=lambda batch: batch.created_at):
            if batch.status not in ENDED:
                batch.errors = [_error("the server has ended in the meantime", code="server_ended")]
                batch.turn("failed")
            self._batches[batch.id] = batch

    def create(
        self,
        *,
        state: Mapping[str, Any],
        owner: str,
        file: StoredFile,
        endpoint: str,
        metadata: dict[str, str] | None,
    ) -> Batch:
        """Begins a batch.

        Args:
            state: ASGI state that its requests get.

        Raises:
            ApiError: 429, the owner has too many that have not ended; 413 or 507, there is no room for another.
        """
        self._drop_expired()
        if sum(batch.owner == owner and batch.status not in ENDED for batch in self._batches.values()) >= (
            MOST_UNFINISHED
        ):
            raise ApiError(f"{MOST_UNFINISHED} batches are unfinished", status=429, code="too_many_batches")
        self._make_room(owner)
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=file.id,
            metadata=metadata,
            created_at=now,
            expires_at=now + WINDOW,
        )
        with storing("the batch cannot begin"):
            # A file that is deleted from now on can still be read.
            source = self._files.path(file).open("rb")
            try:
                self._records.save(batch)
            except OSError:
                source.close()
                raise
        self._batches[batch.id] = batch
        task = asyncio.create_task(self._run(batch, source, state))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))
        return batch

    def get(self, owner: str, id: str) -> Batch:
        """A batch of one's own; raises ``ApiError`` (404)."""
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner:
            raise ApiError(f"there is no batch {cut(id)!r}", status=404, code="not_found")
        return batch

    def of(self, owner: str) -> list[Batch]:
        """All of an owner, the newest first."""
        self._drop_expired()
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def cancel(self, batch: Batch) -> None:
        """Ends it; what it has answered by then is kept.

        Raises:
            ApiError: 409, it has ended.
        """
        if batch.status in ENDED:
            raise ApiError(f"the batch is {batch.status}", status=409, code="batch_ended")
        if batch.status != "cancelling":
            batch.turn("cancelling")
            self._tasks[batch.id].cancel()

    async def _run(self, batch: Batch, source: BinaryIO, state: Mapping[str, Any]) -> None:
        """To its end: whatever fails, it does not stay unfinished."""
        try:
            with source, storing(NOT_WRITTEN), self._result() as good, self._result() as bad:
                end = await self._answered(batch, source, state, good, bad)
                batch.output_file_id = self._keep(batch, good, "output")
                batch.error_file_id = self._keep(batch, bad, "error")
        except Exception as error:
            batch.errors = [_error_of(error)]
            end = "failed"
        batch.turn(end)
        self.save(batch)

    async def _answered(
        self, batch: Batch, source: BinaryIO, state: Mapping[str, Any], good: BinaryIO, bad: BinaryIO
    ) -> str:
        """Asks all that it can, and gives the status that the batch ends with."""
        try:
            async with asyncio.timeout(batch.expires_at - time.time()):
                await self._check(batch, source)
                batch.turn("in_progress")
                self.save(batch)
                await self._answer(batch, source, state, good, bad)
            batch.turn("finalizing")
            return "completed"
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the server ends
            return "cancelled"
        except (LLMJaxError, ApiError) as error:  # what has been answered by then is kept
            batch.errors = [_error_of(error)]
            return "failed"

    async def _check(self, batch: Batch, source: BinaryIO) -> None:
        """Reads all of it before anything is asked."""

        def count() -> int:
            total = 0
            for total, _ in enumerate(read_lines(source, self._limits, endpoint=batch.endpoint), 1):
                if total > MOST_REQUESTS:
                    raise ApiError(f"the file holds more than {MOST_REQUESTS} requests", code="too_many_requests")
            return total

        batch.total = await asyncio.to_thread(count)
        if not batch.total:
            raise ApiError("the file holds no requests", code="empty_file")
        source.seek(0)

    async def _answer(
        self, batch: Batch, source: BinaryIO, state: Mapping[str, Any], good: BinaryIO, bad: BinaryIO
    ) -> None:
        async def asked(line: BatchLine) -> Answer:
            return await ask(self._app, line.url, line.body, state=state)

        lines = read_lines(source, self._limits, endpoint=batch.endpoint)
        async with aclosing(answers(lines, asked, turns=self._turns, ahead=self._ahead)) as answered:
            async for line, answer in answered:
                failed = answer.status >= 400
                (bad if failed else good).write(result_line(line.custom_id, answer, prefix="batch_req_", apart=False))
                batch.failed += failed
                batch.completed += not failed
                if good.tell() + bad.tell() > self._files.most_bytes:
                    raise ApiError("the results take more space than the server may keep", code="no_room")

    @contextmanager
    def _result(self) -> Iterator[BinaryIO]:
        path = self._files.new_path()
        try:
            with path.open("xb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def _keep(self, batch: Batch, file: BinaryIO, kind: str) -> str | None:
        """The id under which results are kept; None: there are none."""
        if not file.tell():
            return None
        file.flush()
        name = f"{batch.id}_{kind}.jsonl"
        return self._files.keep(Path(file.name), owner=batch.owner, filename=name, purpose="batch_output").id

    def save(self, batch: Batch) -> None:
        """Writes what is known of it, for a later server; where that fails, it is known to this one."""
        try:
            self._records.save(batch)
        except OSError as error:
            log.error("%s: its record cannot be written: %s", batch.id, error)

    def _make_room(self, owner: str) -> None:
        """Lets go of an owner's oldest batches where there are too many, or no room for the record of another one."""
        room = self._files.room(owner)
        if room + self._records.bytes_of(owner) < RECORD_BYTES:
            most = self._files.most_bytes
            message = f"only {max(room, 0)} of {most} bytes for files and batches are left: delete some files"
            raise ApiError(message, status=413, code="no_room")
        ended = [batch for batch in self._batches.values() if batch.owner == owner and batch.status in ENDED]
        while ended and (len(ended) >= MOST_ENDED or self._files.room(owner) < RECORD_BYTES):
            self._drop(ended.pop(0))

    def _drop_expired(self) -> None:
        oldest = time.time() - self._files.lifetime
        for batch in [*self._batches.values()]:
            if batch.status in ENDED and batch.created_at < oldest:
                self._drop(batch)

    def _drop(self, batch: Batch) -> None:
        del self._batches[batch.id]
        self._records.drop(batch)


def _error(message: str, *, code: str | None, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def _error_of(error: Exception) -> dict[str, Any]:
    failure = as_api_error(error)
    line = error.line if isinstance(error, BadLine) else None
    return _error(failure.message, code=failure.code, line=line, param=failure.param)
