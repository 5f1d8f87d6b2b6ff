"""The newest figures of each processor beside other engines: one file a chip, from which pages are generated.

``python -m benchmarks.peers --record`` writes them, ``python -m tests.pages`` makes tables of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.points import Point, parse_point
from llmjax.bench.report import write_json
from llmjax.errors import ConfigError

FOLDER = Path(__file__).parent / "results" / "cpu"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What all engines of a comparison reached at one point.

    Attributes:
        model: file or format, such as ``SmolLM2-135M Q4_1``.
        settings: what differed from the defaults; empty: nothing.
        point: name of the point, as ``--points`` has it.
        weight_bytes: bytes of the file that a decode step reads; None: not written down.
        seconds: by engine, from the fastest runs (see `Point`).
        by_medians: how many times as fast as the best peer llmjax was, out of the medians; None: not known.
        versions: versions of the peers, in words.
    """

    model: str
    settings: str = ""
    point: str
    date: str
    commit: str
    weight_bytes: int | None = None
    seconds: Mapping[str, float]
    by_medians: float | None = None
    versions: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str, str]:
        """What a newer record replaces an older one by."""
        return self.model, self.settings, self.point

    def speed(self, engine: str) -> float | None:
        """Tokens a second; None: the point is none of speed, or the engine was not there."""
        tokens, seconds = parse_point(self.point).tokens, self.seconds.get(engine)
        return tokens / seconds if tokens and seconds else None

    def ratio(self, ours: str) -> float | None:
        """How many times as fast as the best peer llmjax was; None: one of the two is missing."""
        peers = [seconds for engine, seconds in self.seconds.items() if engine != ours]
        return min(peers) / self.seconds[ours] if peers and ours in self.seconds else None


@dataclass(frozen=True, kw_only=True)
class ChipRecords:
    """The newest records of one processor.

    Attributes:
        chip: its name, with what tells it from others of that name.
        machine: the machine in words: cores, memory, system.
    """

    chip: str
    machine: str
    records: tuple[Record, ...] = ()

    @property
    def date(self) -> str:
        """The day of the newest record."""
        return max((record.date for record in self.records), default="")

    def with_newer(self, records: Sequence[Record], machine: str) -> ChipRecords:
        """These with others in the place of those of the same model, settings and point."""
        new = {record.key for record in records}
        kept = tuple(record for record in self.records if record.key not in new)
        merged = sorted([*kept, *records], key=lambda record: (record.model, record.settings, _order(record.point)))
        return replace(self, machine=machine, records=tuple(merged))


def _order(point: str) -> tuple[int, int, int]:
    found = parse_point(point)
    return ["decode", "prefill", "ttft", "load"].index(found.kind), found.streams, found.prompt


def path_of(chip: str, folder: Path = FOLDER) -> Path:
    """The file of a processor."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', chip.lower()).strip('-')}.json"


def read_records(path: Path) -> ChipRecords:
    """The records in a file.

    Raises:
        ConfigError: it is not what `record` writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = tuple(Record(**one) for one in content["records"])
        for one in records:
            parse_point(one.point)
        return ChipRecords(chip=content["chip"], machine=content["machine"], records=records)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no records of a processor: {error}") from error


def record(records: Sequence[Record], machine: Machine, chip: str, folder: Path = FOLDER) -> Path:
    """Writes records of this machine beside older ones of other points.

    Returns:
        The file.

    Raises:
        ConfigError: it cannot be read or written.
    """
    path = path_of(chip, folder)
    known = read_records(path) if path.exists() else ChipRecords(chip=chip, machine=str(machine))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(known.with_newer(records, str(machine))))
    return path


def all_records(folder: Path = FOLDER) -> list[ChipRecords]:
    """The records of all processors, the newest first."""
    return sorted((read_records(path) for path in folder.glob("*.json")), key=lambda one: (one.date, one.chip))[::-1]


def summary(chips: Iterable[ChipRecords], *, model: str, ours: str) -> str:
    """A Markdown table of one model with default settings, for README.md."""
    chips = list(chips)
    found = [[record for record in chip.records if (record.model, record.settings) == (model, "")] for chip in chips]
    peers = sorted({engine for records in found for record in records for engine in record.seconds} - {ours})
    lines = [_row(["", ours, *peers, "measured"]), _row(["---", *["---:"] * (1 + len(peers)), "---"])]
    for chip, records in zip(chips, found, strict=True):
        for number, one in enumerate(records):
            name = (
                f"**{chip.chip}**: {_short(parse_point(one.point))}" if not number else _short(parse_point(one.point))
            )
            lines.append(_row([name, *(_reached(one, engine) for engine in (ours, *peers)), one.date]))
    return "\n".join(lines)


def whole(chips: Iterable[ChipRecords], *, ours: str) -> str:
    """All records as Markdown, a table for each processor."""
    parts = []
    for chip in chips:
        peers = sorted({engine for record in chip.records for engine in record.seconds} - {ours})
        columns = ["weights", "point", ours, *peers, "to the best", "by medians", "weights, GB/s", "measured"]
        lines = [f"### {chip.chip}\n", f"{chip.machine}.\n", _row(columns)]
        lines.append(_row(["---", "---", *["---:"] * (len(columns) - 3), "---"]))
        for one in chip.records:
            weights = f"{one.model}{f', {one.settings}' if one.settings else ''}"
            reached = [_reached(one, engine) for engine in (ours, *peers)]
            ratios = [_times(one.ratio(ours)), _times(one.by_medians), _bandwidth(one, ours)]
            cells = [weights, parse_point(one.point).name, *reached, *ratios, f"{one.date}, {one.commit}"]
            lines.append(_row(cells))
        versions = {version for one in chip.records for version in one.versions.values()}
        parts.append("\n".join(lines) + (f"\n\nPeers: {', '.join(sorted(versions))}." if versions else ""))
    return "\n\n".join(parts)


def _short(point: Point) -> str:
    many = "s" * (point.streams > 1)
    return {
        "decode": f"{point.streams} stream{many}",
        "prefill": f"a prompt of {point.prompt}",
        "ttft": f"{point.streams} prompts of {point.prompt}",
        "load": "start to first token, s",
    }[point.kind]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reached(one: Record, engine: str) -> str:
    """Tokens a second, or seconds where the point is none of speed."""
    seconds, speed = one.seconds.get(engine), one.speed(engine)
    if speed is not None:
        return f"{speed:,.0f}" if speed >= 1000 else f"{speed:.1f}" if speed < 100 else f"{speed:.0f}"
    return "" if seconds is None else f"{seconds:.2f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _bandwidth(one: Record, engine: str) -> str:
    seconds = one.seconds.get(engine)
    if one.weight_bytes is None or seconds is None or parse_point(one.point).kind != "decode":
        return ""
    return f"{one.weight_bytes / seconds / 1e9:.1f}"
