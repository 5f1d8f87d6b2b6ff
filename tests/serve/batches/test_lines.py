"""Lines of a batch, however a file was written."""

from __future__ import annotations

import orjson
import pytest

from llmjax.serve.batches.lines import BadLine, read_lines
from llmjax.serve.limits import BodyLimits

LIMITS = BodyLimits(bytes=1000)
LINE = b'{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "%s"}}'
BOM = b"\xef\xbb\xbf"


def test_a_byte_order_mark_begins_a_file() -> None:
    lines = [BOM + LINE % (b"a", b"x") + b"\r\n", LINE % (b"b", b"y")]
    assert [line.custom_id for line in read_lines(lines, LIMITS)] == ["a", "b"]
    with pytest.raises(BadLine, match="line 2: it is not valid JSON"):
        list(read_lines([lines[1], BOM + lines[1]], LIMITS))


def test_half_a_character_becomes_a_replacement() -> None:
    (line,) = read_lines([LINE % (b"a", rb"cut \ud83d \ud83d\ude00")], LIMITS)
    assert orjson.loads(line.body) == {"prompt": "cut \ufffd \U0001f600"}
