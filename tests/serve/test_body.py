"""Whatever JSON comes, validation ends in a request or in one clear error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic import ValidationError

from llmjax.errors import InvalidRequest
from llmjax.sampling.params import RequestOutputKind
from llmjax.serve.body import parse
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import BatchChatRequest, ChatMessage, ChatRequest, template_messages
from llmjax.serve.protocol.common import GenerationRequest, StreamOptions, sampling_params
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.generate import GenerateRequest, GenerativeScoringRequest
from llmjax.serve.protocol.pooling import CohereEmbedRequest
from llmjax.serve.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

pytestmark = pytest.mark.once  # no device computes here

MODELS: list[Any] = [ChatRequest, CompletionRequest, TokenizeChatRequest, TokenizeTextRequest, DetokenizeRequest]
OTHERS: list[Any] = [ChatMessage, StreamOptions, BatchChatRequest, CohereEmbedRequest]
OTHERS += [GenerateRequest, GenerativeScoringRequest]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


def test_every_field_of_openais_api_is_known() -> None:
    known = ChatRequest.model_fields.keys()
    assert set(ChatParams.__annotations__) | set(ChatParams.__mro__[0].__annotations__) <= known | {"stream"}
    assert set(CompletionParams.__annotations__) <= CompletionRequest.model_fields.keys() | {"stream"}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150)
@given(data=st.data())
def test_random_fields(model: Any, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=8)
    body = data.draw(st.dictionaries(names, json_values, max_size=4))
    base: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "tokens": [1],
    }
    full = {**{name: value for name, value in base.items() if name in model.model_fields}, **body}
    try:
        parsed = parse(full, model)
        if isinstance(parsed, ChatRequest):
            template_messages(parsed.messages)
            assert parsed.requested_tokens is None or parsed.requested_tokens in body.values()
        if isinstance(parsed, CompletionRequest):
            assert all(isinstance(prompt, str | list) for prompt in parsed.prompts)
        if isinstance(parsed, GenerationRequest):
            sampling_params(parsed, defaults={}, max_tokens=5, logprobs=None, detokenize=True)
    except ApiError as error:
        assert error.status == 400 and error.message and "\n" not in error.message
    except InvalidRequest as error:
        assert error.field in model.model_fields


@pytest.mark.parametrize("wrong", [1, "x", None, 1.5, [], {}, {"a": 1}], ids=str)
@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_many_wrong_entries_are_few_errors(model: Any, wrong: Any) -> None:
    """Pydantic makes an object of each error, and there may be as many as a body has values."""
    base: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "tokens": [1],
        "role": "user",
    }
    required = {name: value for name, value in base.items() if name in model.model_fields}
    for field in model.model_fields:
        for many in ([wrong] * 1000, {str(i): wrong for i in range(1000)}):
            try:
                model.model_validate({**required, field: many})
            except ValidationError as error:
                assert error.error_count() < 10, field


@pytest.mark.parametrize("model", MODELS)
def test_neutral_values_belong_to_fields_and_pass(model: Any) -> None:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "tokens": [1]}
    required = {name: value for name, value in base.items() if name in model.model_fields}
    for field, neutral in model.neutral_values.items():
        for value in (None, *neutral):
            parse({**required, field: value}, model)
        with pytest.raises(ApiError) as error:
            parse({**required, field: {"not": "neutral"}}, model)
        assert error.value.param == field and error.value.code == "unsupported_parameter"


def test_given_fields_win_over_the_models_defaults() -> None:
    body = parse({"prompt": "x", "temperature": 0.5, "logit_bias": {"7": -1}}, CompletionRequest)
    defaults = {"temperature": 0.1, "top_k": 64, "repetition_penalty": 1.1}
    params = sampling_params(body, defaults=defaults, max_tokens=9, logprobs=2, detokenize=True)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.5, 64, 1.1)
    assert params.max_tokens == 9 and params.logprobs == 2 and params.logit_bias == {7: -1.0}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
