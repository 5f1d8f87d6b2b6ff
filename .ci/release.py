"""Whether what is in dist/ can be published, and how long an install takes without a compiler, downloads apart.

    python .ci/release.py dist/

The wheels' names, licenses and changes are looked at, and the wheel for this machine is installed from downloaded
packages into an environment of its own, with nothing else on PATH, where it answers a prompt.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("manylinux_[0-9_]+_x86_64", "manylinux_[0-9_]+_aarch64", "macosx_[0-9_]+_arm64")
LICENSES = "llmjax/serve/web/LICENSES.txt"
SECONDS = 45.0  # that installing and the first answer may take
ASK = ("generate", "--config", "smollm2", "--max-tokens", "8", "--temperature", "0", "The capital of France is")


class ReleaseError(Exception):
    """Something is missing or wrong."""


def check_targets(names: list[str]) -> None:
    """Raises ReleaseError unless there are the source archive and a wheel for each kind of machine, of one version."""
    for target in TARGETS:
        if not any(re.fullmatch(rf"llmjax-[^-]+-py3-none-{target}\.whl", name) for name in names):
            raise ReleaseError(f"no wheel for {target}: make wheels")
    versions = {name.removesuffix(".tar.gz").split("-")[1] for name in names}
    if len(versions) != 1 or not any(name.endswith(".tar.gz") for name in names):
        raise ReleaseError(f"not one version with its source archive: {', '.join(sorted(names))}")


def check_notes(version: str, changes: str, citation: str) -> None:
    """Raises ReleaseError unless the changes and the citation speak of this version."""
    if not re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no heading for {version}")
    if not re.search(rf"^version: {re.escape(version)}$", citation, re.MULTILINE):
        raise ReleaseError(f"CITATION.cff is not of {version}")


def check_licenses(wheel: Path, vendored: list[str]) -> None:
    """Raises ReleaseError unless a wheel brings its own license and those of the packages that the chat page holds."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if not any(re.fullmatch(r"llmjax-[^/]+\.dist-info/licenses/LICENSE", name) for name in names):
            raise ReleaseError(f"{wheel.name}: no LICENSE")
        if LICENSES not in names:
            raise ReleaseError(f"{wheel.name}: no {LICENSES}")
        text = archive.read(LICENSES).decode()
    missing = [name for name in vendored if not re.search(rf"^{re.escape(name)} \d", text, re.MULTILINE)]
    if missing:
        raise ReleaseError(f"{wheel.name}: {LICENSES} has no license of {', '.join(missing)}")


def install(wheel: Path, folder: Path) -> dict[str, float]:
    """Seconds of what a user waits for, downloads apart, in a new environment without a compiler."""
    packages, home = folder / "packages", folder / "home"
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", packages, wheel], check=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    program = folder / "venv" / "bin"
    # The model is fetched before the clock starts; nothing that is compiled is kept but the user's own.
    environment = {"PATH": "/nonexistent", "HOME": str(home), "LANG": "C.UTF-8"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    seconds = {}
    steps = {
        "install": [program / "pip", "install", "--quiet", "--no-index", "--find-links", packages, wheel],
        "": [program / "llmjax", "pull", _model()],
        "first answer": [program / "llmjax", *ASK],
        "second answer": [program / "llmjax", *ASK],
    }
    for name, command in steps.items():
        started = time.monotonic()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        if name:
            seconds[name] = time.monotonic() - started
    return seconds


def _model() -> str:
    text = (ROOT / "configs" / "smollm2.yaml").read_text(encoding="utf-8")
    return "".join(line.strip() for line in re.findall(r"^  (.*)$", text, re.MULTILINE))


def main() -> None:
    folder = Path(sys.argv[1])
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    try:
        check_targets([path.name for path in files])
        version = files[0].name.removesuffix(".tar.gz").split("-")[1]
        check_notes(version, (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text())
        vendored = list(json.loads((ROOT / "web" / "package.json").read_text())["dependencies"])
        wheels = [path for path in files if path.suffix == ".whl"]
        for wheel in wheels:
            check_licenses(wheel, vendored)
    except ReleaseError as error:
        sys.exit(str(error))
    here = next((path for path in wheels if path.stem.endswith(f"linux_2_17_{platform.machine()}")), None)
    if here is None:
        print("no wheel is for this machine: nothing is installed")
        return
    with tempfile.TemporaryDirectory() as place:
        seconds = install(here.absolute(), Path(place))
    print(", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items()))
    total = seconds["install"] + seconds["first answer"]
    if total > SECONDS:
        sys.exit(f"install and first answer took {total:.1f} s, more than {SECONDS:g} s")


if __name__ == "__main__":
    main()
