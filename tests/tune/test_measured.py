"""What is known of small models, how long their parts take, and the command."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from llmjax.cli import main
from llmjax.config import EngineConfig
from llmjax.config_file import load_configs
from llmjax.engine.loading.model import load_model
from llmjax.errors import ConfigError
from llmjax.platforms import select_platform
from llmjax.tune import decode as decoding
from llmjax.tune.attention import seconds_of_attention
from llmjax.tune.decode import DecodeFailed, Order, measure, numbers_of_threads
from llmjax.tune.facts import Decode
from llmjax.tune.settings_file import text_of
from llmjax.tune.sizes import sizes_of
from tests.checkpoints import GOLDEN, POOLED

LLAMA = EngineConfig(model=str(GOLDEN / "llama"), dtype="float32", page_size=4, max_num_seqs=2)


def test_sizes_are_those_that_an_engine_takes() -> None:
    platform = select_platform(LLAMA)
    model, memory = sizes_of(LLAMA, platform)
    by_scheme = {one.quantization: one.num_bytes for one in memory.weights}
    assert by_scheme[None] == load_model(LLAMA, platform).num_bytes
    assert by_scheme["q8_0"] == load_model(LLAMA.replace(quantization="q8_0"), platform).num_bytes
    assert sorted(by_scheme.values(), reverse=True) == list(by_scheme.values())
    assert memory.tokens == model.max_position
    plain, int8 = memory.kv_types
    assert (plain.name, int8.name) == ("auto", "int8")
    # Three layers of two heads of eight numbers, keys and values; a page for the end and the dummy page.
    assert plain.request_bytes == 3 * 2 * 2 * 8 * 4 * (memory.tokens + 2 * 4)
    assert int8.request_bytes < plain.request_bytes


def test_settings_that_are_given_are_not_varied() -> None:
    config = LLAMA.replace(quantization="q8_0", kv_cache_dtype="int8", max_model_len=32)
    _, memory = sizes_of(config, select_platform(config))
    assert [one.quantization for one in memory.weights] == ["q8_0"]
    assert [one.name for one in memory.kv_types] == ["int8"]
    assert memory.tokens == 32


def test_a_model_that_writes_nothing_is_refused() -> None:
    config = EngineConfig(model=str(POOLED / "bert"), dtype="float32")
    with pytest.raises(ConfigError, match="makes vectors"):
        sizes_of(config, select_platform(config))


def test_attention_is_timed_with_every_type() -> None:
    platform = select_platform(LLAMA)
    model, _ = sizes_of(LLAMA, platform)
    types = {"auto": jnp.dtype(jnp.bfloat16), "int8": jnp.dtype(jnp.int8)}
    found = seconds_of_attention(model, platform, types, tokens=30, page_size=4)
    assert found.keys() == types.keys() and all(seconds > 0 for seconds in found.values())


def test_latent_pages_are_not_timed() -> None:
    config = LLAMA.replace(model=str(GOLDEN / "deepseek-v2"))
    platform = select_platform(config)
    model, _ = sizes_of(config, platform)
    assert seconds_of_attention(model, platform, {"auto": jnp.dtype(jnp.float32)}, tokens=30, page_size=4) == {}


def test_numbers_of_threads() -> None:
    assert numbers_of_threads(EngineConfig(), physical=8, usable=16) == [8, 4, 16]
    assert numbers_of_threads(EngineConfig(), physical=2, usable=2) == [2, 1]
    assert numbers_of_threads(EngineConfig(), physical=1, usable=1) == [1]
    assert numbers_of_threads(EngineConfig(threads=3), physical=8, usable=16) == [3]


def test_the_file_holds_all_settings_but_secrets(tmp_path: Path) -> None:
    config = LLAMA.replace(threads=2, hf_token="secret", served_model_name=["a", "b"], quantization_rules={"x": "q8_0"})
    text = text_of(config, about=["measured"], why={"threads": "as fast: with 2"})
    path = tmp_path / "tuned.yaml"
    path.write_text(text)
    read = load_configs(str(path)).engine
    assert read == config.replace(hf_token=None)
    assert text.startswith("# measured\n") and "\n# as fast: with 2\nthreads: 2\n" in text and "secret" not in text


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("threads: 1\n")
    assert main(["tune", "--output", str(path), "--model", LLAMA.model]) == 1
    assert f"{path}: is there already\n  hint: --force replaces it" in capsys.readouterr().err
    assert path.read_text() == "threads: 1\n"


def test_the_command_writes_what_it_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speeds as if they had been measured."""
    asked: list[Order] = []

    def measured(command: list[str], *, input: bytes, **_: object) -> subprocess.CompletedProcess[bytes]:
        order: Order = pickle.loads(input)
        asked.append(order)
        step = {4: 0.010, 2: 0.0101, 8: 0.02}[order.config.threads]
        told = Decode(threads=order.config.threads, step=step, attention=dict.fromkeys(order.kv_types, 0.001))
        return subprocess.CompletedProcess(command, 0, pickle.dumps(told), b"")

    monkeypatch.setattr(decoding.subprocess, "run", measured)
    monkeypatch.setattr(decoding, "physical_cores", lambda: 4)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 8)
    path = tmp_path / "tuned.yaml"
    line = f"tune {LLAMA.model} --dtype float32 --page-size 4 --output {path} --compilation-cache-dir {tmp_path}"
    assert main(line.split()) == 0
    engine = load_configs(str(path)).engine
    assert (engine.model, engine.threads, engine.quantization, engine.page_size) == (LLAMA.model, 2, None, 4)
    assert engine.kv_cache_memory_bytes is not None and engine.kv_cache_memory_bytes % 2**20 == 0
    assert [order.config.threads for order in asked] == [4, 2, 8]
    assert [order.kv_types for order in asked] == [("auto", "int8"), (), ()]
    said = " ".join(capsys.readouterr().err.split())
    assert "100.0 tokens/s with 4, 99.0 tokens/s with 2, 50.0 tokens/s with 8" in said
    assert f"llmjax serve --config {path}" in said


@pytest.mark.slow
def test_a_process_measures_a_stream(compile_cache_dir: str) -> None:
    config = LLAMA.replace(threads=1, compilation_cache_dir=compile_cache_dir)
    found = measure(Order(config=config, kv_types=("auto", "int8"), tokens=30))
    assert found.threads == 1 and 0 < found.step < 1
    assert found.attention.keys() == {"auto", "int8"}
    with pytest.raises(DecodeFailed, match=r"with 1 threads nothing was measured: .*nowhere"):
        measure(Order(config=config.replace(model="/nowhere"), kv_types=(), tokens=30))


@pytest.mark.slow
def test_an_engine_starts_with_what_was_tuned(tmp_path: Path, compile_cache_dir: str) -> None:
    path = tmp_path / "tuned.yaml"
    flags = ["--dtype", "float32", "--compilation-cache-dir", compile_cache_dir]
    assert main(["tune", LLAMA.model, *flags, "--output", str(path)]) == 0
    ask = [
        "generate",
        "--config",
        str(path),
        "--tokenizer",
        str(Path(__file__).parents[1] / "engine/golden/characters"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "llmjax", *ask, "--max-tokens", "5", "--ignore-eos", "Hello"], capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
