"""Puts pip into an environment whose Python came without ensurepip: the newest wheel of the package index does it."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

# A link of a simple-index page (PEP 503) to a released wheel; yanked ones carry an attribute.
LINK = re.compile(r'<a(?![^>]*data-yanked)[^>]*?href="([^"#]+)#sha256=(\w+)"[^>]*>\s*(pip-([\d.]+)-py3-none-any\.whl)')


def main() -> None:
    page = urllib.parse.urljoin(os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/", "pip/")
    links = LINK.findall(download(page).decode())
    if not links:
        raise ValueError(f"{page} lists no pip wheel")
    url, sha256, name, _ = max(links, key=lambda link: [int(n) for n in link[3].split(".")])
    data = download(urllib.parse.urljoin(page, url))
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{name} has the wrong hash")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / name
        wheel.write_bytes(data)
        # A wheel is a zip file, and Python runs packages out of those: pip installs itself.
        subprocess.run([sys.executable, f"{wheel}/pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)


def download(url: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": "text/html"}), timeout=60) as response:
        return response.read()


if __name__ == "__main__":
    try:
        main()
    except (urllib.error.URLError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"cannot install pip ({error}); on Debian: apt install python3-venv, then make again")
