"""Information about an engine as plain data, the same wherever the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmjax.adapters.reference import AdapterReference
from llmjax.models.layers.pooling import LabelActivation, PoolingKind, Task, TextPrompt

SleepState = Literal["awake", "weights_offloaded", "discard_all"]  # vLLM's names of how deeply an engine sleeps
CONTEXTS = (1, 2, 4, 8)  # numbers of equal requests whose longest contexts are of interest


@dataclass(frozen=True, kw_only=True)
class PoolerInfo:
    """The vectors that a model which does not generate makes of texts; see ``llmjax.models.layers.pooling.Pooler``.

    Attributes:
        size: entries of a vector.
        whole: whether texts are read in one step, not in chunks.
        matryoshka_dimensions: sizes that vectors may be cut to; empty: any.
        prompts: what is put around a text, by the name of what the text is.
        default_prompt: name of the prompt for texts whose request names none; None: there is none.
        lowercase: whether texts are made lower case.
        pair_template: name of the template that makes a prompt of a pair, "default" being the tokenizer's own; None:
            the texts follow each other as the tokenizer has it.
        filled_to: tokens of every text, shorter ones being filled up with padding; None: texts keep their lengths.
        instruction: what pairs are judged by if the request does not say; None: what the template says.
    """

    kind: PoolingKind
    task: Task
    size: int
    normalize: bool
    activation: LabelActivation
    labels: list[str]
    whole: bool
    matryoshka_dimensions: list[int]
    prompts: dict[str, TextPrompt]
    default_prompt: str | None
    lowercase: bool
    pair_template: str | None = None
    instruction: str | None = None
    filled_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class VisionInfo:
    """What a model that sees takes of images.

    Attributes:
        max_rows: most feature rows of an image.
        max_tokens: most tokens of an image with all that stands between its rows, or of a prompt that is ``whole``.
        side: patches along each side of an image that become one row.
        axes: whether tokens have positions on three axes.
        whole: what has tokens that see one another, so that it has to be in one step: each image, each image with the
            text around it, all images with the text around each, or a prompt with images; None: each token sees those
            before it.
        adapter: the model's own, with which it reads prompts with images that name none; None: it has none.
    """

    max_rows: int
    max_tokens: int
    side: int
    axes: bool
    whole: Literal["image", "text", "images", "prompt"] | None
    adapter: AdapterReference | None = None


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine whose model is loaded.

    Attributes:
        model_name: what the API calls it.
        model_path: its folder or file on this machine.
        vocab_size: number of logits.
        max_model_len: longest prompt and output together, in tokens.
        max_num_seqs: continuations in one step at most, of all engines together.
        max_num_batched_tokens: tokens in one step of an engine at most.
        eos_token_ids: ids that end a text, by the model's files; a tokenizer may know more.
        default_sampling_params: fields of ``SamplingParams`` that the model's makers recommend.
        device: as JAX names it.
        dtype: type of the weights that are not quantized.
        kernels: which C++ kernels are used; None: the device is not a CPU.
        slow: why these are slower than they could be, and what to do; None: they are not.
        platform: JAX's name of the platform.
        dequantized_from: how the checkpoint stores weights that are dequantized because the device has no kernels for
            them; empty: there are none, or the configuration says what becomes of them.
        weight_bytes: size of all weights; ``offloaded_bytes`` of them are in the host's memory.
        load_seconds: duration of loading.
        kv_bytes: size of the KV cache, which holds ``kv_tokens`` tokens in pages of ``page_size``.
        kv_calibrated: whether the KV cache's scales were calibrated.
        longest_contexts: tokens that each of n equal requests can have, by n.
        sampler_bytes: size of the sampler's state.
        vision: what the model takes of images; None: it sees none.
        pooler: the pooler of a model that makes vectors of texts; None: the model generates.
        activations: what products with quantized weights round activations to; empty: no weights are quantized.
        drafts: drafts of a step at most; 0: tokens are made one by one.
    """

    model_name: str
    model_path: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    default_sampling_params: dict[str, Any]
    device: str
    platform: str
    dtype: str
    kernels: str | None
    weight_bytes: int
    offloaded_bytes: int
    load_seconds: float
    kv_bytes: int
    kv_tokens: int
    kv_dtype: str
    kv_calibrated: bool
    page_size: int
    longest_contexts: dict[int, int]
    sampler_bytes: int
    pooler: PoolerInfo | None = None
    vision: VisionInfo | None = None
    dequantized_from: str = ""
    slow: str | None = None
    activations: str = ""
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """The state of an engine.

    Attributes:
        serving: whether it takes requests.
        restarts: how often another process has taken the place of one that had died.
    """

    serving: bool
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgramInfo:
    """A step program.

    Attributes:
        decode: whether all its rows have one token; otherwise they are chunks and decodes.
        tokens: most tokens of a step.
        seconds: how long compiling it, or reading it from the cache, took; None: it is not ready.
        num_bytes: device memory that it needs besides weights and state; None: not known.
    """

    decode: bool
    tokens: int
    seconds: float | None = None
    num_bytes: int | None = None
