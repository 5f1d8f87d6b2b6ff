"""The chat page over HTTP: browsers get it, with strict headers, and other clients a line of text instead."""

from __future__ import annotations

import httpx
import pytest

from llmjax.serve.routes.web import FOLDER, POLICY
from tests.serve.test_access import app_of, ask, bearer

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_browsers_get_the_page_and_others_a_line(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.text == (FOLDER / "index.html").read_text()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    line = http.get("/")
    assert line.headers["content-type"].startswith("text/plain") and "tiny-llama" in line.text
    assert "accept" in line.headers["vary"] and "accept" in page.headers["vary"]


def test_the_policy_lets_nothing_in_from_elsewhere_and_no_inline_script(http: httpx.Client) -> None:
    for path in ("/", "/web/app.js"):
        headers = http.get(path, headers=BROWSER).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY
    assert "default-src 'none'" in POLICY and "frame-ancestors 'none'" in POLICY


@pytest.mark.parametrize(
    ("name", "kind"), [("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")]
)
def test_files_come_packed_and_once(http: httpx.Client, name: str, kind: str) -> None:
    answer = http.get(f"/web/{name}")
    assert answer.headers["content-encoding"] == "gzip" and answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.content == (FOLDER / name).read_bytes()
    plain = http.get(f"/web/{name}", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == answer.content
    again = http.get(f"/web/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize("name", ["sources.sha256", "no.js", "..%2fapp.py", "%2e%2e/app.py", "a/b.js", "", "app.js%00"])
def test_nothing_else_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/web/{name}").status_code == 404


def test_the_page_asks_for_the_key_itself() -> None:
    app = app_of(api_key=["one"], guard_metrics=True)
    assert ask(app, "GET", "/", headers=BROWSER).status_code == 200
    assert ask(app, "GET", "/web/app.js").status_code == 200
    for path in ("/web", "/web/../v1/models", "/v1/models", "/metrics"):
        assert ask(app, "GET", path).status_code == 401, path
    # Without the key nobody learns which model there is.
    assert "text/html" in ask(app, "GET", "/").headers["content-type"]
    assert "text/plain" in ask(app, "GET", "/", headers=bearer("Bearer one")).headers["content-type"]


def test_no_web() -> None:
    app = app_of(web=False)
    assert ask(app, "GET", "/web/app.js").status_code == 404
    assert "text/plain" in ask(app, "GET", "/", headers=BROWSER).headers["content-type"]
    guarded = app_of(web=False, api_key=["one"], guard_metrics=True)
    assert ask(guarded, "GET", "/", headers=BROWSER).status_code == 401
    assert ask(guarded, "GET", "/web/app.js").status_code == 401
