"""Grammars of texts as grammars of what stands in JSON strings: both take the same texts, each in its own spelling."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.constraints.quoted import _COMMON, ESCAPES, in_json
from llmjax.errors import InvalidRequest
from tests.constraints.test_schema_suite import Bytes, accepts

COMPILER = GrammarCompiler(Bytes(), vocab_size=257, eos_token_ids=[256])  # type: ignore[arg-type]
SQL = r"""
// What an analyst may ask.
start: "SELECT"i columns "FROM"i NAME [where] ";"
columns: "*" | NAME ("," NAME)*
where: "WHERE"i NAME "=" (INT | STRING)
NAME: /[a-z_]+/
STRING: /"(\\.|[^"\\\n])*"/ | "'" /[^']*/ "'"
%import common.INT
%import common.WS
%ignore WS
"""
CODEX = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Update File: " filename LF move? change?
filename: /(.+)/
move: "*** Move to: " filename LF
change: (context | line)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
%import common.LF
"""
PATCH = 'start: begin line+ end\nbegin: "*** Begin\\n"\nline: /[-+ ][^\\n]*\\n/\nend: "*** \\"End\\""\n'
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "patches": (
        CODEX,
        [
            '*** Begin Patch\n*** Update File: a\\"b".py\n@@ def f():\n-\treturn "x"\n+\n \n'
            "*** End of File\n*** End Patch",
            "*** Begin Patch\n*** Update File: a\n*** Move to: b\\n\n@@\n*** Update File: c\n*** End Patch\n",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Update File: a\nx\n*** End Patch"],
    ),
    "ends": (
        'start: (TEXT "\\t")+ /[^,]*/ "," SPACE x "\\\\" | "(" (ANY "\\"")~2\n'
        "TEXT: /a[^\\t]+/\nSPACE: /[ \\n]+/\nx: SPACE? /[x\\r]*/\nANY: /[a\\n]*/ /b+/\n",
        ['a b\\n\tac\t",  \n \nx\rx\\', "ab\t, \\", '(a\nb"b"'],
        ["a\t,\n\\", "ab\t,\\", "ab\t, \\x"],
    ),
    "patch": (PATCH, ['*** Begin\n- "a\\b"\n+\tü\n*** "End"'], ['*** Begin\n*** "End"', "*** Begin\n-a\n*** End"]),
    "sql": (
        SQL,
        ["select *\nfrom t;", 'SELECT a, b\tFROM t WHERE x = "a\\"b";', "select a from t where x = 'it\n\"is\"';"],
        ["select from t;", 'select a from t where x = "a"b";'],
    ),
    "dots": (r"start: /a.b/ | /c(?s:.)d/ | /(?s)e.f/", ['a"b', "a\\b", "aäb", "c\nd", "e\nf"], ["a\nb", "ab", 'a\\"b']),
    "negated": (r"start: /[^a-z]+/", ['"\\\n\x00Ä', "\n"], ["a", "", "\na"]),
    "classes": (
        r'start: /[\s"]x/ | /\S{2}\D/ | /[\]\\]y/',
        ["\nx", '"x', '""\\', "\\y", "]y"],
        ["a", "ax", "ay"],
    ),
    "cases": (
        r'start: "aB\n\"c"i | /x\ny/i | "q" /[\t\x01]/i',
        ['Ab\n"C', "X\nY", "q\t", "q\x01"],
        ["aBn", "xnY", "qT"],
    ),
    "characters": (
        r'start: /\x22\u{5c}\u0022/ | "\u0022\x41" | /\/\./',
        ['"\\"', '"A', "/."],
        ['\\"\\', "A", "/x"],
    ),
    "ranges": (r'start: (" ".."#" | "a".."c")~2..3', ['"a', '!"#'], ["dd", '"', "aaaa"]),
    "counts": (r"start: /[\n]/{2,3} | LINE~2" + '\nLINE: "\\r" | /"{2}/', ["\n\n", '\r""', '""""'], ["\n", "\r", '""']),
    "intersections": (r"start: AB" + '\nAB: A & B\nA: /[a-z"]+/\nB: /.*".*/\n', ['a"b', '"'], ["ab", "A"]),
    "comments": ('# "\nstart: "a" // "\n  | /\\//\n', ["a", "/"], ['"']),
}


def matcher(grammar: str) -> LLMatcher:
    return COMPILER.matcher(json.dumps({"grammars": [{"lark_grammar": grammar}]}))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_texts(name: str) -> None:
    grammar, good, bad = GRAMMARS[name]
    plain, inside = matcher(grammar), matcher(in_json(grammar))
    for text in good:
        assert accepts(plain, text) and accepts(inside, quoted(text)), text
        assert quoted(text) == text or not accepts(inside, text), text
    for text in bad:
        assert not accepts(plain, text) and not accepts(inside, quoted(text)), text


@pytest.mark.parametrize("name", _COMMON)
def test_terminals_of_lark(name: str) -> None:
    """Names of the library, and what stands here for them."""
    plain = matcher(f"start: X\n%import common.{name} -> X")
    several = matcher(in_json(f"start: {name}\n%import common ({name}, INT)"))
    inside = matcher(in_json(f"start: X\n%import common.{name} -> X"))
    texts = [
        '"a\\"b"',
        '"',
        " ",
        "\t ",
        "\r\n",
        "\n",
        "\r",
        "# a",
        "// a",
        "/* a\n* */",
        "/* */ */",
        "-- a",
        "-- \n",
        "",
    ]
    for text in texts:
        assert accepts(plain, text) == accepts(inside, quoted(text)) == accepts(several, quoted(text)), text


ATOMS = ["a", ".", "[ab]", "[^a]", r"[^\n\"]", r"\n", r"\"", r"\\", r"\s", r"\W", "[\\t-!]", "(?:a|\\t)", '"', r"\x0b"]
TEXTS = st.text(alphabet='ab"\\\n\t\x0b !n', max_size=4)


@settings(deadline=None, max_examples=80)
@given(
    atoms=st.lists(st.sampled_from(ATOMS), min_size=1, max_size=4),
    flags=st.sampled_from(["", "i", "s"]),
    data=st.data(),
)
def test_any_expression(atoms: list[str], flags: str, data: st.DataObject) -> None:
    grammar = f"start: /{''.join(atoms)}/{flags}"
    plain, inside = matcher(grammar), matcher(in_json(grammar))
    for _ in range(8):
        text = data.draw(TEXTS)
        assert accepts(plain, text) == accepts(inside, quoted(text)), (grammar, text)


def test_every_character_has_its_escape() -> None:
    inside = matcher(in_json(r"start: /[\s\S]/"))
    for char in [*ESCAPES, "/", "\x7f", "é", "😀"]:
        assert accepts(inside, quoted(char)) and json.loads(f'"{quoted(char)}"') == char
        assert not accepts(inside, char) or char not in ESCAPES


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start: "a" %json {"type": "object"}', "%json"),
        ("start: <|im_end|>", "<|im_end|>"),
        ("start: @other", "@other"),
        ("start: A\nA: ~/a/", "complement"),
        ("start: /a b/x", "flag x"),
        ("start: /(?x)a b/", "flag x"),
        (r"start: /[a-z&&[^b]]/", "class"),
        (r"start: /\P{L}/", r"\P{L}"),
        (r"start: /[\p{L}]/", "class"),
        ('start: "a" } x: "b"', "}"),
        ('start: "ab".."c"', "range"),
        (r'start: "\ud800"', "not a text"),
        ("start: " + "/[^a]/ " * 9000, "characters in JSON"),
    ],
)
def test_what_cannot_stand_in_a_string_is_refused(grammar: str, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        in_json(grammar)
    assert named in str(caught.value) and len(str(caught.value)) < 200
