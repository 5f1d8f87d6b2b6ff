"""Whether what is in dist/ can be published, and how long an install takes without a compiler, downloads apart.

    python .ci/release.py dist/

The wheels' names, licenses and changes are looked at, and the wheel for this machine is installed from downloaded
packages into an environment of its own, with nothing else on PATH, where it serves until it has answered a prompt.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("manylinux_[0-9_]+_x86_64", "manylinux_[0-9_]+_aarch64", "macosx_[0-9_]+_arm64")
LICENSES = "llmjax/serve/web/LICENSES.txt"
SECONDS = 45.0  # that installing, and serving until the first answer, may take
ASK = {"model": "*", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


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
    llmjax = program / "llmjax"
    seconds = {}
    started = time.monotonic()
    pip = [program / "pip", "install", "--quiet", "--no-index", "--find-links", packages, wheel]
    subprocess.run(pip, check=True, env=environment)
    seconds["install"] = time.monotonic() - started
    subprocess.run([llmjax, "pull", _model()], check=True, env=environment, stdout=subprocess.DEVNULL)
    for name in ("first start", "second start"):
        started = time.monotonic()
        answer = serve(llmjax, environment)
        seconds[f"{name} to answer"] = time.monotonic() - started
        print(f"{name}: {answer!r}")
    return seconds


def serve(llmjax: Path, environment: dict[str, str]) -> str:
    """Starts a server of the small model, asks it, and ends it.

    Args:
        llmjax: the command.

    Returns:
        Text of the answer.

    Raises:
        ReleaseError: it ends before it answers.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    flags = ["--config", "smollm2", "--served-model-name", "*", "--port", str(port), "--shutdown-timeout", "1"]
    server = subprocess.Popen([llmjax, "serve", *flags], env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/v1/completions"
        asked = urllib.request.Request(url, json.dumps(ASK).encode(), {"Content-Type": "application/json"})
        while server.poll() is None:
            try:
                with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                    text: str = json.load(answer)["choices"][0]["text"]
                    return text
            except (ConnectionError, urllib.error.URLError) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                    raise
                time.sleep(0.1)  # it does not listen yet
        raise ReleaseError(f"the server has ended with status {server.returncode}")
    finally:
        server.terminate()
        server.wait()


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
        try:
            seconds = install(here.absolute(), Path(place))
        except ReleaseError as error:
            sys.exit(str(error))
    print(", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items()))
    total = seconds["install"] + seconds["first start to answer"]
    if total > SECONDS:
        sys.exit(f"to install and to serve the first answer took {total:.1f} s, more than {SECONDS:g} s")


if __name__ == "__main__":
    main()
