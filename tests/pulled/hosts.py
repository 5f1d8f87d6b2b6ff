"""An HTTP server on loopback that speaks the hub's protocol and the registry's, and a GGUF model that it may have."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf

from llmjax.pulled.registry import LAYER
from tests.checkpoint.gguf.test_model import KEYS, VOCAB, original_weights

SHA = "0123456789abcdef0123456789abcdef01234567"
SMALL = 2**10  # bytes of the largest file that the hub keeps in git itself


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tiny_gguf(path: Path, *, scale: float = 1.0) -> bytes:
    """A model of one layer, and of a vocabulary of which little is used."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in KEYS.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{name}", value)  # type: ignore[arg-type]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<end>", "w", "0", "w0", *(f"x{i}" for i in range(4, VOCAB))])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["w 0"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in original_weights().items():
        writer.add_tensor(name, tensor * tensor.dtype.type(scale))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@dataclass
class Hosts:
    """What the server has, and how it fails.

    Attributes:
        repositories: the hub's, {id: {path: content}}.
        manifests: the registry's, {"owner/model:tag": manifest}.
        blobs: the registry's, by SHA-256.
        sizes: what the hub says of the sizes of some files.
        cut: bytes of a file, whose path ends like this, that are sent; then the connection breaks.
        other: content that is sent in place of that of a path that ends like this.
        gates: what an answer whose path ends like this waits for, after its first half.
        asked: paths of GET requests of files.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    other: dict[str, bytes] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def publish(self, name: str, layers: Mapping[str, bytes]) -> dict[str, Any]:
        """Has the registry have a model, of layers by their kinds; returns its manifest, which may be changed."""
        entries = [
            {"mediaType": f"{LAYER}{kind}", "digest": f"sha256:{sha256(data)}", "size": len(data)}
            for kind, data in layers.items()
        ]
        self.blobs |= {sha256(data): data for data in layers.values()}
        self.manifests[name] = {"schemaVersion": 2, "config": entries[0], "layers": entries}
        return self.manifests[name]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0].strip("/")
        if path.startswith("v2/"):
            self._registry(handler, path)
        else:
            self._hub(handler, path)

    def _registry(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if named := re.fullmatch(r"v2/(.+)/manifests/(.+)", path):
            manifest = self.manifests.get(f"{named[1]}:{named[2]}")
            if manifest is None:
                return self._send(handler, 404, b"", {})
            return self._send(handler, 200, json.dumps(manifest).encode(), {})
        data = self.blobs.get(path.rpartition("sha256:")[2])
        return self._send(handler, 404 if data is None else 200, data or b"", {})

    def _hub(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        repo = next((r for r in self.repositories if path.removeprefix("api/models/").startswith(r)), None)
        if repo is None:
            return self._send(handler, 404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.repositories[repo]
        if path.startswith(f"api/models/{repo}/tree/"):
            return self._send(handler, 200, json.dumps([self._listed(*file) for file in files.items()]).encode(), {})
        if path.startswith("api/models/"):
            info = {"id": repo, "sha": self.commit(repo), "siblings": [{"rfilename": name} for name in files]}
            return self._send(handler, 200, json.dumps(info).encode(), {})
        data = files[path.removeprefix(f"{repo}/resolve/").partition("/")[2]]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": self.commit(repo)}
        if len(data) > SMALL:
            headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        return self._send(handler, 200, data, headers)

    def _listed(self, name: str, data: bytes) -> dict[str, Any]:
        size = self.sizes.get(name, len(data))
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": _oid(data)}
        if size > SMALL:
            entry["lfs"] = {"oid": sha256(data), "size": size, "pointerSize": 100}
        return entry

    def commit(self, repo: str) -> str:
        """Another one when a file changes."""
        return hashlib.sha1(b"".join(self.repositories[repo].values())).hexdigest()

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        path = handler.path.partition("?")[0]
        body = next((data for end, data in self.other.items() if path.endswith(end)), body)
        begin = 0
        start = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        if start and status == 200:
            headers["Content-Range"] = f"bytes {start[1]}-{len(body) - 1}/{len(body)}"
            status, begin, body = 206, int(start[1]), body[int(start[1]) :]
        handler.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command != "GET":
            return
        self.asked.append(path)
        if gate := next((gate for end, gate in self.gates.items() if path.endswith(end)), None):
            half = len(body) // 2
            handler.wfile.write(body[:half])
            handler.wfile.flush()
            gate.wait()
            body = body[half:]
        cut = next((count for end, count in self.cut.items() if path.endswith(end)), begin + len(body))
        handler.wfile.write(body[: max(0, cut - begin)])
        if cut < begin + len(body):
            handler.close_connection = True


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving() -> Iterator[Hosts]:
    """A running server, with nothing yet."""
    hosts = Hosts()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hosts.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has been ended
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hosts.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hosts
    finally:
        for gate in hosts.gates.values():
            gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
