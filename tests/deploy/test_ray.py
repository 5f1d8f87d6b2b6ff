"""The server on Ray Serve (``pip install 'llmjax[ray]'``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ConfigError

pytest.importorskip("ray.serve")

from llmjax.deploy.ray import REPLICA_ENVIRONMENT, app, configs_of
from tests.serve.conftest import write_llama, write_tokenizer

ROOT = Path(__file__).parents[2]


def test_arguments_are_settings_of_the_server() -> None:
    found = configs_of(
        {"model": "m", "max_model_len": "8k", "enable_expert_parallel": "false", "api_key": "a", "num_gpus": 1}
    )
    assert (found.engine.model, found.engine.max_model_len) == ("m", 8000)
    assert list(found.server.api_key) == ["a"] and found.server.host == "0.0.0.0"
    assert configs_of({"model": "m", "max_num_seqs": 7}).engine.max_num_seqs == 7


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="max_modle_len"):
        app({"model": "m", "max_modle_len": 8})
    with pytest.raises(ConfigError, match="node_rank: on Ray Serve a replica starts its other ranks itself"):
        app({"model": "m", "nnodes": "2", "node_rank": "1", "tensor_parallel_size": "2"})
    with pytest.raises(ConfigError, match="placement_group_strategy: a replica is one process"):
        app({"model": "m", "placement_group_strategy": "SPREAD"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_replicas", "many", "a number of at least 1, or auto"),
        ("num_replicas", "0", "a number of at least 1, or auto"),
        ("num_replicas", "1.5", "a number of at least 1, or auto"),
        ("num_replicas", True, "a number of at least 1, or auto"),
        ("num_replicas", "{", "a number of at least 1, or auto"),
        ("num_cpus", "all", "a number of at least 0"),
        ("num_gpus", "-1", "a number of at least 0"),
        ("autoscaling_config", "2", "a mapping"),
        ("placement_group_strategy", "pack", "one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
    ],
)
def test_wrong_arguments_of_rays_are_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app({"model": "m", "nnodes": "2", "tensor_parallel_size": "2", name: value})
    assert str(caught.value) == f"{name} must be {expected}, not {value!r}"


def test_what_ray_itself_refuses_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^Ray Serve refuses num_replicas, autoscaling_config: .*min_replicas"):
        app({"model": "m", "num_replicas": "auto", "autoscaling_config": '{"min_replicas": "few"}'})


def test_servers_that_exchange_pages_need_a_secret() -> None:
    transfer = '{"kv_connector": "TCPConnector", "kv_role": "kv_producer"}'
    with pytest.raises(ConfigError, match="kv_transfer_config on Ray Serve needs master_secret"):
        configs_of({"model": "m", "kv_transfer_config": transfer})
    assert configs_of({"model": "m", "kv_transfer_config": transfer, "master_secret": "word"}).engine.kv_transfer


def test_what_ray_is_told() -> None:
    made = app({"model": "m", "num_replicas": "3", "num_gpus": "2", "max_num_seqs": "8", "max_num_queued_reqs": "4"})
    deployment = made._bound_deployment
    assert deployment.num_replicas == 3 and deployment.max_ongoing_requests == 12
    assert deployment.ray_actor_options["num_gpus"] == 2
    assert deployment.ray_actor_options["runtime_env"]["env_vars"] == REPLICA_ENVIRONMENT


def test_ranks_of_a_replica_are_placed_together() -> None:
    arguments = {"model": "m", "nnodes": "3", "tensor_parallel_size": "24", "num_gpus": "8", "num_cpus": "4"}
    made = app({**arguments, "placement_group_strategy": "STRICT_SPREAD"})._bound_deployment
    config = made._replica_config
    assert config.placement_group_bundles == [{"CPU": 4, "GPU": 8}] * 3
    assert config.placement_group_strategy == "STRICT_SPREAD"
    assert app({"model": "m"})._bound_deployment._replica_config.placement_group_bundles is None


@pytest.fixture
def found(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What ``on_ray`` finds of replicas or ranks."""
    (tmp_path / "model").mkdir()
    write_llama(tmp_path / "model", vocab=write_tokenizer(tmp_path / "model"))
    paths = [str(tmp_path / name) for name in ("model", "cache", "result.json")]
    command = [sys.executable, "-m", "tests.deploy.on_ray", request.param, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=570)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("found", ["replicas", "ranks"], indirect=True)
def test_one_is_killed(found: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """One of two replicas and then one's engine, or the other one of the two ranks of the only replica: Ray starts a
    replica in its place, and nothing of it is left."""
    assert found["plain"] and found["stream"] == found["plain"] and found["health"] == 200
    replicas = "replicas" in request.node.name
    assert len(found["killed"]) == (2 if replicas else 1)
    for killed in found["killed"]:
        assert sum(killed["ended"].values()) == 40  # none is without an end
        assert killed["gone"] and killed["engines"] == int(replicas)
        if replicas:
            assert killed["ended"]["answered"] >= 10  # those of the other replica
        assert killed["after"] == [found["plain"]] * 4
