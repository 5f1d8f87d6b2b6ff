"""llama-server's own routes, against those that the server has anyway, and a model that says what a script says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.pooled_models import write_with_tokenizer
from tests.serve.conftest import Running
from tests.serve.scripted import scripted_engine

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8, "ignore_eos": True}
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
SCRIPTS = {"<|fim_middle|>": "sum(values) / ", "plain": "One <b>line</b>.\nTwo 日本."}


def complete(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/completion", json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str = "/completion", **body: Any) -> list[dict[str, Any]]:
    response = http.post(path, json={**GREEDY, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def expected(http: httpx.Client, prompt: Any, **body: Any) -> dict[str, Any]:
    """What /v1/completions answers to the same."""
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **body}
    answer: dict[str, Any] = http.post("/v1/completions", json=asked).json()
    return answer


def refusal(http: httpx.Client, path: str = "/completion", **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"prompt": "x", **GREEDY, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_whole_answer(http: httpx.Client) -> None:
    other = expected(http, "the hen")
    found = complete(http, prompt="the hen", return_tokens=True, seed=7, stop=["never there"])
    (choice,) = other["choices"]
    assert (found["content"], found["tokens"]) == (choice["text"], choice["token_ids"])
    assert (found["tokens_evaluated"], found["tokens_predicted"]) == (other["usage"]["prompt_tokens"], 8)
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["model"], found["prompt"], found["truncated"]) == ("tiny-llama", "the hen", False)
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (8, 0, 7)
    assert (settings["stop"], settings["ignore_eos"], settings["stream"]) == (["never there"], True, False)
    timings = found["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == found["tokens_evaluated"]
    assert timings["cache_n"] == found["tokens_cached"]
    assert timings["predicted_n"] == 8 and timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(8000 / timings["predicted_ms"])
    assert complete(http, prompt="the hen")["tokens"] == []


def test_both_paths_and_any_content_type(http: httpx.Client) -> None:
    text = json.dumps({**GREEDY, "prompt": "the hen"})
    (first, second) = (http.post(path, content=text).json()["content"] for path in ("/completion", "/completions"))
    assert first == second == expected(http, "the hen")["choices"][0]["text"]


def test_a_stream_is_the_whole_in_pieces(http: httpx.Client) -> None:
    whole = complete(http, prompt="the hen", return_tokens=True)
    *parts, end = stream(http, prompt="the hen", timings_per_token=True)
    assert len(parts) > 1 and not any(part["stop"] for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["tokens_predicted"] for part in parts][-1] == 8
    assert all(part["timings"]["predicted_n"] == part["tokens_predicted"] for part in parts)
    assert end["stop"] and (end["content"], end["tokens"], end["stop_type"]) == ("", [], "limit")
    assert end["generation_settings"]["stream"] is True
    assert "timings" not in stream(http, prompt="the hen")[0]


def test_prompts_of_every_form(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "the hen", "add_special": True}).json()["tokens"]
    bare = http.post("/tokenize", json={"content": "the hen"}).json()["tokens"]
    assert ids == [*ids[:1], *bare] and len(ids) == len(bare) + 1
    the = len(http.post("/tokenize", json={"content": "the"}).json()["tokens"])
    text = complete(http, prompt="the hen")["content"]
    for prompt in (ids, [ids[0], "the hen"], [ids[0], "the", *bare[the:]], {"prompt_string": "the hen"}, ["the hen"]):
        found = complete(http, prompt=prompt)
        assert (found["tokens_evaluated"], found["content"]) == (len(ids), text), prompt
    begun = complete(http, prompt=["the", *bare[the:]])
    assert begun["content"] == text and begun["tokens_evaluated"] == len(ids)
    several = complete(http, prompt=["the hen", ids, {"prompt_string": "and on"}, [ids[0], "the hen"]])
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert [one["content"] for one in several] == [text, text, complete(http, prompt="and on")["content"], text]
    ends = {part["index"]: part for part in stream(http, prompt=["the hen", "and on"]) if part["stop"]}
    assert sorted(ends) == [0, 1] and ends[1]["prompt"] == "and on"


@pytest.mark.parametrize("prompt", [[], {}, 7, None, [[]], [True], [1, ["x"]], {"prompt_string": 1}], ids=str)
def test_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    assert refusal(http, prompt=prompt)["param"] == "prompt"


def test_pictures_go_elsewhere(http: httpx.Client) -> None:
    error = refusal(http, prompt={"prompt_string": "x", "multimodal_data": ["aGk="]})
    assert error["param"] == "prompt.multimodal_data"


def test_why_it_stops(http: httpx.Client) -> None:
    whole = complete(http, prompt="the hen")["content"]
    word = whole[2:4]
    found = complete(http, prompt="the hen", stop=[word, ""])
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert found["content"] == whole[: whole.index(word)]
    *_, end = stream(http, prompt="the hen", stop=word)
    assert (end["stop_type"], end["stopping_word"]) == ("word", word)


def test_as_many_as_fit_or_none(http: httpx.Client) -> None:
    for most in (-1, 10**6):
        found = complete(http, prompt="the hen", n_predict=most)
        assert found["tokens_predicted"] == 512 - found["tokens_evaluated"]
    ids = list(range(40, 73))
    nothing = complete(http, prompt=ids, n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"], nothing["stop_type"]) == ("", 0, "limit")
    assert complete(http, prompt=ids)["tokens_cached"] == 32  # whole pages of the prompt
    assert complete(http, prompt=ids, cache_prompt=False)["tokens_cached"] == 0
    assert [part["stop"] for part in stream(http, prompt=ids, n_predict=0)] == [True]
    assert complete(http, prompt="the hen", n_predict=None, max_tokens=3)["tokens_predicted"] == 3


def test_log_probabilities(http: httpx.Client) -> None:
    found = complete(http, prompt="the hen", n_probs=3, n_predict=4, return_tokens=True)
    other = expected(http, "the hen", logprobs=3, max_tokens=4)["choices"][0]["logprobs"]
    entries = found["completion_probabilities"]
    assert [entry["id"] for entry in entries] == found["tokens"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(other["token_logprobs"], abs=1e-5)
    for entry in entries:
        best = entry["top_logprobs"]
        assert len(best) == 3 and best[0]["id"] == entry["id"]  # it is greedy
        assert bytes(best[0]["bytes"]).decode(errors="replace") == best[0]["token"]
        assert sorted((one["logprob"] for one in best), reverse=True) == [one["logprob"] for one in best]
        assert sum(math.exp(one["logprob"]) for one in best) <= 1 + 1e-5
    parts = stream(http, prompt="the hen", n_probs=3, n_predict=4)
    assert [entry["id"] for part in parts for entry in part.get("completion_probabilities", ())] == found["tokens"]


def test_logit_bias_in_every_form(http: httpx.Client) -> None:
    first = complete(http, prompt="the hen", n_predict=1, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], [[first, -100]], {str(first): -100.0}, {str(first): False}):
        assert complete(http, prompt="the hen", n_predict=1, return_tokens=True, logit_bias=bias)["tokens"] != [first]
    (q,) = http.post("/tokenize", json={"content": "q"}).json()["tokens"]
    for given in ([["q", 100]], {"q": 100}, [[q, 100.0]]):
        assert complete(http, prompt="the hen", n_predict=2, logit_bias=given)["content"] == "qq"
    for wrong in ([[first]], [[True, 1]], [[first, True]], [[first, "x"]], "x", [["q", 1000]], [[10**6, 1]]):
        assert refusal(http, logit_bias=wrong)["param"] == "logit_bias", wrong


def test_forms(http: httpx.Client) -> None:
    grammar = 'root ::= "yes" | "no"'
    found = complete(http, prompt="x", grammar=grammar, ignore_eos=False)
    assert found["content"] in ("yes", "no") and found["stop_type"] == "eos"
    assert found["generation_settings"]["grammar"] == grammar
    schema = {"enum": ["yes", 17]}
    formed = complete(http, prompt="x", json_schema=schema, ignore_eos=False, n_predict=64)
    assert json.loads(formed["content"]) in ("yes", 17)
    assert refusal(http, grammar=grammar, json_schema=schema)["param"] == "grammar"
    assert refusal(http, grammar="root ::= (")["param"] == "grammar"
    assert refusal(http, json_schema={"type": "nothing"})["param"] == "json_schema"


def test_sampling(http: httpx.Client) -> None:
    given = {"temperature": 1.5, "seed": 11, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    other = expected(http, "the hen", **given, **penalties, repetition_penalty=1.2, repeat_last_n=64)
    found = complete(http, prompt="the hen", **given, **penalties, repeat_penalty=1.2, repeat_last_n=64)
    assert found["content"] == other["choices"][0]["text"]
    settings = found["generation_settings"]
    assert {**given, **penalties, "repeat_penalty": 1.2, "repeat_last_n": 64}.items() <= settings.items()
    assert complete(http, prompt="x", seed=-1)["generation_settings"]["seed"] == 2**32 - 1


def test_samplers_that_are_left_out_are_off(http: httpx.Client) -> None:
    given = {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.5}
    kept = complete(http, prompt="x", **given, samplers=["top_k", "temperature", "infill"])["generation_settings"]
    assert (kept["top_k"], kept["temperature"]) == (9, 0.5)
    assert (kept["top_p"], kept["min_p"], kept["repeat_penalty"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("typical_p", 0.5, 1.0),
        ("mirostat", 2, 0),
        ("dry_multiplier", 0.8, 0),
        ("xtc_probability", 0.5, 0.0),
        ("dynatemp_range", 0.2, 0),
        ("top_n_sigma", 1.0, -1),
        ("n_cmpl", 2, 1),
        ("post_sampling_probs", True, False),
    ],
)
def test_what_is_not_there_is_named(http: httpx.Client, field: str, value: Any, neutral: Any) -> None:
    error = refusal(http, **{field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert http.post("/completion", json={**GREEDY, "prompt": "x", field: neutral}).status_code == 200


def test_errors_have_the_names_of_the_request(http: httpx.Client) -> None:
    for field, value in (("n_predict", -3), ("repeat_penalty", -1), ("n_probs", 10**5), ("top_p", 7), ("unknown", 1)):
        assert refusal(http, **{field: value})["param"] == field
    assert refusal(http, max_tokens=3)["param"] == "max_tokens"
    assert http.post("/completion", json={"prompt": "x", "model": "other"}).status_code == 404


def test_what_is_without_effect_is_told(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": "x", "id_slot": 3, "t_max_predict_ms": 500, "n_keep": 0, "dry_base": 1.75}
    response = http.post("/completion", json=body)
    assert response.headers["x-ignored-fields"] == "id_slot,t_max_predict_ms,dry_base"


def test_fields_of_an_answer(http: httpx.Client) -> None:
    fields = ["content", "timings/predicted_n", "none", "content/none"]
    found = complete(http, prompt="the hen", response_fields=fields)
    assert found == {"content": complete(http, prompt="the hen")["content"], "predicted_n": 8}
    assert complete(http, prompt="x", response_fields=[""]) == {}


def test_tokens_in_both_forms(http: httpx.Client) -> None:
    text = "the é"
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    raw = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (piece["piece"] for piece in pieces))
    assert raw.decode() == text and [195] in [piece["piece"] for piece in pieces]
    back = http.post("/detokenize", json={"tokens": ids}).json()
    assert back["content"] == back["prompt"] == text
    special, plain = (
        http.post("/tokenize", json={"content": "<|im_end|>", "parse_special": parsed}).json()["tokens"]
        for parsed in (True, False)
    )
    assert len(special) == 1 < len(plain)


def test_the_model_is_described(http: httpx.Client, running: Running, engine_config: EngineConfig) -> None:
    found = http.get("/props").json()
    assert (found["total_slots"], found["model_alias"], found["model_path"]) == (4, "tiny-llama", "tiny-llama")
    assert engine_config.model not in json.dumps(found)
    assert (found["bos_token"], found["eos_token"], found["is_sleeping"]) == ("<s>", "<|im_end|>", False)
    assert found["modalities"] == {"vision": False, "audio": False} and "im_start" in found["chat_template"]
    settings = found["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["n_predict"], settings["params"]["top_p"]) == (512, -1, 1.0)
    running.wait_idle()  # what clients that left have begun may still run
    places = http.get("/slots", params={"fail_on_no_slot": 1}).json()
    assert [place["id"] for place in places] == [0, 1, 2, 3]
    assert not any(place["is_processing"] for place in places)


def test_a_template_is_applied(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "the hen"}]
    text = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == text and "the hen" in text
    assert http.post("/apply-template", json={}).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "path",
    ["/api/v1/generate", "/api/v1/model", "/api/extra/generate/stream", "/v1/internal/model/info", "/slots/0"],
)
def test_other_servers_apis_are_refused_by_name(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={})
    assert response.status_code == 501 and f"there is no {path} here" in response.text


@pytest.fixture(scope="module")
def filler(
    tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str
) -> Iterator[httpx.Client]:
    config = scripted_engine(
        tmp_path_factory.mktemp("models") / "scripted",
        SCRIPTS,
        special=GAP,
        template="{{ messages[0].content }}",
        context=512,
        compile_cache_dir=compile_cache_dir,
    )
    server, stop = start_server(config, ServerConfig(port=0))
    with server.http() as http:
        yield http
    stop()


def test_a_gap_is_filled(filler: httpx.Client) -> None:
    asked = {"temperature": 0, "input_prefix": "mean = ", "input_suffix": "len(values)\n"}
    found = filler.post("/infill", json=asked).json()
    assert (found["content"], found["stop_type"]) == (SCRIPTS["<|fim_middle|>"], "eos")
    assert found["prompt"] == "<|fim_prefix|>mean = <|fim_suffix|>len(values)\n<|fim_middle|>"
    *parts, end = stream(filler, "/infill", **{**asked, "ignore_eos": False, "n_predict": 64})
    assert "".join(part["content"] for part in parts) == SCRIPTS["<|fim_middle|>"] and end["stop_type"] == "eos"
    # What llama.vim sends.
    more = {
        "input_extra": [{"filename": "a.py", "text": "a = 1\n", "time": 5}, {"text": "b"}],
        "prompt": "[[plain]]",
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "response_fields": ["content", "prompt", "timings/prompt_n", "truncated", "tokens_cached"],
    }
    found = filler.post("/infill", json={**asked, **more}).json()
    assert found["content"] == SCRIPTS["plain"] and found["truncated"] is False
    assert found["prompt"] == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\na = 1\n<|file_sep|>tmp\nb<|file_sep|>filename\n"
        "<|fim_prefix|>mean = <|fim_suffix|>len(values)\n<|fim_middle|>[[plain]]"
    )


def test_gaps_that_cannot_be_filled(filler: httpx.Client, http: httpx.Client) -> None:
    gap = {"input_prefix": "a", "input_suffix": "b"}
    error = http.post("/infill", json=gap).json()["error"]
    assert error["param"] == "input_suffix" and "no tokens for filling a gap" in error["message"]
    assert filler.post("/infill", json={"input_prefix": "a"}).json()["error"]["param"] == "input_suffix"
    for field in gap:
        error = filler.post("/infill", json={**gap, field: "x" * 10**4}).json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_characters_come_whole(filler: httpx.Client) -> None:
    *parts, end = stream(filler, prompt="[[plain]]", n_predict=64, ignore_eos=False)
    assert "".join(part["content"] for part in parts) == SCRIPTS["plain"]
    assert end["has_new_line"] is True


@pytest.fixture(scope="module")
def embedder(
    tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str, start_server: Callable[..., Any]
) -> Iterator[httpx.Client]:
    settings = EngineConfig(
        model=str(write_with_tokenizer("qwen3-embedding", tmp_path_factory.mktemp("models"), ends=False)),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        served_model_name="tiny",
        compilation_cache_dir=compile_cache_dir,
    )
    server, stop = start_server(settings, ServerConfig(port=0))
    with server.http() as http:
        yield http
    stop()


def test_vectors(embedder: httpx.Client) -> None:
    texts = ["w1 w2 w3", "w4"]
    data = embedder.post("/v1/embeddings", json={"input": texts}).json()["data"]
    for body in (
        {"content": texts},
        {"input": texts, "encoding_format": "float"},
        {"content": texts, "embd_normalize": 2},
    ):
        found = embedder.post("/embedding", json=body).json()
        assert [one["index"] for one in found] == [0, 1]
        for one, other in zip(found, data, strict=True):
            np.testing.assert_allclose(one["embedding"], [other["embedding"]], rtol=1e-5)
    (alone,) = embedder.post("/embeddings", json={"content": "w4", "embd_normalize": -1}).json()
    plain = embedder.post("/v1/embeddings", json={"input": "w4", "normalize": False}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(alone["embedding"], [plain], rtol=1e-5)
    for wrong, field in (
        ({}, "content"),
        ({"content": []}, "content"),
        ({"content": "x", "embd_normalize": 1}, "embd_normalize"),
    ):
        assert embedder.post("/embedding", json=wrong).json()["error"]["param"] == field
    error = embedder.post("/completion", json={"prompt": "w1"}).json()["error"]
    assert error["code"] == "unsupported_task"
