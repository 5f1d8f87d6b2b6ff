"""What `benchmarks.card` runs, each part in a process of its own: ``python -m benchmarks.card_parts PART --folder …``.

A part yields figures and sentences; each is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData
from rich.console import Console

from benchmarks import tune_gpu
from benchmarks.card import FINDINGS
from benchmarks.card_tests import run_tests
from benchmarks.gpu import FORMATS, PAGE, batch_of, plain, quantized
from benchmarks.gpu_figures import SMALL, Figure, Sizes, Work, fastest, many_times, with_each
from benchmarks.gpu_models import MODELS, speeds
from benchmarks.random_model import SHAPES, MoEShape, Shape, write_config
from benchmarks.scaling import step_seconds
from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.kernels.attention import make_pages
from llmjax.kernels.cuda.decode import decode
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.pages import PageReader
from llmjax.kernels.cuda.prefill import Tiles, prefill
from llmjax.kernels.cuda.quantized_linear import plan_of, quantized_linear
from llmjax.kernels.cuda.split import Split
from llmjax.kernels.cuda.tuned import path_for
from llmjax.kernels.quantized_linear import CARD_BLOCK, linear_by_copy, linear_by_dequantizing
from llmjax.platforms import select_platform

MODEL = "llama-8b"
COSTLIEST = 15
CHUNKS = (2048, 4096, 8192)
POINTS = Sizes(context=(512,), streams=(16, 64, 256), prefill=(512, 2048, 8192))
TINY = replace(SMALL, streams=(2,), prefill=(16, 40))
SMALL_STEPS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 24}
CANNOT = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError, RuntimeError, TypeError)
# DeepSeek-V2-Lite's sizes; a layer of each kind is enough.
LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "max_position_embeddings": 16384,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
)
SMALL_LATENT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Said:
    """What a figure cannot say."""

    name: str
    text: str


Found = Figure | Said


@dataclass(frozen=True)
class Run:
    """How a part is run.

    Attributes:
        until: `time.monotonic()` at which it will be ended.
    """

    part: str
    folder: Path
    until: float
    device: str
    smoke: bool
    vllm: str | None

    @property
    def shape(self) -> Shape:
        return SHAPES["tiny"] if self.smoke else MODELS[MODEL]

    @property
    def sizes(self) -> Sizes:
        return TINY if self.smoke else POINTS

    def write(self, found: Found) -> None:
        """Prints a finding, and adds it to the file of all."""
        if isinstance(found, Said):
            entry: dict[str, Any] = {"part": self.part, "name": found.name, "said": found.text}
            print(f"  {found.name}: {found.text}", flush=True)
        else:
            about = {"by": found.implementation, "seconds": found.seconds, "tokens": found.tokens}
            entry = {"part": self.part, "name": found.name, **about, "work": asdict(found.work)}
            print(f"  {found.name}, {found.implementation}: {found.seconds * 1e3:.4g} ms", flush=True)
        with (self.folder / FINDINGS).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @contextmanager
    def engine(self, name: str, config: Shape | Mapping[str, Any], **settings: Any) -> Iterator[LLM]:
        """An engine of random weights, with the settings that users get but for those given, and its programs ready."""
        folder = self.folder / "models" / name
        if isinstance(config, Shape):
            write_config(folder, config, max_position_embeddings=1 << 14)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(dict(config)))
        small = {name: value for name, value in SMALL_STEPS.items() if self.smoke}
        longest = max(*self.sizes.context, *self.sizes.prefill) + 64
        given = {"max_model_len": longest, "device": self.device, **small, **settings}
        started = time.monotonic()
        llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            **given,
        )
        try:
            llm.warm_up()
            self.write(Said(f"{name}, {settings}: seconds to all programs", f"{time.monotonic() - started:.1f}"))
            yield llm
        finally:
            llm.close()
            del llm
            gc.collect()
            jax.clear_caches()


def doctor(run: Run) -> Iterator[Found]:
    from llmjax.cli.doctor import examine

    for finding in examine(EngineConfig(device=run.device), check_device=True):
        yield Said(finding.name, f"{finding.value}{f' ({finding.advice})' if finding.advice else ''}")


def limits(run: Run) -> Iterator[Found]:
    sizes = SMALL if run.smoke else Sizes()
    select_platform(EngineConfig(device=run.device))
    key = jax.random.key(0)
    x = jax.random.normal(key, (sizes.copy_mib << 18,), jnp.float32)
    yield Figure("copies", "XLA", fastest(lambda: _plus_one(x), sizes.calls), Work(2 * x.nbytes, 0))
    yield Figure("reads", "XLA", fastest(lambda: _sum(x), sizes.calls), Work(x.nbytes, 0))
    size = sizes.matmul
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        a = jax.random.normal(key, (size, size), jnp.bfloat16).astype(dtype)
        name = "products, bf16" if dtype == jnp.bfloat16 else "products, FP8"
        yield Figure(name, "XLA", fastest(partial(_product, a), sizes.calls), Work(3 * a.nbytes, 2 * size**3))
    one = jnp.zeros(1, jnp.float32)
    yield Figure("a launch by the host", "XLA", fastest(lambda: _plus_one(one), 100), Work(0, 0))
    times = 100
    call = many_times(lambda x: [jnp.sin(part) for part in x], [jnp.full(1, float(n)) for n in range(8)], times=times)
    yield Figure("a launch in a graph, of 8 in a loop", "XLA", fastest(call, 3) / (8 * times), Work(0, 0))


_plus_one = jax.jit(lambda x: x + 1)
_sum = jax.jit(jnp.sum)
_product = jax.jit(lambda a: jax.lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16))


def tests(run: Run) -> Iterator[Found]:
    for name, text in run_tests(run.until - time.monotonic() - 10, smoke=run.smoke, log=run.folder / "tests.log"):
        yield Said(name, text)


def model(run: Run, quantization: str | None = None, **settings: Any) -> Iterator[Found]:
    """Decode and prompts of the 8B."""
    if quantization is not None:
        settings["quantization"] = quantization
    if run.device == "cpu":
        settings.pop("activations", None)  # to FP8 on cards alone
    with run.engine(f"{MODEL}, {quantization or 'bf16'}", run.shape, **settings) as llm:
        yield from speeds(llm, f"{quantization or 'bf16'}", run.shape, run.sizes)


def kernels(run: Run, quantization: str | None = None) -> Iterator[Found]:
    """The kernels that cost most. Without graphs, in which a profiler may see one launch."""
    folder = run.folder / "profiles" / run.part
    settings = {} if quantization is None else {"quantization": quantization}
    settings |= {"cuda_graphs": "off"} if run.device == "cuda" else {}
    rng, length = np.random.default_rng(0), run.sizes.context[0] - 32
    cases = [(f"decode of {n}", n, length, 16) for n in (1, run.sizes.streams[-2:][0])]
    cases.append((f"prompt of {run.sizes.prefill[1]}", 1, run.sizes.prefill[1], 1))
    with run.engine(f"{MODEL}, {run.part}", run.shape, profile_dir=str(folder), **settings) as llm:
        for name, streams, tokens, new in cases:
            prompts = [rng.integers(1, run.shape.vocab_size, tokens).tolist() for _ in range(streams)]
            params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
            llm.generate(prompts, params, use_tqdm=False)
            before = profiles(folder)
            llm.start_profile()
            llm.generate(prompts, params, use_tqdm=False)
            llm.stop_profile()
            for place, (kernel, seconds, share) in enumerate(costliest(profiles(folder) - before), 1):
                yield Said(f"{name}, {place:>2}", f"{share:.1%} {seconds * 1e3:.3g} ms {kernel}")


def profiles(folder: Path) -> set[Path]:
    """The profiles that have been written below a folder."""
    return set(folder.rglob("*.xplane.pb"))


def costliest(files: Iterable[Path]) -> list[tuple[str, float, float]]:
    """The kernels of profiles that took longest: name, seconds of all calls, share of all kernels."""
    taken: Counter[str] = Counter()
    for file in files:
        planes = list(ProfileData.from_file(str(file)).planes)
        # On a CPU operations are events of the host's threads.
        on_device = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in on_device or planes:
            for line in plane.lines:
                if not on_device and "XLA" not in line.name and "Eigen" not in line.name:
                    continue
                if on_device and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    taken[event.name] += event.duration_ns
    total = sum(taken.values())
    return [(name, nanoseconds / 1e9, nanoseconds / total) for name, nanoseconds in taken.most_common(COSTLIEST)]


def chunks(run: Run) -> Iterator[Found]:
    """A long prompt in chunks of several sizes."""
    for size in (16, 32) if run.smoke else CHUNKS:
        only = replace(run.sizes, context=run.sizes.context[:1], streams=(), prefill=run.sizes.prefill[1:])
        with run.engine(MODEL, run.shape, max_num_batched_tokens=size, max_num_seqs=4) as llm:
            yield from _prompts(llm, f"chunks of {size}", run.shape, only)


def prompt_graphs(run: Run) -> Iterator[Found]:
    """Prompts with graphs of decodes alone, of everything, and of nothing."""
    for graphs in ("on", "full", "off") if run.device == "cuda" else ("off",):
        with run.engine(MODEL, run.shape, cuda_graphs=graphs, max_num_seqs=4) as llm:
            yield from _prompts(llm, f"cuda_graphs {graphs}", run.shape, run.sizes)


def _prompts(llm: LLM, name: str, shape: Shape, sizes: Sizes) -> Iterator[Figure]:
    return (figure for figure in speeds(llm, name, shape, replace(sizes, context=(), streams=())))


def vllm(run: Run) -> Iterator[Found]:
    """The same points by vLLM, in the interpreter that has it."""
    if run.vllm is None:
        yield Said("vLLM", "left out: --vllm names no interpreter")
        return
    folder = run.folder / "models" / "vllm"
    write_config(folder, run.shape, max_position_embeddings=1 << 14)
    command = [run.vllm, "-P", str(Path(__file__).with_name("card_vllm.py")), str(folder)]
    for name in ("context", "streams", "prefill"):
        command += [f"--{name}", *map(str, getattr(run.sizes, name))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"name"'):
            entry = json.loads(line)
            yield Figure(f"bf16: {entry['name']}", "vLLM", entry["seconds"], Work(0, 0), entry["tokens"])
        elif line.startswith('{"said"'):
            yield Said("vLLM", json.loads(line)["said"])
    if process.wait():
        yield Said("vLLM's end", f"ended with {process.returncode}; what it printed is above")


def attention(run: Run) -> Iterator[Found]:
    """A layer's attention with Llama's heads by each way that there is."""
    select_platform(EngineConfig(device=run.device))
    heads, kv_heads, head_dim = (2, 1, 64) if run.smoke else (32, 8, 128)
    cases = [(2, 40, 1), (1, 24, 24)] if run.smoke else [(1, 4096, 1), (16, 4096, 1), (64, 2048, 1), (1, 2048, 2048)]
    cases += [] if run.smoke else [(1, 8192, 8192)]
    interpret, times, layers = run.device == "cpu", 1 if run.smoke else 10, 1 if run.smoke else 4
    for requests, length, new in cases:
        batch, num_pages = batch_of([length] * requests, new)
        make = partial(
            make_pages, page_size=PAGE, num_kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.dtype(jnp.bfloat16)
        )
        pages = [make(num_pages=num_pages + 1) for _ in range(layers)]
        q = jnp.ones((requests * new, heads, head_dim), jnp.bfloat16)
        seen = requests * (new * length - new * (new - 1) // 2)
        bytes_read = pages[0].layout.page_bytes(num_kv_heads=kv_heads, head_dim=head_dim) * num_pages + 2 * q.nbytes
        work, name = Work(bytes_read, 4 * seen * heads * head_dim), f"{requests} x {length}, {new} new"
        rules = QueryRules(scale=head_dim**-0.5, window=None, softcap=None)
        reader, group = PageReader.of(pages[0], q), heads // kv_heads
        ways: dict[str, Callable[[], Any]] = {}
        for way, mosaic in (("Triton", 0), ("Mosaic", 1)):
            if new == 1:
                split = replace(Split.of(group, pages[0], reader), mosaic=mosaic)
                call: Any = partial(decode, sinks=None, rules=rules, split=split, interpret=interpret)
                ways[way] = partial(with_each, call, q, pages, batch, times=times)
            else:
                tiles, count = replace(Tiles.of(new, group, reader), mosaic=mosaic), jnp.full(requests, new, jnp.int32)
                call = partial(prefill, sinks=None, rules=rules, tiles=tiles, interpret=interpret)
                ways[way] = partial(with_each, call, q, pages, batch, count, times=times)
        k = jnp.ones((layers, requests, length, kv_heads, head_dim), jnp.bfloat16)
        ways["cuDNN, keys not in pages"] = partial(_dense, q.reshape(requests, new, heads, head_dim), k, times)
        for way, made in ways.items():
            try:
                seconds = fastest(made(), 2 if run.smoke else 5) / (times * layers)
            except CANNOT as error:
                yield Said(f"{name}, {way}", f"cannot run: {next(iter(str(error).splitlines()), type(error).__name__)}")
                continue
            yield Figure(name, way, seconds, work)


def _dense(q: jax.Array, k: jax.Array, times: int) -> Callable[[], Any]:
    def one(q: jax.Array, k: jax.Array) -> jax.Array:
        causal = q.shape[1] > 1
        found: jax.Array = jax.nn.dot_product_attention(q, k, k, is_causal=causal, implementation="cudnn")
        return found

    return with_each(one, q, list(k), times=times)


def dequantizing(run: Run) -> Iterator[Found]:
    """A product straight from codes, one after the whole matrix was dequantized, and one with a copy in 16 bits."""
    select_platform(EngineConfig(device=run.device))
    size_out, size_in = (64, 256) if run.smoke else (14336, 4096)
    layers, times = (1, 1) if run.smoke else (8, 10)
    rng = np.random.default_rng(0)
    for name, form in FORMATS.items():
        matrices = [quantized(form(size_in), size_out, tile=tune_gpu.CUDA_TILE) for _ in range(layers)]
        matrices = [replace(one, copy=one.dequantize().astype(one.dtype)) for one in matrices]
        for rows in (16,) if run.smoke else (32, 64, 128, 256, 512):
            x = plain(rng, rows, size_in)
            plan = plan_of(rows, matrices[0])
            straight = partial(quantized_linear, plan=plan, interpret=run.device == "cpu")
            whole = partial(linear_by_dequantizing, block_size=CARD_BLOCK)
            work = Work(matrices[0].words.nbytes + 2 * rows * (size_in + size_out), 2 * rows * size_in * size_out)
            ways = (("straight", straight), ("dequantized whole", whole), ("a copy", linear_by_copy))
            for way, call in ways:
                seconds = fastest(with_each(call, x, matrices, times=times), 2 if run.smoke else 5)
                yield Figure(f"{rows} x {size_in} by {size_out}, {name}", way, seconds / (times * layers), work)


def experts(run: Run) -> Iterator[Found]:
    """Some layers of a mixture, as it is and quantized."""
    shape = SHAPES["tiny-moe"] if run.smoke else replace(MODELS["qwen3-30b-a3b"], num_hidden_layers=4)
    assert isinstance(shape, MoEShape)
    sizes = replace(run.sizes, prefill=run.sizes.prefill[:2])
    for quantization in (None, "q4_k"):
        settings = {} if quantization is None else {"quantization": quantization}
        with run.engine(f"experts, {quantization or 'bf16'}", shape, **settings) as llm:
            yield from speeds(llm, f"30B-A3B, {shape.num_hidden_layers} layers, {quantization or 'bf16'}", shape, sizes)


def latent(run: Run) -> Iterator[Found]:
    """Some layers with latent attention; their bound is not known here: contexts side by side tell what keys cost."""
    config = {**LATENT, **SMALL_LATENT} if run.smoke else LATENT
    contexts = (24, 48) if run.smoke else (512, 8000)
    rng = np.random.default_rng(0)
    with run.engine("latent", config, max_model_len=max(contexts) + 64) as llm:
        for streams in (1, 2) if run.smoke else (1, 16, 64):
            for context in contexts:
                prompts = [rng.integers(1, config["vocab_size"], context - 16).tolist() for _ in range(streams)]
                params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
                runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
                seconds = min(map(step_seconds, runs))
                read = streams * context * config["num_hidden_layers"] * 2
                read *= config["kv_lora_rank"] + config["qk_rope_head_dim"]
                yield Figure(f"decode, {streams} x {context}: keys' bytes", "engine", seconds, Work(read, 0), streams)


def tuning(run: Run) -> Iterator[Found]:
    """Divisions of the kernels that the models above run, those first that read most in a step of a decode."""
    device = select_platform(EngineConfig(device=run.device)).device
    path = run.folder / "tuned.json" if run.smoke else path_for(device.device_kind)
    entries = tune_gpu.entries_of(path, device.device_kind)
    console = Console(width=160)
    for cost, kind, sizes in costly(run):
        for problem in tune_gpu.PROBLEMS[kind](sizes, run.device == "cpu"):
            if time.monotonic() > run.until - 15:
                yield Said("tuning", f"stopped before {kind}: no time is left")
                return
            found = tune_gpu.tuned_problem(problem, sizes, console)
            if found is not None:
                entries[problem.key] = found
                tune_gpu.write(path, device.device_kind, list(entries.values()))
                times = f"{found['microseconds_by_arithmetic']} µs by arithmetic, {found['microseconds']} measured best"
                key = f"{problem.key.kernel}, {problem.key.form}, {problem.key.sizes}"
                yield Said(key, f"{times}, {found['choice'] or 'as it was'}; {cost / 1e6:.0f} MB a step")


def costly(run: Run) -> list[tuple[float, str, tune_gpu.Sizes]]:
    """What is to be tuned: bytes that a step of a decode reads by it, kind, and sizes of that alone."""
    if run.smoke:
        kinds = ("product", "decode")
        return [(1.0, kind, tune_gpu.SMALL) for kind in kinds]
    shape, base = run.shape, tune_gpu.Sizes()
    d, f, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    matrices = {(f, d): 2, (d, f): 1, (d, d): 2, (kv, d): 2}
    rows = (1, 16, 64)
    found = []
    for name, bits in zip(tuple(FORMATS)[:2], (4.2, 4.5), strict=True):
        for (size_out, size_in), count in matrices.items():
            cost = count * shape.num_hidden_layers * size_out * size_in * bits / 8
            for place, n in enumerate(rows):
                one = replace(base, matrices=((size_out, size_in),), formats=(name,), rows=(n,))
                found.append((cost / (1 + place), "product", one))
    for requests in (1, 16, 64, 256):
        one = replace(base, decodes=(requests,), context=2048, heads=base.heads[:1], caches=("bfloat16",))
        cost = requests * 2048 * 2 * kv * 2 * shape.num_hidden_layers
        found.append((min(cost, 4e9) / 2, "decode", one))
    for tokens in (2048, 8192):
        one = replace(base, prefills=(tokens,), heads=base.heads[:1], caches=("bfloat16",))
        found.append((2e9, "prefill", one))
    moe = replace(base, experts=base.experts[:1], formats=(tuple(FORMATS)[1],), tokens=(1, 16, 64))
    found.append((1e9, "experts", moe))
    return sorted(found, key=lambda each: -each[0])


PARTS: Mapping[str, Callable[[Run], Iterator[Found]]] = MappingProxyType(
    {
        "doctor": doctor,
        "limits": limits,
        "tests": tests,
        "decode-bf16": model,
        "kernels-bf16": kernels,
        "vllm": vllm,
        "decode-q4_k": partial(model, quantization="q4_k"),
        "kernels-q4_k": partial(kernels, quantization="q4_k"),
        "chunks": chunks,
        "prompt-graphs": prompt_graphs,
        "decode-int4": partial(model, quantization="int4"),
        "decode-fp8": partial(model, quantization="fp8", activations="fp8"),
        "attention": attention,
        "dequantizing": dequantizing,
        "experts": experts,
        "latent": latent,
        "tuning": tuning,
    }
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card_parts", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", required=True, help="for findings")
    parser.add_argument("--seconds", type=float, required=True, help="that it may take")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--vllm", help="an interpreter that has vLLM")
    options = parser.parse_args(argv)
    until = time.monotonic() + options.seconds
    run = Run(options.part, Path(options.folder), until, options.device, options.smoke, options.vllm)
    for found in PARTS[options.part](run):
        run.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
