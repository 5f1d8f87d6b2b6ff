"""Counts what a JSON text holds while it arrives, so that no parser meets more than it can take in at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.limits import BodyLimits

QUOTE, BACKSLASH, COMMA, COLON = b'"\\,:'
# With bit 0x20 set, '[' and '{' are one byte, and so are ']' and '}'.
CASE, OPEN, CLOSE = 0x20, ord("{"), ord("}")

KEY_AT_END = re.compile(rb'"([^"]*)"\s*\Z')
TAIL = 256  # bytes that are kept of a chunk, for a key that ends in the next one


class JsonGauge:
    """Counts values, nodes and depth of one JSON text. Linear in its bytes, whatever they are; builds nothing.

    What is not JSON is counted too, as if it were: the parser says what is wrong with it.

    Args:
        limits: what ``check`` compares with.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._inside = False  # a string
        self._escaped = False  # the next byte, by a backslash
        self._level = 0
        self._tail = b""
        self.values = 1
        self.nodes = 0
        self.depth = 0
        # Entries of the field of the outermost object that is arriving, and of the one that had most.
        self._field: bytes | None = None
        self._entries = 0
        self._largest: bytes | None = None
        self._most = 0

    @property
    def exceeded(self) -> bool:
        """Whether the text holds more than a parser should meet."""
        limits = self._limits
        return self.values > limits.values or self.nodes > limits.nodes or self.depth > limits.depth

    def check(self) -> None:
        """Raises ``ApiError`` (400), which names the largest field, if a limit is exceeded."""
        if self.depth > self._limits.depth:
            message = f"the body is not valid JSON here: it is nested deeper than {self._limits.depth}"
            raise ApiError(message, code="invalid_json")
        if not self.exceeded:
            return
        field, entries = (self._field, self._entries) if self._entries > self._most else (self._largest, self._most)
        limits = f"a request may hold {self._limits.values} values, and {self._limits.nodes} objects, arrays and keys"
        if field is None or 2 * entries < self.values:
            raise ApiError(f"the body has {self.values} values: {limits}", code="too_many_values")
        name = cut(field.decode(errors="replace"))
        raise ApiError(f"`{name}` has {entries} entries: {limits}", param=name, code="too_many_values")

    @property
    def inside(self) -> bool:
        """Whether the last byte lies in a string."""
        return self._inside

    def feed(self, chunk: bytes) -> bool:
        """Takes the next bytes of the text.

        Returns:
            Whether all of them lie in one string that began before them.
        """
        before = self._tail
        self._tail = (before + chunk[-TAIL:])[-TAIL:]
        began = self._inside
        if not chunk or (began and not self._escaped and b'"' not in chunk and b"\\" not in chunk):
            return began  # the middle of a long string
        text = np.frombuffer(chunk, np.uint8)
        outside = ~self._strings(text)
        low = text | CASE
        opens, closes = outside & (low == OPEN), outside & (low == CLOSE)
        colons, commas = outside & (text == COLON), outside & (text == COMMA)
        levels = self._level + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        starts = opens | commas  # each is followed by a value
        self.values += int(np.count_nonzero(starts))
        self.nodes += int(np.count_nonzero(opens)) + int(np.count_nonzero(colons))
        self.depth = max(self.depth, int(levels.max()))
        self._level = int(levels[-1])
        keys = np.flatnonzero(colons & (levels == 1))
        self._by_field(keys, entries=np.cumsum(starts & (levels > 1)), name=partial(_key, before, chunk))
        return began and not outside.any()

    def _strings(self, text: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which bytes lie in a string: from its opening quote to the byte before its closing one."""
        quotes = text == QUOTE
        escapes = np.flatnonzero(text == BACKSLASH)
        first_is_escaped, self._escaped = self._escaped, False
        if first_is_escaped:
            quotes[0] = False
            escapes = escapes[escapes > 0]
        if len(escapes):
            # In a run of backslashes every second one is itself escaped.
            index = np.arange(len(escapes))
            run_starts = np.concatenate(([True], np.diff(escapes) > 1))
            place = index - np.maximum.accumulate(np.where(run_starts, index, 0))
            escaped = escapes[place % 2 == 0] + 1
            self._escaped = bool(escaped[-1] == len(text))
            quotes[escaped[:-1] if self._escaped else escaped] = False
        inside = np.bitwise_xor.accumulate(quotes) ^ self._inside
        self._inside = bool(inside[-1])
        return inside

    def _by_field(
        self, keys: npt.NDArray[np.int_], *, entries: npt.NDArray[np.int_], name: Callable[[int], bytes | None]
    ) -> None:
        """Notes which field of the outermost object has most entries.

        Args:
            keys: where the colons of its fields are.
            entries: [bytes], how many values below the outermost object have begun up to each byte.
            name: a field's name by its colon.
        """
        if not len(keys):
            self._entries += int(entries[-1])
            return
        totals = np.diff(np.concatenate(([-self._entries], entries[keys], entries[-1:])))
        largest = int(totals[:-1].argmax())
        if totals[largest] > self._most:
            self._most = int(totals[largest])
            self._largest = self._field if largest == 0 else name(int(keys[largest - 1]))
        self._field, self._entries = name(int(keys[-1])), int(totals[-1])


def _key(before: bytes, chunk: bytes, colon: int) -> bytes | None:
    match = KEY_AT_END.search((before + chunk[max(0, colon - TAIL) : colon])[-TAIL:])
    return match[1] if match else None
