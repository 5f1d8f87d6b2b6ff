"""What a user may demand of an output's form. Names follow vLLM's ``StructuredOutputsParams``."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.errors import InvalidRequest

MAX_FORM_CHARS = 2**18  # of a schema as JSON, an expression, or all choices
MAX_GRAMMAR_CHARS = 2**16
MAX_SCHEMA_PARTS = 4096  # objects and arrays: some schemas take a time that grows with their square
MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class FreeText:
    """Free text before the form.

    Args:
        opening: what it begins with; empty: the output begins inside. Where there is an opening, there need not be any
            free text.
        closing: what it ends with.
        otherwise: what stands before the form instead, where there is none.
    """

    opening: str
    closing: str
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A form that an output must have: exactly one of the first six.

    Args:
        json: a JSON schema, as an object or as text.
        regex: an expression that the whole output matches; Rust's syntax, without look-around.
        choice: texts, of which the output is one.
        grammar: Lark, GBNF or EBNF.
        json_object: any JSON object.
        structural_tag: free text in which tags lead to parts that have a form.
        disable_any_whitespace: JSON without white space.
        disable_additional_properties: objects have the properties that their schema names, and no others, where it does
            not say, as llama.cpp, Ollama and vLLM's own grammars have it; false: any others too, as JSON Schema has it.
        whitespace_pattern: what may stand between the parts of JSON, as an expression.
        lenient: keywords of a schema that cannot be enforced are left out; otherwise they are errors.
        after: what comes before, for models that reason.
        instead: another form, which an output may have in place of this one.
        field: what a request calls this, for errors.

    Raises:
        InvalidRequest: there are none or several forms, or one of them is not what it must be.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None
    lenient: bool = False
    after: FreeText | None = None
    instead: StructuredOutputsParams | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if isinstance(self.choice, Sequence) and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"both {given[0]} and {given[1]}" if given else "no form"
            raise InvalidRequest(f"{self.field} has {what}; give one of {', '.join(KINDS)}", field=self.field)
        (kind,) = given
        if kind in ("json", "structural_tag"):
            object.__setattr__(self, kind, self._json_text(kind))
        elif kind == "choice":
            self._check_choice()
        elif kind == "json_object":
            self._check(self.json_object is True, "json_object must be true or false")
        else:
            text = getattr(self, kind)
            self._check(isinstance(text, str) and bool(text), f"{kind} must be a text")
            limit = MAX_GRAMMAR_CHARS if kind == "grammar" else MAX_FORM_CHARS
            self._check(len(text) <= limit, f"{kind} has more than {limit} characters")
            self._check_unicode(kind, text)
        if self.whitespace_pattern is not None:
            self._check(isinstance(self.whitespace_pattern, str), "whitespace_pattern must be a text")
            self._check(len(self.whitespace_pattern) <= 256, "whitespace_pattern has more than 256 characters")
            self._check_unicode("whitespace_pattern", self.whitespace_pattern)

    def _json_text(self, kind: str) -> str:
        value = getattr(self, kind)
        try:
            text = value if isinstance(value, str) else json_module.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{self.field}: {kind} cannot be JSON: {error}", field=self.field) from error
        self._check(len(text) <= MAX_FORM_CHARS, f"{kind} has more than {MAX_FORM_CHARS} characters")
        parts = text.count("{") + text.count("[")
        self._check(parts <= MAX_SCHEMA_PARTS, f"{kind} has more than {MAX_SCHEMA_PARTS} objects and arrays")
        self._check_unicode(kind, text)
        return text

    def _check_choice(self) -> None:
        choice = self.choice
        self._check(
            isinstance(choice, tuple) and len(choice) > 0 and all(isinstance(text, str) and text for text in choice),
            "choice must be a list of texts that are not empty",
        )
        assert choice is not None
        self._check(len(choice) <= MAX_CHOICES, f"choice has {len(choice)} entries; at most {MAX_CHOICES} are allowed")
        self._check(sum(map(len, choice)) <= MAX_FORM_CHARS, f"choice has more than {MAX_FORM_CHARS} characters")
        for text in choice:
            self._check_unicode("choice", text)

    def _check_unicode(self, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{self.field}: {name} has half of a surrogate pair", field=self.field) from None

    def _check(self, fits: bool, message: str) -> None:
        if not fits:
            raise InvalidRequest(f"{self.field}: {message}", field=self.field)


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The same under vLLM's older name.

    Args:
        backend: which library vLLM is to use; here there is one.
    """

    backend: str | None = None
    field: str = "guided_decoding"
