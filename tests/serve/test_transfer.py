"""Two servers, as a router asks them: one computes a prompt, the other goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.tiers import offload
from tests.checkpoints import GOLDEN
from tests.serve.conftest import Running

LLAMA = GOLDEN / "llama"
PROMPT = [1, 5, 9, 2, 7, 3, 8, 4, 6, 11, 1, 5, 9, 2, 7, 3, 8, 4]
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True}
# What vllm-router and llm-d's sidecar send to the first server.
DECODED_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """What is asserted does not depend on how busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "FETCH_SECONDS", 300.0)
        yield


@pytest.fixture(scope="module")
def servers(compile_cache_dir: str, start_server: Callable[..., Any]) -> Iterator[list[Running]]:
    running, stops, ports = [], [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    for role, port in zip(("kv_producer", "kv_consumer"), ports, strict=True):
        config = EngineConfig(
            model=str(LLAMA),
            skip_tokenizer_init=True,
            dtype="float32",
            page_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            decode_steps=1,
            kv_cache_memory_bytes=2**19,
            kv_cache_dtype="int8",
            compilation_cache_dir=compile_cache_dir,
            master_secret="word",
            kv_transfer_config={
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_port": port,
                "kv_peers": [f"127.0.0.1:{ports[0]}"],
                "kv_buffer_size": 2**20,
            },
        )
        server, stop = start_server(config, ServerConfig(port=0))
        running.append(server)
        stops.append(stop)
    yield running
    for stop in stops:
        stop()


def ask(server: Running, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        answer: dict[str, Any] = http.post("/v1/completions", json=BODY | body).json()
    return answer


def test_the_answer_of_one_server_is_for_the_other(servers: list[Running]) -> None:
    first, second = servers
    computed = ask(first, max_tokens=1, kv_transfer_params=DECODED_ELSEWHERE)
    params = computed["kv_transfer_params"]
    config = first.engine.config.kv_transfer
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", config.kv_port)
    assert params["remote_block_ids"] == [0, 1, 2, 3]
    assert params["remote_engine_id"]
    found = ask(second, max_tokens=6, kv_transfer_params=params)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert "kv_transfer_params" not in found
    alone = ask(first, max_tokens=6)
    assert found["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    # They are taken once; what is lost is computed.
    other = ask(second, prompt=PROMPT[::-1], max_tokens=2, kv_transfer_params=params)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with second.http() as http:
        metrics = http.get("/metrics").text
    assert 'llmjax:kv_offload_hits_total{engine="0",model_name="llama",tier="remote"} 16.0' in metrics


def test_no_client_has_pages_taken_from_a_server_of_its_own(servers: list[Running]) -> None:
    """Else its altered pages would be found by plain requests of others."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        own.setblocking(False)
        params = {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "127.0.0.1"}
        error = ask(servers[1], kv_transfer_params=params | {"remote_port": own.getsockname()[1]})["error"]
        assert error["param"] == "kv_transfer_params" and "kv_peers" in error["message"]
        with pytest.raises(BlockingIOError):
            own.accept()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "is for one prompt and one answer"),
        ({"prompt": [[1], [2]]}, "is for one prompt and one answer"),
        ({"stream": True}, "cannot be streamed"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_role kv_consumer or kv_both"),
        ({"kv_transfer_params": 5}, "dictionary"),
    ],
)
def test_what_cannot_be_is_refused(servers: list[Running], body: dict[str, Any], message: str) -> None:
    error = ask(servers[0], **({"max_tokens": 1, "kv_transfer_params": DECODED_ELSEWHERE} | body))["error"]
    assert error["param"] == "kv_transfer_params"
    assert message in error["message"]
