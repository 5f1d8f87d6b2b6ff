"""The terminal chat in a real terminal (a pty), talking to a server on loopback that answers by a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmjax.cli.conversation import Answer, read_tools
from llmjax.cli.models import CallPiece, _pieces_of
from llmjax.errors import ConfigError
from llmjax.parsing.choice import Parsers
from llmjax.parsing.parser import OutputParser
from tests.terminal import Terminal


class Echo(BaseHTTPRequestHandler):
    """Answers with the number of messages and the last one; "forever" gets an endless answer."""

    protocol_version = "HTTP/1.0"
    bodies: list[dict[str, Any]]
    keys: list[str | None]
    dropped: threading.Event

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "echo-model"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Echo.bodies.append(body)
        Echo.keys.append(self.headers["Authorization"])
        messages = body["messages"]
        last = messages[-1]["content"]
        if last == "fail":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too long for the context"}}')
            return
        self.send_response(200)
        self.end_headers()
        try:
            if last == "weather?":
                self._event({"choices": [{"delta": {"reasoning_content": "I look."}}]})
                begun = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}}
                self._event({"choices": [{"delta": {"tool_calls": [begun]}}]})
                rest = {"index": 0, "function": {"arguments": '"Bonn"}'}}
                self._event({"choices": [{"delta": {"tool_calls": [rest]}}]})
                self.wfile.write(b"data: [DONE]\n\n")
                return
            for word in [f"{len(messages)} ", "**", last, "**"]:
                self._event({"choices": [{"delta": {"content": word}}]})
            while last == "forever":
                self._event({"choices": [{"delta": {"content": "."}}]})
                time.sleep(0.02)
        except OSError:
            Echo.dropped.set()
            return
        self._event({"choices": [], "usage": {"completion_tokens": 42}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def url() -> Iterator[str]:
    Echo.bodies, Echo.keys, Echo.dropped = [], [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def chatting(url: str, home: Path, *flags: str) -> Terminal:
    return Terminal(home, "chat", "--url", url, *flags)


def test_a_conversation(url: str, tmp_path: Path) -> None:
    terminal = chatting(url, tmp_path, "--system", "Be brief.", "--temperature", "0")
    terminal.wait_for("echo-model: /help lists the commands")
    terminal.type("hello there")
    end = terminal.wait_for("tokens/s", after=terminal.wait_for("42 tokens, "))
    assert "**" not in terminal.shown  # it is rendered
    terminal.type("again")
    end = terminal.wait_for("42 tokens, ", after=end)
    terminal.type("/reset")
    terminal.type("fail")
    end = terminal.wait_for("error: ", after=end)
    end = terminal.wait_for("too long for the context", after=end)
    terminal.type("/sistem x")
    end = terminal.wait_for("unknown command /sistem; did you mean system?", after=end)
    terminal.type("//etc/passwd")
    end = terminal.wait_for("42 tokens, ", after=end)
    terminal.type("/exit")
    assert terminal.end() == 0
    system = {"role": "system", "content": "Be brief."}
    asked = [[message["content"] for message in body["messages"]] for body in Echo.bodies]
    assert asked[0] == ["Be brief.", "hello there"]
    assert asked[1] == ["Be brief.", "hello there", "2 **hello there**", "again"]
    assert asked[2] == ["Be brief.", "fail"]
    assert asked[3] == ["Be brief.", "/etc/passwd"]  # the failed message is forgotten
    assert Echo.bodies[0]["messages"][0] == system
    assert (Echo.bodies[0]["model"], Echo.bodies[0]["temperature"]) == ("echo-model", 0.0)
    assert "top_p" not in Echo.bodies[0]  # the server's own default
    assert "hello there" in (tmp_path / ".cache" / "llmjax" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_program(url: str, tmp_path: Path) -> None:
    terminal = chatting(url, tmp_path)
    terminal.wait_for("> ")
    terminal.type("forever")
    begun = terminal.wait_for("....")
    os.write(terminal.master, b"\x03")
    end = terminal.wait_for(", stopped")
    assert "^C" not in terminal.shown[begun:]  # it would move the cursor: the line that is redrawn would be there twice
    Echo.dropped.wait()  # the server is told
    terminal.type("next")
    end = terminal.wait_for("42 tokens, ", after=end)
    assert [m["role"] for m in Echo.bodies[1]["messages"]] == ["user", "assistant", "user"]
    terminal.wait_for("> ", after=end)
    # readline may be about to wait for a key: then it notices the signal only when something else wakes it.
    terminal.wait_for("> ", after=terminal.interrupt_until("/exit or Ctrl-D leaves"))
    os.write(terminal.master, b"\x04")
    assert terminal.end() == 0


def test_messages_of_several_lines(url: str, tmp_path: Path) -> None:
    terminal = chatting(url, tmp_path)
    end = terminal.wait_for("> ")
    terminal.type('"""one')
    terminal.type("")
    terminal.type('two"""')
    end = terminal.wait_for("42 tokens, ", after=end)
    terminal.type("three \\")
    terminal.type("four")
    end = terminal.wait_for("42 tokens, ", after=end)
    os.write(terminal.master, b"\x1b[200~five\nsix\x1b[201~\n")  # as a terminal pastes
    terminal.wait_for("42 tokens, ", after=end)
    terminal.type("/exit")
    assert terminal.end() == 0
    assert [body["messages"][-1]["content"] for body in Echo.bodies] == ["one\n\ntwo", "three\nfour", "five\nsix"]


def test_calls_are_shown_and_their_results_are_asked_for(url: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "weather", "parameters": {"type": "object"}}]')
    terminal = chatting(url, tmp_path, "--no-markdown")
    end = terminal.wait_for("> ")
    terminal.type(f"/tools {tools}")
    end = terminal.wait_for("tools: weather", after=end)
    terminal.type("/thinking off")
    end = terminal.wait_for("thinking: off", after=end)
    terminal.type("weather?")
    end = terminal.wait_for("I look.", after=end)
    end = terminal.wait_for('→ weather({"city": "Bonn"})', after=end)
    end = terminal.wait_for("result of weather: ", after=end)
    terminal.type("rain")
    terminal.wait_for("3 **rain**", after=end)
    terminal.type("/exit")
    assert terminal.end() == 0
    first, second = Echo.bodies
    assert first["tools"] == [{"type": "function", "function": json.loads(tools.read_text())[0]}]
    assert first["thinking"] is False
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]


def test_the_command_line_of_candle_vllm_s_chat(url: str) -> None:
    port = url.rpartition(":")[2]
    flags = "--stream --live --frequency 10 --thinking True --context_cache False --top_k 64 --max_tokens 16384"
    words = ["--system_prompt", "Thinking big!", "--port", port, *flags.split()]
    command = [sys.executable, "-m", "llmjax", "chat", *words]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=True)
    assert "hi" in done.stdout and "note" not in done.stderr
    (body,) = Echo.bodies
    assert body["messages"][0] == {"role": "system", "content": "Thinking big!"}
    assert (body["thinking"], body["top_k"], body["max_tokens"]) == (True, 64, 16384)


def test_what_is_no_file_of_tools(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    for text, said in (("{", "is not JSON"), ('[{"type": "function"}]', "entry 0 is not a function")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_tools(str(file))


def test_an_engine_s_own_text_is_read_as_its_family_writes_it() -> None:
    grammar = Parsers(tools="hermes", reasoning="think").grammar(with_tools=True, prompt="")
    assert grammar is not None
    parser, calls, pieces = OutputParser(grammar), 0, []
    for text in ("<think>a", "b</think>c", '<tool_call>{"name": "f", "argu', 'ments": {"x": 1}}</tool_call>'):
        piece, calls = _pieces_of(parser.feed(text), None, calls)
        pieces.append(piece)
    pieces.append(_pieces_of(parser.finish(whole=True), None, calls)[0])
    assert "".join(piece.reasoning for piece in pieces) == "ab" and "".join(piece.text for piece in pieces) == "c"
    begun, *rest = (call for piece in pieces for call in piece.calls)
    assert begun == CallPiece(0, name="f", id="call_0")
    assert "".join(call.arguments for call in rest) == '{"x": 1}' and {call.index for call in rest} == {0}


def test_piped_lines_are_answered_in_plain_text(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmjax", "chat", "my-model", "--url", url],
        input="hi\n/system You rhyme.\nho\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1 **hi**\n2 **ho**\n"
    assert done.stderr.count("42 tokens, ") == 2
    assert Echo.bodies[0]["model"] == "my-model"
    assert Echo.bodies[1]["messages"][0] == {"role": "system", "content": "You rhyme."}


def test_one_message(url: str) -> None:
    flags = ["--quick", "hi", "--model-name", "its", "--system-prompt", "Be brief."]
    command = [sys.executable, "-m", "llmjax", "chat", "--url", url, *flags]
    known = {**os.environ, "OPENAI_API_KEY": "of-all"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=known)
    assert (done.stdout, done.stderr) == ("2 **hi**\n", "")
    assert Echo.keys == ["Bearer of-all"]
    assert Echo.bodies[0]["model"] == "its" and Echo.bodies[0]["messages"][0]["content"] == "Be brief."
    command[command.index("hi")] = "fail"
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.endswith("too long for the context\n")


def test_lengths_and_speeds_of_answers_are_shown_if_asked(url: str) -> None:
    def shown(*flags: str, lines: str | None = None) -> tuple[str, str]:
        command = [sys.executable, "-m", "llmjax", "chat", "--url", url, *flags]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    answer, line = shown("--quick", "hi", "--stats")
    assert answer == "1 **hi**\n"
    assert re.fullmatch(r"42 tokens, [0-9.]+ tokens/s, first after [0-9.]+ s\n", line)
    assert shown("--no-stats", lines="hi\n") == ("1 **hi**\n", "")


def test_a_summary_counts_the_tokens_behind_the_first() -> None:
    whole = Answer(text="a b c", tokens=11, first_token=0.5, seconds=2.5, stopped=False)
    assert whole.summary() == "11 tokens, 5.0 tokens/s, first after 0.50 s"
    assert replace(whole, tokens=1, stopped=True).summary() == "1 tokens, first after 0.50 s, stopped"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "16"], "--page-size has no effect on the server of --url"),
        (["--n", "2"], "unknown flag --n"),
    ],
)
def test_flags_that_make_no_sense(url: str, flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "llmjax", "chat", "--url", url, *flags]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert done.stderr.startswith(f"llmjax: error: {message}")
