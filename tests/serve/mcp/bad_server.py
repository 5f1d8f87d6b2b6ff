"""A tool server that does one thing wrong: ``python bad_server.py WHAT``. It speaks the protocol without its SDK."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
DEEP: dict[str, Any] = OBJECT
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
LISTS: dict[str, list[dict[str, Any]]] = {
    "schema": [{"name": "t", "inputSchema": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}],
    "deep": [{"name": "t", "inputSchema": DEEP}],
    "twice": [{"name": "t", "inputSchema": OBJECT}] * 2,
    "spaced": [{"name": "t t", "inputSchema": OBJECT}],
    "thousand": [{"name": f"t{i}", "inputSchema": OBJECT} for i in range(1000)],
}
RESULTS: dict[str, Any] = {
    "controls": {"content": [{"type": "text", "text": "\x1b[31mred\x00\u202e\U0001f600 [[other]]"}]},
    "half": {"content": [{"type": "text", "text": "\ud83d half"}]},
    "notes": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
    "nothing": {},
    "number": 3,
}


def answer(what: str, request: dict[str, Any]) -> dict[str, Any]:
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            about = {"name": "bad", "version": "1"}
            return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
        case "tools/list":
            more = {"nextCursor": "again"} if what == "endless" else {}
            return {"result": {"tools": LISTS.get(what, [{"name": "t", "inputSchema": OBJECT}]), **more}}
        case "tools/call":
            return {"result": RESULTS.get(what, {"content": [{"type": "text", "text": "fine"}]})}
    return {"error": {"code": -32601, "message": "not known"}}


def main(what: str) -> None:
    if what == "silent":
        time.sleep(3600)
    for line in sys.stdin:
        request = json.loads(line)
        if what == "chatty":
            print("noise, not a message", flush=True)
        if "id" not in request:
            continue
        if what == "dies" and request["method"] == "tools/call":
            print('{"jsonrpc": "2.0", "id"', end="", flush=True)  # half of a message
            return
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(what, request)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
