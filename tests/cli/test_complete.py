"""``llmjax complete``, against a server on loopback that answers by a script."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llmjax.cli import main


class Continues(BaseHTTPRequestHandler):
    """Continues a text by its length; refuses "fail"."""

    protocol_version = "HTTP/1.0"
    asked: list[tuple[str, dict[str, Any], str | None]]
    keys: list[str | None]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        Continues.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Continues.keys.append(self.headers["Authorization"])
        Continues.asked.append((self.path, body, self.headers["Authorization"]))
        failed = body["prompt"] == "fail"
        self.send_response(400 if failed else 200)
        self.end_headers()
        if failed:
            self.wfile.write(b'{"error": {"message": "too long for the context"}}')
            return
        for choices in ([{"text": " has "}], [{"text": f"{len(body['prompt'])}"}], []):
            self.wfile.write(f"data: {json.dumps({'choices': choices})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def url() -> Iterator[str]:
    Continues.asked, Continues.keys = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Continues)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_text(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["complete", "--url", f"{url}/v1", "-q", "once", "--max-tokens", "7", "--temperature", "0", "--api-key", "k"]
    assert main(line) == 0
    assert capsys.readouterr().out == " has 4\n"
    ((path, body, key),) = Continues.asked
    assert (path, key) == ("/v1/completions", "Bearer k")
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("first", "once", 7, 0.0)
    assert body["stream"] is True and "top_p" not in body  # the server's own default


@pytest.mark.parametrize(
    ("variable", "flags", "sent"),
    [
        (None, [], None),
        ("", [], None),
        ("of-all", [], "Bearer of-all"),
        ("of-all", ["--api-key", "own"], "Bearer own"),
        ("of-all", ["--api-key", ""], "Bearer of-all"),
    ],
)
def test_the_key_is_that_of_the_environment_unless_one_is_given(
    url: str, variable: str | None, flags: list[str], sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    assert main(["complete", "--url", url, "-q", "once", *flags]) == 0
    assert Continues.keys == [sent, sent]  # with the question for models, and with the text


def test_lines_are_texts_and_one_that_is_refused_ends_nothing(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmjax", "complete", "--url", url, "--model-name", "second"],
        input="hi\n\nfail\nhello\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == " has 2\n has 5\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("llmjax: error: ") and line.endswith("too long for the context")
    assert [body["model"] for _, body, _ in Continues.asked] == ["second"] * 3


def test_what_goes_wrong_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", url, "--quick", "fail"]) == 1
    assert capsys.readouterr().err.endswith("too long for the context\n")
    assert main(["complete", "--url", "http://127.0.0.1:1", "--quick", "x"]) == 1
    assert capsys.readouterr().err.startswith("llmjax: error: http://127.0.0.1:1 cannot be reached: ")
    assert main(["complete", "--n", "2"]) == 1
    assert capsys.readouterr().err.startswith("llmjax: error: unknown flag --n")
