"""Downloads a file over HTTP: it is resumed where it stopped, checked, and gets its name only when it is complete."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from llmjax.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of retries: attempts in a row that bring no byte, and seconds before the next one."""

    attempts: int = 3
    pause: float = 1.0


def fetch(
    client: httpx.Client,
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    num_bytes: int | None = None,
    auth: httpx.BasicAuth | None = None,
    progress: bool = True,
    told: Callable[[int], None] | None = None,
    retry: RetryPolicy | None = None,
) -> None:
    """Downloads ``url`` to ``target``; bytes that an earlier, interrupted call left in ``target.partial`` are kept.

    The bytes are used only if the server still has the same file, which If-Range asks (RFC 9110, section 13.1.5), or if
    there is a hash to check.

    Args:
        sha256: hexadecimal hash that the file must have; a file with another one is removed.
        num_bytes: the size that the file must have; what is larger is not read to its end.
        auth: credentials for this server.
        progress: whether to show a bar on stderr.
        told: called with the number of bytes that are there, as they arrive.

    Raises:
        CheckpointError: the server refuses, the connection keeps breaking, the disk is full, or the hash or the size is
            wrong.
    """
    retry = retry or RetryPolicy()
    partial = target.with_name(target.name + ".partial")
    validator = target.with_name(partial.name + ".validator")  # the server's ETag or date of the file
    with bar(progress) as shown:
        task = shown.add_task(target.name, total=None)

        def tell(completed: int, total: int | None) -> None:
            shown.update(task, completed=completed, total=total)
            if told is not None:
                told(completed)

        failures = 0
        while True:
            before = _size(partial)
            have = before if sha256 is not None or validator.exists() else 0
            try:
                _transfer(client, url, partial, validator, have=have, num_bytes=num_bytes, auth=auth, tell=tell)
                break
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and not _passing(error.response.status_code):
                    raise CheckpointError(f"{redacted(url)}: HTTP {error.response.status_code}") from None
                failures = failures + 1 if _size(partial) <= before else 1
                if failures >= retry.attempts:
                    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                    kept = f"; {_size(partial):,} bytes are kept, run again to resume" if _size(partial) else ""
                    raise CheckpointError(f"cannot download {redacted(url)}: {reason}{kept}") from None
                time.sleep(retry.pause * failures)
    validator.unlink(missing_ok=True)
    check_sha256(partial, sha256, name=target.name)
    partial.replace(target)


def check_sha256(path: Path, expected: str | None, *, name: str) -> str:
    """The SHA-256 of ``path``; removes the file and raises CheckpointError if another one was expected."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if expected is not None and got != expected:
        path.unlink()
        raise CheckpointError(f"{name}: sha256 is {got}, expected {expected}; the file was removed")
    return got


def require_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError if ``folder`` has no space for ``needed`` more bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"disk full: {needed:,} bytes are needed in {folder}, {free:,} are free")


def write_error(error: OSError, folder: Path, needed: int) -> CheckpointError:
    """The error to raise when writing ``needed`` bytes into ``folder`` has failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"disk full: {needed:,} bytes are needed in {folder}")
    return CheckpointError(f"cannot write into {folder}: {error.strerror or error}")


def redacted(url: str) -> str:
    """The URL without credentials, query and fragment, fit for messages."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))


def bar(progress: bool) -> Progress:
    """A progress bar for bytes on stderr, so that stdout has only the program's output."""
    name = TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=36))
    figures = [kind(table_column=Column(no_wrap=True)) for kind in (DownloadColumn, TransferSpeedColumn)]
    return Progress(name, BarColumn(bar_width=16), *figures, console=Console(stderr=True), disable=not progress)


def _transfer(
    client: httpx.Client,
    url: str,
    partial: Path,
    validator: Path,
    *,
    have: int,
    num_bytes: int | None,
    auth: httpx.BasicAuth | None,
    tell: Callable[[int, int | None], None],
) -> None:
    """Requests the bytes after the first ``have``, which ``partial`` holds; all bytes that arrive are kept."""
    # Compressed transfer would make byte offsets meaningless.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator.exists():
            headers["If-Range"] = validator.read_text()
    with client.stream("GET", url, headers=headers, auth=auth or httpx.USE_CLIENT_DEFAULT) as response:
        if have and response.status_code == 416:
            if response.headers.get("Content-Range") == f"bytes */{have}":
                return
            partial.unlink()
            raise httpx.ReadError("what was downloaded before does not fit the file any more")
        response.raise_for_status()
        if response.status_code != 206:
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise CheckpointError(f"{redacted(url)}: the server answers a range that was not asked for")
        length = response.headers.get("Content-Length", "")
        missing = int(length) if length.isdigit() else 0
        if num_bytes is not None and have + missing > num_bytes:
            raise _too_large(url, num_bytes)
        require_space(partial.parent, missing)
        tell(have, have + missing or None)
        try:
            with partial.open("ab" if have else "wb") as file:
                if not have:
                    _keep_validator(response, validator)
                completed = have
                for chunk in response.iter_raw():
                    completed += len(chunk)
                    if num_bytes is not None and completed > num_bytes:
                        raise _too_large(url, num_bytes)
                    file.write(chunk)
                    tell(completed, have + missing or None)
        except OSError as error:
            raise write_error(error, partial.parent, have + missing) from None


def _too_large(url: str, num_bytes: int) -> CheckpointError:
    return CheckpointError(f"{redacted(url)}: the server sends more than the {num_bytes:,} bytes that it has named")


def _keep_validator(response: httpx.Response, path: Path) -> None:
    """Stores the strongest validator (ETag or date) that the server gives for this content, if any."""
    tag = response.headers.get("ETag", "")
    if found := tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified"):
        path.write_text(found)
    else:
        path.unlink(missing_ok=True)


def _passing(status: int) -> bool:
    """Whether the next attempt may have another status."""
    return status >= 500 or status in (408, 429)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
