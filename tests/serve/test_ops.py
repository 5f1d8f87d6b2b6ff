"""Models, probes, tokens and metrics over HTTP."""

from __future__ import annotations

import httpx
import openai
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from llmjax.version import __version__


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert Model.model_validate(model.model_dump(), strict=True).id == "tiny-llama"
    assert client.models.retrieve("tiny-llama").id == "tiny-llama"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512


def test_probes(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/").text.count("\n") == 1


def test_a_name_that_was_made_to_resolve_to_loopback_is_refused(http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"Host": f"evil.example:{http.base_url.port}"})
    assert response.status_code == 403 and response.json()["error"]["code"] == "unknown_host"
    assert "evil.example" in response.json()["error"]["message"] and response.headers["x-request-id"]


def shown(text: str) -> dict[str, str]:
    """What ``/detokenize`` answers: the text in vLLM's field and in llama-server's."""
    return {"prompt": text, "content": text}


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "the hén 👩‍👩‍👧 and\ton"
    body = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 512
    assert body["token_strs"][:2] == ["<s>", "the"]
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == shown("<s>" + text)
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert plain["tokens"] == body["tokens"][1:] and plain["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": plain["tokens"]}).json() == shown(text)


def test_tokenize_chat(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"messages": [{"role": "user", "content": "the"}]}).json()
    text = http.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [10**7]}).json()["error"]["param"] == "tokens"


GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "cache_config_info",
    "engine_sleep_state",
}
COUNTERS = {"prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached"}
COUNTERS |= {"prompt_tokens_by_source", "generation_tokens", "request_success", "admission_rejections"}
ZEROS = {"mm_cache_queries", "mm_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits"}
HISTOGRAMS = {
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
}


def scrape(http: httpx.Client) -> dict[tuple[str, str], float]:
    """Sample name and finished_reason ("" without one) to value; sums over buckets are not wanted here."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_metric_names_types_and_labels(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert {
        sample.value for name in ZEROS for sample in families[f"vllm:{name}"].samples if "total" in sample.name
    } == {0}
    assert not any("spec_decode" in name or "lora" in name for name in families)  # there are none here, nor in vLLM
    for names, kind in ((GAUGES, "gauge"), (COUNTERS | ZEROS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert families[f"vllm:{name}"].type == kind, name
    for name in GAUGES - {"cache_config_info"} | HISTOGRAMS:
        for sample in families[f"vllm:{name}"].samples:
            assert sample.labels["model_name"] == "tiny-llama" and sample.labels["engine"] == "0"
    bounds = [s.labels["le"] for s in families["vllm:time_to_first_token_seconds"].samples if "le" in s.labels]
    assert bounds[:3] == ["0.001", "0.005", "0.01"] and bounds[-2:] == ["2560.0", "+Inf"]


def test_metrics_count_a_request(http: httpx.Client) -> None:
    before = scrape(http)
    body = {"prompt": [40, 41, 42], "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = scrape(http)

    def grown(name: str, reason: str = "") -> float:
        return after[f"vllm:{name}", reason] - before[f"vllm:{name}", reason]

    assert grown("generation_tokens_total") == 7
    assert grown("request_success_total", "length") == 1
    assert grown("request_generation_tokens_sum") == 7 and grown("request_generation_tokens_count") == 1
    assert grown("request_prompt_tokens_sum") == 3
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 6
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("request_params_max_tokens_sum") == 7
    # One observation a pass through the model, however many a dispatch takes.
    assert grown("iteration_tokens_total_sum") == 3 + 7
    assert grown("iteration_tokens_total_count") == 7
    assert after["llmjax:steps_total", ""] - before["llmjax:steps_total", ""] == 7
