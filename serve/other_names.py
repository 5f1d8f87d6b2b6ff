"""Errors of the chat path in the words of the API that a request came by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmjax.errors import LLMJaxError
from llmjax.serve.errors import ApiError, as_api_error


@contextmanager
def other_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field at fault in errors that come out of the block.

    Args:
        names: the API's name for a field of the chat's, as a pattern and its replacement; the first that fits counts.

    Raises:
        ApiError: in place of one with the chat's name.
    """
    try:
        yield
    except (ApiError, LLMJaxError) as error:
        failure = as_api_error(error)
        for pattern, name in names.items():
            if failure.param is not None and re.match(rf"{pattern}\b", failure.param):
                failure.param = re.sub(rf"^{pattern}\b", name, failure.param, count=1)
                failure.message = re.sub(rf"\b{pattern}\b", name, failure.message)
                break
        raise failure from error
