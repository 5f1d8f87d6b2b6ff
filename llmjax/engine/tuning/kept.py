"""What was measured of products, kept beside the compiled programs: a file for each question, the first answer stays.

Its name is a digest of the question: the processor, its cores, the kernels' library, JAX's version, and what was to be
measured. So later starts choose as the first did, and tokens stay what they were.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform as host
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmjax.engine.loading.kept_files import Damaged, check_owner, line
from llmjax.engine.programs.signature import digest, machine_digest
from llmjax.engine.tuning.measure import Product
from llmjax.kernels.choices import ROWS, Timing
from llmjax.system import processor_name

logger = logging.getLogger(__name__)

FOLDER = "measured"


@dataclass(frozen=True)
class Measured:
    """The answer to one question.

    Attributes:
        machine: digest of processor, cores and kernels.
        processor: its name, for people.
        date: day of the measurement, ISO 8601.
    """

    machine: str
    processor: str
    date: str
    timings: tuple[Timing, ...]

    @classmethod
    def now(cls, timings: Sequence[Timing]) -> Measured:
        """What was just measured on this machine."""
        today = datetime.now(UTC).date().isoformat()
        return cls(machine_digest(), processor_name() or host.machine(), today, tuple(timings))


def path_of(directory: Path, products: Sequence[Product]) -> Path:
    """The file for a question; ``directory`` is that of compiled programs."""
    return directory / FOLDER / f"{digest(machine_digest(), ROWS, tuple(products))}.json"


def read(path: Path) -> Measured | None:
    """The answer in a file; None: there is none. A damaged file, or one that another user may have written, is removed,
    which a warning says."""
    try:
        with path.open("rb") as file:
            check_owner(os.fstat(file.fileno()))
            return _measured(json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, Damaged, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is not used, and products are measured again: %s", path, line(error))
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def keep(path: Path, measured: Measured, *, again: bool = False) -> Measured:
    """Writes an answer.

    Args:
        again: whether it replaces an earlier answer.

    Returns:
        The answer that counts: the first one, if another process has written it in the meantime.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(number, "w") as file:
            json.dump(asdict(measured), file, indent=1)
        if again:
            os.replace(name, path)
            return measured
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
            return measured
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return read(path) or measured


def all_here(directory: Path) -> Iterator[Measured]:
    """All answers for this machine, by date."""
    found = [read(path) for path in sorted((directory / FOLDER).glob("*.json"))]
    mine = machine_digest()
    yield from sorted((one for one in found if one is not None and one.machine == mine), key=lambda one: one.date)


def _measured(content: Any) -> Measured:
    timings = tuple(
        Timing(str(one["kind"]), str(one["method"]), _shape(one["shape"]), int(one["rows"]), float(one["seconds"]))
        for one in content["timings"]
    )
    return Measured(str(content["machine"]), str(content["processor"]), str(content["date"]), timings)


def _shape(numbers: Any) -> tuple[int, int]:
    size_out, size_in = numbers
    return int(size_out), int(size_in)
