"""Rewrites Lark grammars of texts as grammars of the same texts inside JSON strings.

JSON escapes each character independently (RFC 8259, section 7). So literals and expressions are rewritten, and the
rules between them stay, since escaping preserves sequences, choices, repetitions and intersections. It does not
preserve complements, so these are refused, as are parts that no text matches.

The lexer continues a terminal as long as the next byte allows it, and an escape has two bytes: after ``/.+/`` a
backslash would always continue the terminal and never begin the rule's escaped line end. So an expression that ends in
such a repetition becomes a rule of several terminals, one for runs of plain characters and one for each escape. If a
grammar has it inside other terminals, some texts of the grammar cannot be written, but no wrong text ever is.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import MAX_FORM_CHARS

ESCAPES = {char: json.dumps(char)[1:-1] for char in map(chr, (*range(0x20), 0x22, 0x5C))}
_OTHERS = r'[^"\\\x00-\x1f]'  # characters that are not escaped
# Terminals of Lark's ``common`` with characters that need escapes.
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
_STRING = r'"(?:\\.|[^"\\])*"'
_PART = re.compile(
    rf"""(?P<comment>(?:\#|//)[^\n]*)
    | (?P<first>{_STRING})\s*\.\.\s*(?P<last>{_STRING})
    | (?P<string>{_STRING})(?P<any_case>i?)
    | /(?P<expression>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    | %import\s+common\s*\.?\s*(?:\((?P<names>[^)]*)\)|(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?)
    | %ignore[ \t]+(?P<ignored>_?[A-Z][\w-]*)
    | (?P<foreign>%(?:json|regex|lark|llguidance)\b|<[^<>\s]+>|@[\w-]+|~(?!\s*\d))
    | (?P<brace>[{{}}])""",
    re.VERBOSE,
)
_ATOM = re.compile(
    r"""\((?:\?(?P<flags>[a-zA-Z-]*)(?P<scope>[:)]))?
    | (?P<close>\))
    | (?P<group>\[\^?\]?(?:\\.|[^\[\]\\])*\]|\[)
    | (?P<any>\.)
    | \\(?:x|u|U)\{(?P<braced>[0-9a-fA-F]{1,6})\}
    | \\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8}))
    | (?P<property>\\[pP](?:\{[^}]*\}|.))
    | (?P<kind>\\[dDwWsS])
    | \\(?P<control>[ntrfva])
    | \\(?P<escaped>[^a-zA-Z0-9])
    | (?P<other>\\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_HEAD = re.compile(r"^[ \t]*(?:[!?]*(?P<name>_?[a-zA-Z][\w-]*)[^:\n]*:|(?P<word>%\w+))", re.MULTILINE)
_LOOP = re.compile(r"(?P<head>.*?)(?P<unit>\[\^?\]?(?:\\.|[^\[\]\\])*\]|(?<!\\)(?:\\\\)*\.)(?P<times>[+*])", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HARMLESS = re.compile(r"\\p(?:[LMN]|\{[LMN][a-z]?\})")  # letters, marks and numbers, none of which is escaped


def in_json(grammar: str) -> str:
    """The grammar of JSON strings, without their quotes, whose texts match a grammar.

    Characters are escaped in exactly one way, that of ``json.dumps``; non-ASCII characters need no escapes.

    Args:
        grammar: a grammar in the Lark dialect of ``llguidance``.

    Raises:
        InvalidRequest: it has a part that cannot be in a JSON string, or that is not understood.
    """
    parts = list(_PART.finditer(grammar))
    rules = _Statements(grammar, parts)
    pieces: list[str] = []
    at = size = depth = 0
    for part in parts:
        written = _part(part, rules)
        if part["brace"]:
            depth += 1 if part["brace"] == "{" else -1
            if depth < 0:
                raise InvalidRequest("a } stands in the grammar that no { opens")
        pieces += [rules.renamed(grammar[at : part.start()]), written]
        size += len(pieces[-2]) + len(written)
        at = part.end()
        if size > MAX_FORM_CHARS:
            raise InvalidRequest(f"the grammar takes more than {MAX_FORM_CHARS} characters in JSON")
    return "".join([*pieces, rules.renamed(grammar[at:])])


class _Use(Enum):
    """The use of an expression."""

    RULE = 0  # it may become several terminals
    TERMINAL = 1
    IGNORED = 2  # it is repeated anyway


class _Statements:
    """The rules, terminals and ignored text of a grammar.

    A terminal that is one expression becomes a rule if only rules use it.
    """

    def __init__(self, grammar: str, parts: Sequence[re.Match[str]]) -> None:
        bare = _without(parts, grammar)
        heads = list(_HEAD.finditer(bare))
        self._starts = [head.start() for head in heads]
        self._names = [head["name"] or head["word"] for head in heads]
        bodies = [bare[head.end() : end] for head, end in zip(heads, [*self._starts[1:], len(bare)], strict=True)]
        owners = [(self._index(part), part) for part in parts if not part["comment"]]
        counts = Counter(index for index, _ in owners)
        others = {
            word for name, body in zip(self._names, bodies, strict=True) if not name.islower() for word in _words(body)
        }
        self._single = {
            alias: (_COMMON[name], "") for part in parts for name, alias in _imports(part) if name in _COMMON
        }
        for index, part in owners:
            if index >= 0 and part["expression"] and counts[index] == 1 and not bodies[index].strip():
                self._single[self._names[index]] = (part["expression"], part["flags"])
        self._rules = {name for name in self._single if name.isupper() and name not in others}

    def use(self, part: re.Match[str]) -> _Use:
        """The use of a part."""
        index = self._index(part)
        name = self._names[index] if index >= 0 else ""
        if name == "%ignore":
            return _Use.IGNORED
        return _Use.RULE if name.islower() or name in self._rules else _Use.TERMINAL

    def ignored(self, name: str) -> str:
        """The ignored text for a terminal, which is repeated anyway."""
        return _terminals(*self._single[name], _Use.IGNORED) if name in self._single else name

    def imported(self, name: str, alias: str) -> str:
        """The definition of a terminal of Lark's ``common``."""
        if name not in _COMMON:
            return f"%import common.{name} -> {alias}"
        use = _Use.RULE if alias in self._rules else _Use.TERMINAL
        return f"{self.renamed(alias)}: {_terminals(_COMMON[name], '', use)}"

    def renamed(self, text: str) -> str:
        """Text between the parts, with names of rules for terminals that have become rules."""
        return re.sub(r"[\w-]+", lambda word: f"text-{word[0].lower()}" if word[0] in self._rules else word[0], text)

    def _index(self, part: re.Match[str]) -> int:
        return bisect_right(self._starts, part.start()) - 1


def _without(parts: Sequence[re.Match[str]], grammar: str) -> str:
    """The grammar with spaces in place of its parts, so that only names and signs are left."""
    pieces, at = [], 0
    for part in parts:
        pieces += [grammar[at : part.start()], " " * len(part[0])]
        at = part.end()
    return "".join([*pieces, grammar[at:]])


def _words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


def _imports(part: re.Match[str]) -> list[tuple[str, str]]:
    """Imported terminals of Lark's ``common``, with their names in the grammar."""
    if part["name"]:
        return [(part["name"], part["alias"] or part["name"])]
    return [(name, name) for name in (part["names"] or "").replace(",", " ").split()]


def _part(part: re.Match[str], statements: _Statements) -> str:
    if part["foreign"]:
        what = "a complement (~)" if part["foreign"] == "~" else part["foreign"][:40]
        raise InvalidRequest(f"{what} cannot stand in the grammar of a text")
    if part["first"]:
        first, last = (_text(part[end]) for end in ("first", "last"))
        if len(first) != 1 or len(last) != 1:
            raise InvalidRequest(f"{part[0][:40]} is not a range of characters")
        chars = rf"[\U{ord(first):08x}-\U{ord(last):08x}]"
        return f"/{_class(chars)}/"
    if part["string"]:
        return _literal(_text(part["string"]), part["any_case"])
    if part["expression"]:
        return _terminals(part["expression"], part["flags"], statements.use(part))
    if part["ignored"]:
        return f"%ignore {statements.ignored(part['ignored'])}"
    if part["name"] or part["names"]:
        return "\n".join(statements.imported(name, alias) for name, alias in _imports(part))
    return part[0]


def _text(literal: str) -> str:
    try:
        text: str = json.loads(re.sub(r"(\\\\)|\\x([0-9a-fA-F]{2})", _as_unicode, literal))
        text.encode()
    except ValueError as error:  # UnicodeEncodeError is a ValueError too
        raise InvalidRequest(f"{literal[:40]} is not a text") from error
    return text


def _as_unicode(match: re.Match[str]) -> str:
    return match[1] or f"\\u00{match[2]}"


def _literal(text: str, any_case: str) -> str:
    if not any_case:
        return json.dumps("".join([ESCAPES.get(char, char) for char in text]))
    # The letters of escapes have only one case.
    parts = [part for part in re.split(r'([\x00-\x1f"\\])', text) if part]
    return f"({' '.join(_literal(part, '') + ('' if part in ESCAPES else 'i') for part in parts)})" if parts else '""'


def _terminals(text: str, flags: str, use: _Use) -> str:
    """A rewritten expression in Lark's syntax."""
    whole = f"/{_expression(text, flags)}/{flags}"
    inner = text[1:-1] if text.startswith("(") and _LOOP.fullmatch(text[1:-1]) else text
    loop = None if use is _Use.TERMINAL else _LOOP.fullmatch(inner)
    if loop is None or re.search(r"[|]|\(\?", head := loop["head"]) or not _balanced(head):
        return whole
    unit = loop["unit"] if loop["unit"].startswith("[") else r"[\s\S]" if "s" in flags else r"[^\n]"
    if use is _Use.IGNORED:
        return whole if head else f"/{_class(unit)}/{flags}"
    escaped = _members(unit)
    if not escaped or (head and _may_be_empty(head)):
        return whole
    first = f"/{_expression(head, flags)}/{flags} " if head else ""
    return f"({first}(/[{unit}&&{_OTHERS}]+/{flags} | /{_escapes(escaped)}/){loop['times']})"


def _balanced(head: str) -> bool:
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\[\]\\])*\]", "", head, flags=re.DOTALL)
    return bare.count("(") == bare.count(")") and "[" not in bare


def _may_be_empty(expression: str) -> bool:
    try:
        return re.fullmatch(expression, "") is not None
    except re.error:
        return True


def _expression(text: str, flags: str) -> str:
    """A rewritten expression in the syntax of Rust's regex."""
    _check_flags(flags)
    lines = ["s" in flags]  # for each open group, whether a dot matches a line end
    pieces: list[str] = []
    for atom in _ATOM.finditer(text):
        written = atom[0]
        if written.startswith("("):
            now = _with_flags(lines[-1], atom["flags"] or "")
            if atom["scope"] == ")":
                lines[-1] = now
            else:
                lines.append(now)
        elif atom["close"]:
            if len(lines) > 1:
                lines.pop()
        elif atom["group"]:
            written = _class(written)
        elif atom["any"]:
            written = _class(r"[\s\S]" if lines[-1] else r"[^\n]")
        elif code := atom["braced"] or atom["two"] or atom["four"] or atom["eight"]:
            written = _char(int(code, 16), written)
        elif atom["property"]:
            if not _HARMLESS.fullmatch(written):
                raise InvalidRequest(f"{written[:40]} is not understood in the grammar of a text")
        elif atom["kind"]:
            written = _class(f"[{written}]")
        elif atom["control"]:
            written = _char(ord(_CONTROLS[atom["control"]]), written)
        elif atom["escaped"] or len(written) == 1:
            written = _char(ord(atom["escaped"] or written), written)
        pieces.append(written)
    return "".join(pieces)


def _check_flags(flags: str) -> None:
    if "x" in flags:
        raise InvalidRequest("expressions with the flag x are not understood in the grammar of a text")


def _with_flags(lines: bool, flags: str) -> bool:
    on, _, off = flags.partition("-")
    _check_flags(on)
    return (lines or "s" in on) and "s" not in off


def _char(code: int, written: str) -> str:
    return _escapes([chr(code)]) if code < 0x80 and chr(code) in ESCAPES else written


def _class(text: str) -> str:
    """A rewritten class of characters."""
    found = _members(text)
    return f"(?:[{text}&&{_OTHERS}]|{_escapes(found)})" if found else text


def _members(text: str) -> list[str]:
    """The characters of a class that need escapes."""
    if not text.endswith("]") or any(mark in text for mark in ("&&", "--", "~~", r"\p", r"\P", r"\u{", r"\x{")):
        raise InvalidRequest(f"the class {text[:40]} is not understood in the grammar of a text")
    try:
        members = re.compile(text, re.ASCII)
    except re.error as error:
        raise InvalidRequest(f"the class {text[:40]} is not understood: {error}") from error
    return [char for char in ESCAPES if members.match(char)]


def _escapes(chars: Iterable[str]) -> str:
    """An expression for one of some escaped characters; their letters have only one case."""
    short: list[str] = []
    long: dict[str, list[str]] = {}
    for char in chars:
        escape = ESCAPES[char]
        if len(escape) == 2:
            short.append(escape[1])
        else:
            long.setdefault(escape[:-1], []).append(escape[-1])
    ways = [rf"\\[{''.join(re.escape(char) for char in short)}]"] if short else []
    ways += [rf"\{begin}[{''.join(ends)}]" for begin, ends in long.items()]
    return f"(?-i:{'|'.join(ways)})"
