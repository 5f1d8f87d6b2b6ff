"""A real server on loopback, over a tiny random Llama checkpoint that is written here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.app import create_app
from llmjax.serve.listen import bind
from llmjax.serve.server import DrainingServer
from tests.waiting import until

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "h e", "i n", "a n", "e r", "th e", "an d", "r e", "o n", "Ġ t", "Ġt he", "e n", "l l", "o u"]
CONTEXT = 512
T = TypeVar("T")


def write_tokenizer(folder: Path) -> int:
    """Byte-level BPE with a few merges and ChatML; returns the vocabulary's size."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[(merge.split(" ")[0], merge.split(" ")[1]) for merge in MERGES])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_llama(folder: Path, *, vocab: int) -> None:
    """Two layers of random weights, large enough in scale that greedy text is not constant."""
    hidden, inner, heads, kv_heads, layers = 32, 64, 4, 2, 2
    head = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": vocab - 3,
        "eos_token_id": vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(7)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 1, (vocab, hidden)).astype(np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": 3 * random(vocab, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.self_attn.q_proj.weight": random(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": random(kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": random(kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj.weight": random(hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
            f"{layer}.mlp.up_proj.weight": random(inner, hidden),
            f"{layer}.mlp.down_proj.weight": random(hidden, inner),
        }
    save_file(tensors, str(folder / "model.safetensors"))


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    engine: Any
    loop: asyncio.AbstractEventLoop
    server: DrainingServer

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=None, **options)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=None)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns that is run in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's steps stand still meanwhile: what runs neither goes on nor ends by itself."""
        self.call(self.engine.pause_generation("keep"))
        try:
            yield
        finally:
            self.call(self.engine.resume_generation())

    def wait_idle(self) -> None:
        """Returns once no request is left in the engine."""
        until(lambda: not self.engine.num_requests)


def start(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> tuple[Running, Callable[[], None]]:
    """A running server and the function that stops it.

    Args:
        loop: makes its event loop; None: asyncio's own.
    """
    from llmjax import AsyncLLM

    ready: list[Running] = []
    failed: list[BaseException] = []
    up = threading.Event()

    async def main() -> None:
        sock = bind(server_config)
        engine = AsyncLLM.from_config(engine_config)
        await engine.wait_ready()
        server = DrainingServer(create_app(engine, server_config), server_config, sock=sock)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        ready.append(Running(url, engine, asyncio.get_running_loop(), server))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        up.set()
        await serving
        await server.stop_engine()

    def thread() -> None:
        try:
            with asyncio.Runner(loop_factory=loop) as asynchronous:
                asynchronous.run(main())
        except BaseException as error:
            failed.append(error)
            up.set()
            raise

    runner = threading.Thread(target=thread, daemon=True)
    runner.start()
    up.wait()
    if failed:
        raise failed[0]

    def stop() -> None:
        ready[0].server.should_exit = True
        runner.join()

    return ready[0], stop


@contextmanager
def also_serving(running: Running, config: ServerConfig) -> Iterator[str]:
    """Another HTTP server of the same engine, at the URL that it gives."""
    sock = bind(config)

    async def made() -> DrainingServer:  # it takes the loop that it is made in
        return DrainingServer(create_app(running.engine, config), config, sock=sock)

    server = running.call(made())
    ended = asyncio.run_coroutine_threadsafe(server.serve(sockets=[sock]), running.loop)
    until(lambda: server.started)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    ended.result()


@pytest.fixture(scope="session")
def start_server() -> Callable[..., tuple[Running, Callable[[], None]]]:
    return start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    write_llama(folder, vocab=write_tokenizer(folder))
    return folder


@pytest.fixture(scope="session")
def engine_config(tiny_model: Path, compile_cache_dir: str) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=16,
        kv_cache_memory_bytes=8 * 2**20,
        max_num_queued_reqs=64,
        served_model_name="tiny-llama",
        compilation_cache_dir=compile_cache_dir,
    )


@pytest.fixture(scope="session")
def running(engine_config: EngineConfig) -> Iterator[Running]:
    server, stop = start(engine_config, ServerConfig(port=0, max_request_bytes=4 * 2**20))
    yield server
    stop()


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.client() as client:
        yield client


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.http() as http:
        yield http


def children(pid: int) -> list[int]:
    """Processes that a process has started, those of the engine alone."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # threads end
            found += map(int, path.read_text().split())
    engines = (b"clients.process_main", b"ranks.worker_main")
    return [child for child in found if any(name in command_line(child) for name in engines)]


def command_line(pid: int) -> bytes:
    """What a process was started with; nothing, if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
