"""The project's own words: American spelling, and phrases that a native reader does not stumble on."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "kernels",
    "models",
    "llmjax",
    "serve",
    "configs",
    "docs",
    "benchmarks",
    "deploy",
    "examples",
    "tests",
    ".ci",
)
FILES = ("README.md", "pyproject.toml", "Makefile", "hatch_build.py")
SUFFIXES = {".py", ".md", ".cc", ".h", ".yaml", ".toml"}

# "the text is no number"; but "there is no number", "is no longer" and "is no faster" are English.
IS_NO = re.compile(
    r"(?P<there>\bthere\s+(?:(?:will|would|can|may|must|should)\s+)?)?"
    r"\b(?:is|are|was|were|be|been|being)[\s#/]+no[\s#/]+(?!(?:long|fast|slow|small|larg|bett|high|low)er\b|more\b|less\b|worse\b)\S+",
    re.IGNORECASE,
)
ISE = (
    "quanti tokeni normali optimi speciali organi randomi vectori summari penali initiali seriali recogni minimi maximi"
)
BRITISH = re.compile(
    rf"(?:{'|'.join(ISE.split())})s(?:e|ed|er|ers|es|ing|ations?)(?![a-z])"
    r"|(?:behavi|col|fav|flav|neighb|hon)our|licence|\bcentred?\b|\b(?:model|label|travel)l(?:ed|ing)\b|\bmaths\b",
    re.IGNORECASE,
)

PEOPLE = (
    "those|people|person|anyone|anybody|someone|somebody|everyone|everybody|nobody|others|one|reader|readers"
    "|user|users|client|clients|operator|operators|publisher|publishers|developer|developers|them|you|callers?"
)
PHRASES = re.compile(
    "|".join(
        [
            # "tokens behind a prompt"; but servers are behind a proxy, files are left behind, and streams fall behind.
            r"(?<!left )(?<!nothing )(?<!leaves )(?<!leave )(?<!fall )(?<!falls )\bbehind\b"
            r"(?!(?: [\w']+){0,3} (?:proxy|haproxy|router|gateway|address|balancer|firewall|ingress|interface)\b)",
            # "arguments as of `attend`"; but "as of JAX 0.10" and "as of 2026" are English.
            r"\bas of\b(?! (?:\d|now\b|today\b|version\b|[A-Z]\w+ \d))",
            # "Who wants it passes a flag"; but "those who want it", "says who may join", "Who wrote it?" are English.
            r"(?<!\bsay )(?<!\bsays )(?<!\bknow )(?<!\bknows )\bwho\b(?![^.]*\?)",
            # "takes so many tokens"; but "so many that it is slow" is English.
            r"\bso many\b(?! that\b)",
            # "is not kept, for it is never read"
            r"[,;] for (?:it|they|there)\b",
            r"\bsuch an? one\b",
            r"\bsince long\b",
            r"\bwhat (?:is|was) said\b",
            r"\bpass(?:es|ed|ing)? by nothing\b",
        ]
    ),
    re.IGNORECASE,
)
PERSON = re.compile(rf"\b(?:{PEOPLE})\b[^.;:]{{0,40}}$", re.IGNORECASE)
# First lines of docstrings that are half a sentence, and descriptions of arguments that lack a noun.
HALF = re.compile(r"(?:Of|As|That|Those|Whose)\b[^\n]*")
NOUNLESS = re.compile(r"^\s+([\w*`]+(?:, [\w*`]+)*: (?:of|that|whose|with|as of|who)\b.*)$", re.MULTILINE)


def findings(text: str) -> Iterator[str]:
    """Words of a text that should be spelled or put differently, whatever kind of text it is."""
    for match in IS_NO.finditer(text):
        if not match["there"]:
            yield " ".join(match[0].split())
    for match in BRITISH.finditer(text):
        yield match[0]


def phrases(text: str) -> Iterator[str]:
    """Phrases of prose that a reader stumbles on, each with the word before it and the one after it."""
    text = " ".join(text.split())
    for match in PHRASES.finditer(text):
        before, after = text[: match.start()], text[match.end() :]
        if match[0].lower() == "who" and PERSON.search(before):
            continue
        yield " ".join([*before.split()[-1:], match[0], *after.split()[:1]])


def halves(docstring: str) -> Iterator[str]:
    """Lines of a docstring that lack what they speak of: a first line, descriptions of arguments."""
    text = cleandoc(docstring)
    if first := HALF.match(text):
        yield first[0]
    yield from NOUNLESS.findall(text)


def prose_of_python(source: str, *, messages: bool) -> Iterator[str]:
    """Comments of a module, its docstrings, and with ``messages`` its other strings that are several words."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments: list[str] = []
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("#"))
        elif token.type != tokenize.NL and comments:
            yield " ".join(comments)
            comments = []
    tree = ast.parse(source)
    yield from docstrings(tree)
    if messages:
        known = set(docstrings(tree))
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                yield from [node.value] if " " in node.value and node.value not in known else []


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            yield from [] if text is None else [text]


def stumbles(path: Path) -> Iterator[str]:
    """What is put badly in a file, beside its spelling."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from phrases(re.sub(r"(?m)^\s*(?:#|//)", "", text))
        return
    # Parsing takes long, so only files are parsed in which something could be found.
    if PHRASES.search(re.sub(r"[\s#]+", " ", text)):
        for prose in prose_of_python(text, messages="tests" not in path.relative_to(ROOT).parts):
            yield from phrases(prose)
    if re.search(r'"""(?:Of|As|That|Those|Whose)\b', text) or NOUNLESS.search(text):
        for docstring in docstrings(ast.parse(text)):
            yield from halves(docstring)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the text is no number", ["is no number"]),
        ("# groups that are no\n    # multiple of 16", ["are no # multiple"]),
        ('f"{path}: is no {kind}"', ['is no {kind}"']),
        ("there is no number; There will be no more; it is no longer so, and is no faster", []),
        ("def dequantise(rows): the neighbours of a colour", ["quantise", "neighbour", "colour"]),
        ("quantize, precise, otherwise, noise, an optimist, a task that was cancelled()", []),
    ],
)
def test_what_is_found(text: str, found: list[str]) -> None:
    assert list(findings(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the tokens behind\n  a prompt", ["tokens behind a"]),
        ("a server behind a proxy, behind Ray's HAProxy, behind one address; files that were left behind", []),
        ("arguments as of `attend`.", ["arguments as of `attend`."]),
        ("as of JAX 0.10, as of 2026, as of now", []),
        ("Who wants it passes a flag. It waits for who asks.", ["Who wants", "for who asks."]),
        ("those who ask, users of a key who wait, and it says who may join; Who wrote Faust?", []),
        ("takes so many tokens; so many that it is slow", ["takes so many tokens;"]),
        ("it is dropped, for it is never read; what stands for it", ["dropped , for it is"]),
        ("it was done since long, if there is such a one", ["done since long ,", "is such a one"]),
        ("nothing of what is said passes by nothing", ["of what is said passes", "said passes by nothing"]),
    ],
)
def test_what_is_stumbled_on(text: str, found: list[str]) -> None:
    assert list(phrases(text)) == found


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Of one engine.", ["Of one engine."]),
        ("As `attend`, in f32.\n\nThose of others too.", ["As `attend`, in f32."]),
        ("One engine's.\n\n    Args:\n        seconds: of a step.\n        rows, columns: that are read.\n    ", [
            "seconds: of a step.",
            "rows, columns: that are read.",
        ]),
        ("Offers a token.\n\n    Args:\n        tokens: those of it.\n        seconds: duration of a step.\n", []),
        ("Numbers at random: of zeros a card computes faster.", []),
    ],
)  # fmt: skip
def test_what_is_half_a_sentence(docstring: str, found: list[str]) -> None:
    assert list(halves(docstring)) == found


def test_prose_of_python() -> None:
    source = '''
def f():
    """Whose
    docstring."""
    # one
    # two
    g("a", f"the {name} is"  # three
      " bad", "key")
'''
    prose = ["one  two", "three", "Whose\n    docstring."]
    assert [p.strip() for p in prose_of_python(source, messages=False)] == prose
    assert [p.strip() for p in prose_of_python(source, messages=True)] == [*prose, "the {} is bad"]


def own_files() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    paths = [path for path in found if not {"node_modules", "include"} & {*path.parts} and path != Path(__file__)]
    assert len(paths) > 300
    return [*paths, *(ROOT / name for name in FILES)]


def test_own_files() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in own_files()
        if (found := list(findings(path.read_text(encoding="utf-8"))))
    }
    assert not wrong


def test_own_phrases() -> None:
    wrong = {str(path.relative_to(ROOT)): found for path in own_files() if (found := list(stumbles(path)))}
    assert not wrong
