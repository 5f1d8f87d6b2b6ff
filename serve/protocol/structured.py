"""Fields that demand a form of the answer: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older
``guided_*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from llmjax.sampling.structured import FreeText, StructuredOutputsParams
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.common import GenerationRequest

MAX_MARK = 256  # characters of what begins or ends a text before the form
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Of vLLM's ``structured_outputs``; what has no effect here is about its own back ends.
_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_RENDERED = ("lenient", "after", "instead")  # what a rendered request says beside these
_WITHOUT_EFFECT = ("disable_fallback", "_backend", "_backend_was_auto")


def demands_form(body: GenerationRequest) -> bool:
    """Whether a request has a field for ``structured_outputs`` to read, which may be large."""
    fields = ("response_format", "structured_outputs", *GUIDED, "guided_whitespace_pattern")
    return any(getattr(body, field) is not None for field in fields)


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that a request demands; None: any.

    Raises:
        ApiError: a field is not what it must be, or several demand something.
        InvalidRequest: likewise.
    """
    forms = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured(body.structured_outputs),
        **{field: _guided(body, field) for field in GUIDED},
    }
    forms_given = [(field, form) for field, form in forms.items() if form is not None]
    if len(forms_given) > 1:
        raise ApiError(
            f"`{forms_given[1][0]}` cannot be combined with `{forms_given[0][0]}`",
            param=forms_given[1][0],
            code="invalid_value",
        )
    if body.guided_whitespace_pattern is not None and not (forms_given and forms_given[0][0] == "guided_json"):
        raise ApiError(
            "`guided_whitespace_pattern` needs `guided_json`", param="guided_whitespace_pattern", code="invalid_value"
        )
    return forms_given[0][1] if forms_given else None


def _guided(body: GenerationRequest, field: str) -> StructuredOutputsParams | None:
    value = getattr(body, field)
    if value is None:
        return None
    return StructuredOutputsParams(
        **{GUIDED[field]: value}, whitespace_pattern=body.guided_whitespace_pattern, field=field
    )


def _structured(value: Any, path: str = "structured_outputs") -> StructuredOutputsParams | None:
    if value is None:
        return None
    outer = path == "structured_outputs"  # what may stand in place of a form is one form
    names = (*_FORMS, *_OPTIONS, *_RENDERED, *_WITHOUT_EFFECT)
    fields = _object(value, path, known=names if outer else tuple(name for name in names if name != "instead"))
    for name in ("disable_any_whitespace", "disable_additional_properties", "json_object", "lenient"):
        if not isinstance(fields.get(name), bool | None):
            raise ApiError(f"`{path}.{name}` must be a boolean", param=f"{path}.{name}", code="invalid_type")
    options = {name: fields[name] for name in (*_FORMS, *_OPTIONS, "lenient") if fields.get(name) is not None}
    return StructuredOutputsParams(
        **options,
        after=_free_text(fields.get("after"), f"{path}.after"),
        instead=_structured(fields.get("instead"), f"{path}.instead"),
        field="structured_outputs",
    )


def _free_text(value: Any, path: str) -> FreeText | None:
    if value is None:
        return None
    marks = _object(value, path, known=tuple(field.name for field in dataclass_fields(FreeText)))
    texts = {"opening": "", "closing": "", "otherwise": "", **marks}
    if not all(isinstance(text, str) and len(text) <= MAX_MARK for text in texts.values()):
        raise ApiError(f"`{path}` must hold texts of at most {MAX_MARK} characters", param=path, code="invalid_type")
    return FreeText(**texts)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    fields = _object(value, "response_format")
    match fields.get("type"):
        case "text":
            return None
        case "json_object" if fields.get("schema") is not None:  # as llama.cpp has it
            return StructuredOutputsParams(json=fields["schema"], field="response_format")
        case "json_object":
            return StructuredOutputsParams(json_object=True, field="response_format")
        case "json_schema":
            return _json_schema(fields)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=fields, field="response_format")
        case kind:
            raise ApiError(
                f"`response_format.type` must be text, json_object, json_schema or structural_tag, not "
                f"{cut(str(kind))!r}",
                param="response_format.type",
                code="invalid_value",
            )


def _json_schema(fields: Mapping[str, Any]) -> StructuredOutputsParams:
    path = "response_format.json_schema"
    wrapped = _object(fields.get("json_schema"), path)
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise ApiError(f"`{path}.schema` must be an object", param=f"{path}.schema", code="invalid_type")
    if not isinstance(wrapped.get("strict"), bool | None):
        raise ApiError(f"`{path}.strict` must be a boolean", param=f"{path}.strict", code="invalid_type")
    # What is not strict may leave out what cannot be enforced.
    return StructuredOutputsParams(json=schema, lenient=wrapped.get("strict") is not True, field="response_format")


def _object(value: Any, path: str, *, known: tuple[str, ...] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"`{path}` must be an object", param=path, code="invalid_type")
    if known is not None and (unknown := next((name for name in value if name not in known), None)) is not None:
        raise ApiError(
            f"unknown field `{path}.{cut(unknown)}`", param=f"{path}.{cut(unknown)}", code="unknown_parameter"
        )
    return value
