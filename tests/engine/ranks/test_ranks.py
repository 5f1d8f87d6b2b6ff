"""Models that several processes divide give the tokens that one device gives; a rank is started as users start it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_model import MoEShape, Shape, write_random_model
from llmjax import LLM, AsyncLLM, quantize
from llmjax.config import EngineConfig
from llmjax.engine.build import build_engine
from llmjax.engine.ranks.join import free_port
from llmjax.errors import ConfigError
from llmjax.kv_transfer import KVTransfer
from tests.checkpoints import GOLDEN
from tests.engine.on_devices import GREEDY, OPTIONS, PROMPTS
from tests.engine.tiers.test_transfer import Relay
from tests.levels import at_levels

ROOT = Path(__file__).parents[3]
SECONDS = 500
CUT_BYTES = 9000  # of the messages with four pages, after which a connection is cut


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, Shape(256, 384, 1, 8, 4, 515), max_position_embeddings=64)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    return generated(model, 1)


def generated(model: str, devices: int, **settings: Any) -> dict[str, Any]:
    """The results of ``on_devices``, in its own process."""
    case = json.dumps({"model": model, "devices": [devices], "settings": {"quantization": "q80", **settings}})
    command = [sys.executable, "-m", "tests.engine.on_devices", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    ((found,),) = json.loads(done.stdout.splitlines()[-1])
    return dict(found)


def told(number: int, count: int, *, here: tuple[int, int]) -> dict[str, str]:
    """What Hydra tells a rank; ``here``: which it is of how many on its machine."""
    values = {"PMI_RANK": number, "PMI_SIZE": count, "MPI_LOCALRANKID": here[0], "MPI_LOCALNRANKS": here[1]}
    return {name: str(value) for name, value in values.items()}


@contextmanager
def rank(
    number: int,
    model: str,
    devices: int,
    *,
    environment: dict[str, str] | None = None,
    program: str = "",
    **settings: Any,
) -> Iterator[subprocess.Popen[str]]:
    """``llmjax serve`` with a rank that does not serve.

    Args:
        environment: variables that say which rank it is; None: a flag does.
        program: Python statements that run first.
    """
    start = (
        ["-c", f"{program}import runpy; runpy.run_module('serve', run_name='__main__')"] if program else ["-m", "serve"]
    )
    command = [sys.executable, *start, "--model", model]
    if environment is None:
        command += ["--node-rank", str(number)]
    options = OPTIONS | {"quantization": "q80", "tensor_parallel_size": devices} | settings
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    surroundings = os.environ | (environment or {})
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=surroundings)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    first, *rest = found["tokens"]
    assert [first, *rest[:2]] == expected["tokens"]
    assert rest[2:] in ([], [first])  # from where evicted pages are kept
    assert bool(rest[2:]) == bool(found["host_hits"])
    for values, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert [token for token, _ in values] == [token for token, _ in wanted]
        np.testing.assert_allclose([x for _, x in values], [x for _, x in wanted], atol=2e-3)
    assert found["page_mentions"] and not found["page_copies"]


def test_two_processes_of_two_devices(model: str, expected: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "master_addr": "127.0.0.1",
        "master_port": free_port("127.0.0.1"),
        "master_secret": "word",
        "distributed_timeout_seconds": 200,
        "kv_offloading_size": 0.01,
    }
    with rank(1, model, 4, environment=told(1, 2, here=(0, 1)), **settings) as other:
        check(generated(model, 4, nnodes=2, **settings), expected)
        _, said = other.communicate(timeout=SECONDS)
        assert other.returncode == 0 and "rank 0 has ended" in said
        assert "MPICH or Intel MPI has started this as rank 1 of 2; rank 0 is at 127.0.0.1" in said


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts of q4_k": ("experts", {"quantization": "q4k"}),
    "gptq, two keys, int8 cache": ("gptq", {"quantization": "stored", "kv_cache_dtype": "int8"}),
    "windows": ("gemma3", {"quantization": None}),
    "latent pages": ("deepseek-v3", {"quantization": None}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models_in_two_processes_of_two_devices(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    if name == "experts":
        shape = MoEShape(256, 256, 1, 4, 2, 515, experts=4, experts_per_token=2, size_of_head=64)
        write_random_model(tmp_path / name, shape, max_position_embeddings=64)
    elif name == "gptq":
        write_random_model(tmp_path / "two", Shape(256, 384, 1, 8, 2, 515), max_position_embeddings=64)
        options: dict[str, Any] = {"scheme": "int4", "format": "gptq", "group_size": 64, "skip_tokenizer_init": True}
        quantize(str(tmp_path / "two"), tmp_path / name, **options)
    folder = str(tmp_path / name if (tmp_path / name).exists() else GOLDEN / name)
    several = {"master_port": free_port("127.0.0.1"), "distributed_timeout_seconds": 200, "nnodes": 2, **settings}
    with rank(1, folder, 4, **several) as other:
        check(generated(folder, 4, **several), generated(folder, 1, **settings))
        _, said = other.communicate(timeout=SECONDS)
        assert other.returncode == 0 and "rank 0 has ended" in said


@pytest.mark.slow
def test_a_process_for_each_of_three_devices(model: str, expected: dict[str, Any]) -> None:
    check(generated(model, 3, multi_process=True), expected)


@pytest.mark.slow
def test_a_second_start_compiles_and_packs_nothing(model: str, tmp_path: Path) -> None:
    """This holds on both ranks."""

    def files(kind: str) -> dict[str, int]:
        found = [path for path in (tmp_path / kind).rglob("*") if path.is_file()]
        return {str(path): path.stat().st_ctime_ns if kind == "programs" else path.stat().st_ino for path in found}

    settings: dict[str, Any] = {"multi_process": True, "compilation_cache_dir": str(tmp_path)}
    first = generated(model, 2, **settings)
    programs, weights = files("programs"), files("weights")
    assert len(programs) > 4 and len(weights) == 2  # each rank has its part of the matrices
    again = generated(model, 2, **settings)
    assert again["tokens"] == first["tokens"] and (first["compiled"] > 0, again["compiled"]) == (True, 0)
    assert (files("programs"), files("weights")) == (programs, weights)


@pytest.mark.slow
def test_a_process_for_the_other_stage(model: str, expected: dict[str, Any]) -> None:
    """The model has one layer; a golden one has three."""
    with pytest.raises(AssertionError, match="pipeline_parallel_size 2: the model has 1 layers"):
        generated(model, 1, pipeline_parallel_size=2)
    golden = str(GOLDEN / "llama")
    check(generated(golden, 1, pipeline_parallel_size=2, quantization=None), generated(golden, 1, quantization=None))


def test_other_settings_are_one_line_on_every_rank(model: str) -> None:
    settings: dict[str, Any] = {"nnodes": 2, "master_port": free_port("127.0.0.1"), "distributed_timeout_seconds": 200}
    with rank(1, model, 2, **settings, max_logprobs=3) as other:
        with pytest.raises(ConfigError, match=r"^rank 1 \(127.0.0.1\) has max_logprobs 3, and rank 0 has 20: start"):
            LLM(model, **OPTIONS, quantization="q80", tensor_parallel_size=2, **settings)  # type: ignore[arg-type]
        _, said = other.communicate(timeout=SECONDS)
    assert other.returncode == 1
    assert said.splitlines()[-1].startswith("llmjax: error: rank 1 (127.0.0.1) has max_logprobs 3, and rank 0 has 20")


# As it is before the program begins.
OTHER_VERSION = "from llmjax.engine.ranks import settings; settings.__version__ = '9.9'; "


@pytest.mark.parametrize("unequal", at_levels(["version", "weights"], slow=["weights"]))
def test_unequal_ranks_are_one_line_on_every_rank(unequal: str, model: str, tmp_path: Path) -> None:
    """Both are processes, as users start them."""
    other, message, program = model, "rank 1 (127.0.0.1) has llmjax 9.9, and rank 0 has", OTHER_VERSION
    if unequal == "weights":
        other, message, program = str(tmp_path), "rank 1 (127.0.0.1) has loaded another model than rank 0", ""
        shutil.copytree(model, other, dirs_exist_ok=True)
        (weights,) = tmp_path.glob("*.safetensors")
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read()
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    settings: dict[str, Any] = {"nnodes": 2, "master_port": free_port("127.0.0.1"), "distributed_timeout_seconds": 200}
    with rank(0, model, 2, **settings, port=0) as first, rank(1, other, 2, program=program, **settings) as second:
        for process in (first, second):
            _, said = process.communicate(timeout=SECONDS)
            assert process.returncode == 1, said
            assert said.splitlines()[-1].startswith(f"llmjax: error: {message}"), said
            assert "Traceback" not in said


def serving(model: str, port: int, peers: Sequence[int], **settings: Any) -> AsyncLLM:
    """An engine in a process of its own, which gives pages away and takes those of other ports."""
    role = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_port": port, "kv_buffer_size": 2**20}
    role["kv_peers"] = [f"127.0.0.1:{peer}" for peer in peers]
    options: dict[str, Any] = OPTIONS | {"quantization": "q80", "max_num_seqs": 1} | settings
    return AsyncLLM.from_config(
        EngineConfig(model=model, engine_process="process", kv_transfer_config=role, master_secret="word", **options)
    )


@pytest.mark.slow
async def test_pages_go_from_two_processes_to_two_others_and_to_one(tmp_path: Path) -> None:
    """The model has three key/value heads: of two processes, one has two of them, and the other has one."""
    write_random_model(tmp_path, Shape(192, 256, 2, 6, 3, 515), max_position_embeddings=64)
    *ports, cutting = [free_port("127.0.0.1") for _ in range(4)]
    several: dict[str, Any] = {"multi_process": True, "tensor_parallel_size": 2}
    prompt, engines = PROMPTS[0], list[AsyncLLM]()
    try:
        for port, settings in zip(ports, (several, several, {}), strict=True):
            engines.append(serving(str(tmp_path), port, [*ports, cutting], **settings))
        first, second, alone = engines

        async def tokens(engine: AsyncLLM, name: str, transfer: KVTransfer | None = None) -> list[int]:
            await engine.reset_prefix_cache()
            params = replace(GREEDY, kv_transfer=transfer)
            *_, output = [output async for output in engine.generate(prompt, params, name)]
            return list(output.outputs[0].token_ids)

        expected = await tokens(alone, "alone")
        ways = [
            (first, 0, second, False),
            (first, 0, alone, False),
            (alone, 2, second, False),
            (first, 0, second, True),
        ]
        for i, (giver, number, taker, cut) in enumerate(ways):
            before = taker.stats.offload.remote_hits
            assert await tokens(giver, f"give {i}", KVTransfer(give=f"pages {i}")) == expected
            port = Relay(ports[number], CUT_BYTES, at=cutting).port if cut else ports[number]
            taken = KVTransfer(take=f"pages {i}", peer=f"127.0.0.1:{port}")
            assert await tokens(taker, f"take {i}", taken) == expected
            hits = taker.stats.offload.remote_hits - before
            assert 0 < hits < 16 if cut else hits == 16
    finally:
        for engine in engines:
            await engine.shutdown()


def test_requests_go_to_rank_0(model: str) -> None:
    config = EngineConfig(model=model, nnodes=2, node_rank=1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^node_rank 1: requests go to rank 0; start this one with llmjax serve or"):
        build_engine(config)


def program_of(model: str) -> list[str]:
    """A program for all ranks that a launcher starts."""
    settings = {"quantization": "q80", "launched": True, "master_port": free_port("127.0.0.1"), "threads": 1}
    case = json.dumps({"model": model, "devices": [2], "settings": settings})
    return [sys.executable, "-m", "tests.engine.on_devices", case]


@pytest.mark.slow
def test_ranks_find_in_their_environments_which_they_are(model: str, expected: dict[str, Any]) -> None:
    command, processes = program_of(model), []
    try:
        for number in range(2):
            environment = os.environ | told(number, 2, here=(number, 2))
            processes.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
                )
            )
        (first, errors), (second, more) = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors + more
    ((found,),) = json.loads(first.splitlines()[-1])
    check(found, expected)
    assert "tokens" not in second  # it has not come so far


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec")
def test_mpiexec(model: str, expected: dict[str, Any]) -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in containers
    done = subprocess.run(
        ["mpiexec", "-n", "2", *program_of(model)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | allowed,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ((found,),) = json.loads(done.stdout.splitlines()[-1])
    check(found, expected)
