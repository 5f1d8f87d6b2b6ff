"""What the written pages cannot see by themselves: that tables beside the code know all that the code has."""

from __future__ import annotations

import pytest

from llmjax import errors
from llmjax.serve.error_codes import ERROR_CODES
from llmjax.serve.openapi import BODIES
from llmjax.serve.protocol.meanings import MEANINGS, meaning
from llmjax.settings import settings_of
from tests.reference import environment, metrics, python, routes, settings
from tests.reference import errors as errors_page

pytestmark = pytest.mark.smoke

BODY_TYPES = sorted({body for some in BODIES.values() for body in some}, key=lambda body: body.__name__)


def test_every_code_of_an_error_is_explained() -> None:
    sites = errors_page.sites()
    assert len(sites) > 150
    assert {site.code for site in sites if site.code is not None} == set(ERROR_CODES)


def test_every_status_without_a_code_is_explained() -> None:
    statuses = {site.status for site in errors_page.sites() if site.code is None and site.status}
    assert statuses <= set(errors_page.REST)


def test_every_exception_has_a_cure() -> None:
    made = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.LLMJaxError) and thing is not errors.LLMJaxError
    }
    assert made == set(errors_page.CLASSES)


@pytest.mark.parametrize("body", BODY_TYPES, ids=lambda body: body.__name__)
def test_every_field_that_is_taken_has_a_meaning(body: type) -> None:
    taken = set(body.model_fields) - set(body.neutral_values)
    assert {name for name in taken if meaning(body.__name__, name) is None} == set()


def test_no_meaning_is_left_of_a_field_that_is_gone() -> None:
    document = routes.page()
    for name in MEANINGS:
        body, _, field = name.rpartition(".")
        assert f"| `{field}`" in document, name
        assert not body or f"### {body}\n" in document, name


def test_every_variable_that_is_read_is_explained() -> None:
    found = environment.read_names()
    assert {"LLMJAX_CPU_ISA", "OPENAI_API_KEY", "SLURM_PROCID"} <= found
    assert found <= set(environment.KNOWN) | environment.GIVEN
    assert set(environment.OWN) - {"HF_TOKEN"} <= found, "a variable of this program's that nothing reads"


def test_values_of_settings_are_told() -> None:
    of_engine = settings_of(settings.EngineConfig)
    assert settings.accepted(of_engine["page_size"]) == "an integer, at least 1"
    assert settings.accepted(of_engine["scheduling_policy"]) == "`fcfs`, `priority`"
    assert settings.accepted(of_engine["kv_cache_memory_bytes"]) == "a number of bytes such as 4GiB, at least 1"
    assert settings.default(of_engine["packed_weights_bytes"]) == "16 GiB"
    assert settings.default(of_engine["enable_prefix_caching"]) == "on"
    text = settings.page()
    assert "also: `--mem` in MiB, `--kvcache-mem-gpu` in MiB" in text
    assert all(f"#### `{setting.flag}`" in text for setting in of_engine.values())


def test_values_of_fields_are_told() -> None:
    text = routes.page()
    for row in (
        "| `temperature` | number from 0 |",
        "| `top_p` | number above 0 to 1 |",
        "| `presence_penalty` | number from -2 to 2 |",
        "| `repeat_last_n` | integer from -1 to 1,024 |",
        "| `logit_bias` | object of integer or number |",
        "| `watermarking` | `false` | not supported: tokens are sampled without a watermark |",
        "| `max_tokens` (required) |",
        "| `/v1/audio/speech` | models read text and pictures, and write text",
    ):
        assert row in text, row


def test_metrics_have_labels_and_kinds() -> None:
    text = metrics.page()
    assert "| `vllm:time_to_first_token_seconds` | histogram |  | Arrival to first token. |" in text
    assert "| `vllm:request_success_total` | counter | `finished_reason` | Finished requests. |" in text
    assert "`vllm:spec_decode_num_drafts_total`" in text, "metrics that drafts alone have"
    assert "`llmjax:kv_offload_hits_total`" in text, "metrics that kept pages alone have"


def test_docstrings_become_lists() -> None:
    text = python.page()
    assert "### LLM.generate\n\n```py\ngenerate(\n" in text
    assert "* `priority`: for all, or one for each prompt, smaller first;" in text
    assert "| `temperature` | `float` | `1.0` |" in text
    assert "\nArgs:" not in text
