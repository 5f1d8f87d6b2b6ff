"""A real browser on a real server: headless Chromium, and a tiny model that says what it is told."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.import_graph import ROOT
from tests.serve.conftest import Running, start
from tests.serve.scripted import scripted_engine
from tests.web.scripts import CONTEXT, SCRIPTS, SPECIAL, TEMPLATE

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Nothing of a browser's own may ask for anything while its requests are watched.
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-gpu"]
PATIENCE = 60_000  # milliseconds that a test waits for what a page shows: a busy machine takes its time
ELSEWHERE = "llmjax.test"  # a name of this machine to which browsers grant less than to localhost


def chromium_of(playwright: Any) -> str:
    """The Chromium that is installed, Playwright's own or the system's; without one the test is skipped."""
    installed = Path(playwright.chromium.executable_path)
    found = str(installed) if installed.exists() else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or playwright install chromium")
    return found


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    """Playwright, of which a thread has room for one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def chromium_path(playwright: Any) -> str:
    """The program of Chromium."""
    return chromium_of(playwright)


@pytest.fixture(scope="session")
def browser(playwright: Any, chromium_path: str) -> Iterator[Any]:
    """A headless Chromium."""
    sandbox = [] if os.getuid() else ["--no-sandbox"]
    arguments = [*ARGUMENTS, f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1", *sandbox]
    chromium = playwright.chromium.launch(executable_path=chromium_path, args=arguments)
    yield chromium
    chromium.close()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> EngineConfig:
    return scripted_engine(
        tmp_path_factory.mktemp("web") / "scripted",
        SCRIPTS,
        special=SPECIAL,
        template=TEMPLATE,
        context=CONTEXT,
        compile_cache_dir=compile_cache_dir,
        sizes={"code": 40},  # a line is a token
    )


@pytest.fixture(scope="session")
def server(scripted: EngineConfig) -> Iterator[Running]:
    running, stop = start(scripted, ServerConfig(port=0))
    yield running
    stop()


@dataclass
class Visitor:
    """A page in a browser profile of its own, and what it has asked for and complained of."""

    page: Any
    url: str
    requests: list[Any] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()  # parts of complaints that a test provokes

    def watch(self, page: Any) -> None:
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))

    def open(self, path: str = "/") -> None:
        self.page.goto(self.url + path)
        self.page.get_by_role("textbox", name="Message").or_(self.page.locator("h1")).first.wait_for()

    def say(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message").fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> Any:
        """Sends a message and returns the answer's element when it is complete."""
        before = self.answers.count()
        self.say(text)
        self.page.wait_for_function(
            "n => document.querySelectorAll('.message.assistant[aria-busy=false]').length > n", arg=before
        )
        return self.answers.last

    @property
    def answers(self) -> Any:
        return self.page.locator(".message.assistant")

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """What was sent to a path."""
        return [asked.post_data_json for asked in self.requests if urlsplit(asked.url).path == path]


@pytest.fixture
def visitor_of(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """Makes visitors; at the end none of them may have left the origin, or complained of anything unexpected."""
    made: list[Visitor] = []

    def make(url: str, **options: Any) -> Visitor:
        # Without motion: what axe sees of a color does not depend on when it looks.
        look = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US", "reduced_motion": "reduce"}
        context = browser.new_context(**{**look, **options})
        context.set_default_timeout(PATIENCE)
        visitor = Visitor(context.new_page(), url)
        context.on("page", visitor.watch)
        visitor.watch(visitor.page)
        made.append(visitor)
        return visitor

    yield make
    for visitor in made:
        asked = [request.url for request in visitor.requests]
        visitor.page.context.close()
        assert [url for url in asked if not url.startswith((visitor.url + "/", "data:", "blob:"))] == []
        assert [said for said in visitor.complaints if not any(part in said for part in visitor.expected)] == []


@pytest.fixture
def visitor(visitor_of: Callable[..., Visitor], server: Running) -> Visitor:
    visitor = visitor_of(server.url)
    visitor.open()
    return visitor


@pytest.fixture(scope="session")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address at which the documentation's site is served, as files."""
    pytest.importorskip("material", reason="needs Material for MkDocs: pip install 'llmjax[docs]'")
    folder = tmp_path_factory.mktemp("documentation")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    handler = functools.partial(QuietFiles, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    """Files that browsers may keep, compressed as every server of files does it, and no lines on standard error."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        body = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=31536000")
        self.end_headers()
        self.wfile.write(body)
