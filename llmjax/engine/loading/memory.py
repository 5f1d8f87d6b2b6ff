"""Memory planning: the size of the KV cache and its division into pages, the memory of programs, and an estimate of a
model's memory before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from llmjax.checkpoint import StoredTensor
from llmjax.config import EngineConfig
from llmjax.engine.core.layer_states import GroupSpec, Load, kind_of
from llmjax.errors import ConfigError
from llmjax.kernels.attention.types import INT32_BYTES, KVLayout
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Span
from llmjax.platforms import Platform
from llmjax.quantization.plan import QuantizationPlan
from llmjax.sampling.state import sampler_state_bytes
from llmjax.weights.packing import RowSource, RowStack

logger = logging.getLogger(__name__)

CPU_DEFAULT_BYTES = 2**30
CPU_MAX_BYTES = 4 * 2**30
CPU_SHARE = 0.25  # share of the free memory
STATE_SHARE = 0.5  # share of the memory that recurrent states may take from pages
HIDDEN_COPIES = 4  # f32 arrays [tokens, hidden size] that a step has at once, at least


@dataclass(frozen=True)
class KVPlan:
    """The shape of the KV cache."""

    groups: tuple[GroupSpec, ...]
    layout: KVLayout
    max_model_len: int
    num_bytes: int

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in all, by the group that keeps most of them."""
        return max((group.num_pages - 1) * self.page_size for group in self._paged) if self._paged else 0

    def longest_context(self, num_requests: int) -> int:
        """Tokens that each of ``num_requests`` equal requests can have."""
        if not self._paged:
            return self.max_model_len
        return min(self.max_model_len, (self._paged[0].num_pages - 1) // num_requests * self.page_size)

    @property
    def _paged(self) -> list[GroupSpec]:
        """The groups in which a sequence takes more the longer it is."""
        return [group for group in self.groups if group.span != LastState()]


@dataclass(frozen=True)
class ProgramMemory:
    """The device memory of a compiled step while it runs, besides weights and state."""

    temporaries: int
    outputs: int  # bytes of outputs other than the state
    code: int

    @classmethod
    def of(cls, executable: Any) -> ProgramMemory | None:
        """The memory of a program as XLA has planned it; None: this device's compiler does not say."""
        analysis = executable.memory_analysis()
        if analysis is None:
            return None
        return cls(
            temporaries=analysis.temp_size_in_bytes,
            outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )

    @property
    def total(self) -> int:
        return self.temporaries + self.outputs + self.code


def plan_kv(
    config: EngineConfig,
    model: ModelConfig,
    platform: Platform,
    *,
    layout: KVLayout,
    reserved: int = 0,
    beside: Mapping[Span, int] = MappingProxyType({}),
    agreed: Sequence[int] | None = None,
    free: int | None = None,
) -> KVPlan:
    """Divides the memory among the KV cache's groups of layers.

    Args:
        layout: how a layer's pages are stored.
        reserved: bytes of the free memory that are not for the KV cache. Weights are already in memory, except those
            that are mapped from a file.
        beside: bytes of a page in the layers of another model that uses the same page numbers, by span.
        agreed: pages of each group that all processes have room for; None: this process is the only one, or the first
            to say.
        free: bytes of a CPU's memory that are free but for those ``reserved``; None: what the platform says.

    Raises:
        ConfigError: not even one request of ``max_model_len`` fits, or two pages.
    """
    page = layout.page_size
    page_bytes = _together(page_bytes_by_span(model, layout), beside)
    longest = config.max_model_len or model.max_position
    if longest > model.max_position:
        raise ConfigError(
            f"max_model_len {longest} is above the {model.max_position} tokens that the model was made for",
            hint="to go beyond them, override max_position_embeddings or the rope scaling (--hf-overrides)",
        )
    slots = config.max_num_seqs
    load = Load(page_size=page, num_slots=slots, step=max(config.max_num_batched_tokens, slots), longest=longest)
    state_bytes = page_bytes.get(LastState(), 0)
    token_pages = sum(page_bytes.values()) - state_bytes
    one_request = token_pages * load.pages(longest) + 2 * slots * state_bytes
    budget = config.kv_cache_memory_bytes or _default_budget(config, platform, one_request, reserved, free=free)
    least = token_pages * (load.pages(longest) + 1) if config.max_model_len is not None else 0
    num_pages = (
        _divide(budget, page_bytes, load, for_states=int(min(budget * STATE_SHARE, budget - least)))
        if agreed is None
        else dict(zip(page_bytes, agreed, strict=True))
    )
    if platform.is_cuda and agreed is None:
        num_pages = _within_reach(num_pages, model, layout)
    if min(num_pages.values()) < 2:
        raise ConfigError(
            f"{budget} bytes of KV cache cannot hold two pages of {page} tokens in each of {len(num_pages)} groups of "
            "layers",
            hint=f"raise kv_cache_memory_bytes to {2 * token_pages + 3 * state_bytes} or lower page_size",
        )
    groups = tuple(GroupSpec(span=span, num_pages=count) for span, count in num_pages.items())
    # What one request of the longest length needs must be there, or it could never finish.
    holds = min(kind_of(group.span).longest_alone(group, load) for group in groups)
    if holds < longest:
        needed = token_pages * (load.pages(longest) + 1) + 3 * state_bytes
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {longest} needs up to {needed / 2**20:.0f} MiB of KV cache, there are "
                f"{budget / 2**20:.0f} MiB ({holds} tokens)",
                hint="lower max_model_len, raise kv_cache_memory_bytes, or halve its need with kv_cache_dtype int8",
            )
        longest = holds
    used = sum(group.num_pages * page_bytes[group.span] for group in groups)
    return KVPlan(groups=groups, layout=layout, max_model_len=longest, num_bytes=used)


def _within_reach(num_pages: dict[Span, int], model: ModelConfig, layout: KVLayout) -> dict[Span, int]:
    """The pages of which CUDA kernels reach every byte: with a little more, attention would be the portable one."""
    if layout.dtype.itemsize > 1:
        return num_pages
    found = {}
    for span, count in num_pages.items():
        largest = max(state.page_bytes(layout) for state in model.states if state is not None and state.span == span)
        cut = span != LastState() and INT32_BYTES[0] < count * largest <= INT32_BYTES[1]
        found[span] = INT32_BYTES[0] // largest if cut else count
        if cut:
            logger.warning(
                "the KV cache has %d pages instead of %d: of a layer, kernels reach %s of %s, or more than %s",
                *(found[span], count, _size(INT32_BYTES[0]), layout.dtype, _size(INT32_BYTES[1])),
            )
    return found


def _together(one: Mapping[Span, int], other: Mapping[Span, int]) -> dict[Span, int]:
    spans = sorted({*one, *other}, key=lambda span: span.order)
    return {span: one.get(span, 0) + other.get(span, 0) for span in spans}


def check_memory(
    config: EngineConfig,
    model: ModelConfig,
    platform: Platform,
    plan: KVPlan,
    *,
    reserved: int = 0,
    beside: Mapping[Span, int] = MappingProxyType({}),
) -> None:
    """Compares what the settings ask for with what is free, before any of it is allocated.

    Args:
        reserved, beside: as in `plan_kv`.

    Raises:
        ConfigError: it does not fit; names the setting to lower.
    """
    given = config.kv_cache_memory_bytes
    page_bytes = _together(page_bytes_by_span(model, plan.layout), beside)
    if given is not None and given - plan.num_bytes > sum(page_bytes.values()):
        logger.warning(
            "kv_cache_memory_bytes %s: %s are all that %d sequences (max_num_seqs) of %d tokens can use",
            *(_size(given), _size(plan.num_bytes), config.max_num_seqs, plan.max_model_len),
        )
    try:
        free = max(0, platform.free_memory() - reserved)
    except ConfigError:  # the device does not say
        return
    slots, hidden = _slot_bytes(config, model), _hidden_bytes(config, model)
    for name, value, needed, hint in (
        ("max_num_seqs", config.max_num_seqs, slots, ""),
        ("max_num_batched_tokens", config.max_num_batched_tokens, hidden, ""),
        ("kv_cache_memory_bytes", given, plan.num_bytes + slots + hidden, "lower it, or quantize the weights"),
    ):
        if value is not None and needed > free:
            raise ConfigError(
                f"{name} {value} is too large: it takes {_size(needed)}, and {_size(free)} are free", hint=hint
            )


def step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes that a step takes at least, besides weights and pages; of a configuration with the sizes of steps."""
    return _slot_bytes(config, model) + _hidden_bytes(config, model)


def _slot_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the sampler's state and of logits."""
    sampler = sampler_state_bytes(num_slots=config.max_num_seqs, vocab_size=model.vocab_size)
    return sampler + 4 * config.max_num_seqs * model.vocab_size


def _hidden_bytes(config: EngineConfig, model: ModelConfig) -> int:
    return 4 * HIDDEN_COPIES * config.max_num_batched_tokens * model.hidden_size


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def page_bytes_by_span(model: ModelConfig, layout: KVLayout) -> dict[Span, int]:
    """Bytes of a page in all layers of a group, for each of ``model.spans``; ``layout`` as in `plan_kv`."""
    states = [state for state in model.states if state is not None]
    return {span: sum(state.page_bytes(layout) for state in states if state.span == span) for span in model.spans}


def _default_budget(
    config: EngineConfig, platform: Platform, one_request: int, reserved: int, *, free: int | None = None
) -> int:
    if platform.is_cpu:
        free = platform.free_memory() if free is None else free
        share = max(0, int((free - reserved) * CPU_SHARE))
        wanted = max(CPU_DEFAULT_BYTES, min(one_request, CPU_MAX_BYTES))
        return min(_rounded(share, steps=4), wanted)
    available = platform.available_memory(config.gpu_memory_utilization) - reserved
    if available <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: beside the weights, steps need {reserved / 2**20:.0f} MiB, "
            f"{-available / 2**20:.0f} MiB more than there are",
            hint=_more_memory(platform),
        )
    return _rounded(available, steps=64)


def _rounded(num_bytes: int, *, steps: int) -> int:
    """Rounds a number down, by 1/steps at most: free memory differs a little from start to start, and programs would be
    compiled again for another number of pages. A whole machine's free memory varies more than a card's.

    Args:
        steps: number of steps from a power of two to the next; a power of two.
    """
    unit = 1 << max(0, num_bytes.bit_length() - steps.bit_length())
    return num_bytes // unit * unit


def _more_memory(platform: Platform) -> str:
    advice = "lower max_num_seqs or max_num_batched_tokens, raise gpu_memory_utilization, or quantize the weights"
    if not platform.is_cuda:
        return advice
    return f"{advice}; all engines of a process share one pool of the card, as large as the first one asked for"


def _divide(budget: int, page_bytes: Mapping[Span, int], load: Load, *, for_states: int) -> dict[Span, int]:
    """Pages per group: equal numbers until a group has all it can use.

    Recurrent states are counted separately, because they are not pages of tokens: first as many as ``for_states`` bytes
    hold, at least three, and more at the end if memory is left.
    """
    useful = {span: kind_of(span).useful_pages(span, load) for span in page_bytes}
    found: dict[Span, int] = {}
    state, each = LastState(), page_bytes.get(LastState(), 0)
    if each:
        found[state] = min(useful[state], max(3, for_states // each), budget // each)
    while open_groups := [span for span in page_bytes if span not in found]:
        left = budget - sum(page_bytes[span] * count for span, count in found.items())
        equal = max(0, left) // max(1, sum(page_bytes[span] for span in open_groups))
        capped = [span for span in open_groups if useful[span] <= equal]
        found |= {span: useful[span] for span in capped} if capped else dict.fromkeys(open_groups, equal)
    if each:
        left = budget - sum(page_bytes[span] * count for span, count in found.items())
        found[state] += min(useful[state] - found[state], left // each)
    return {span: found[span] for span in page_bytes}


KV_TYPES: Mapping[str, jnp.dtype] = MappingProxyType(
    {
        "float32": jnp.dtype(jnp.float32),
        "bfloat16": jnp.dtype(jnp.bfloat16),
        "int8": jnp.dtype(jnp.int8),
        "fp8": jnp.dtype(jnp.float8_e4m3fn),
    }
)
"""One of each size; float16 takes what bfloat16 takes."""


@dataclass(frozen=True)
class KVFootprint:
    """What the KV cache of one type takes.

    Attributes:
        token_bytes: bytes of a token in the layers that keep all tokens, scales included.
        window_bytes: maps a window in tokens to the bytes of a token in the layers that keep no more than that window.
        state_bytes: bytes of a sequence in the layers that keep one state.
    """

    token_bytes: float
    window_bytes: Mapping[int, float]
    state_bytes: float = 0

    @property
    def first_token_bytes(self) -> float:
        """Bytes of a token that is within every window."""
        return self.token_bytes + sum(self.window_bytes.values())

    def bytes_of(self, tokens: int) -> float:
        """Bytes of a sequence of this length, with its state twice."""
        windows = sum(size * min(tokens, window) for window, size in self.window_bytes.items())
        return self.token_bytes * tokens + windows + 2 * self.state_bytes

    def tokens_in(self, num_bytes: float) -> int | None:
        """The longest sequence that fits in ``num_bytes``; None: all do, because no layer keeps all tokens.

        A sequence needs its state twice: one is read while the other is written.
        """
        left, used, windows = max(num_bytes - 2 * self.state_bytes, 0), 0, dict(sorted(self.window_bytes.items()))
        for window in list(windows):
            each = self.token_bytes + sum(windows.values())
            if (longest := used + int(left / each)) < window:
                return longest
            left -= (window - used) * each
            used = window
            del windows[window]
        return used + int(left / self.token_bytes) if self.token_bytes else None


def kv_footprint(model: ModelConfig, dtype: jnp.dtype, *, page_size: int) -> KVFootprint:
    """The KV cache's needs of a model.

    Args:
        dtype: type of the stored keys and values; one-byte types have a scale for each token and head.
        page_size: tokens in a page.
    """
    pages = page_bytes_by_span(model, KVLayout.of(dtype, page_size=page_size))
    return KVFootprint(
        token_bytes=pages.get(AllTokens(), 0) / page_size,
        window_bytes={span.window: size / page_size for span, size in pages.items() if isinstance(span, LastTokens)},
        state_bytes=pages.get(LastState(), 0),
    )


def weight_bytes(
    tensors: Mapping[str, StoredTensor], platform: Platform, *, plan: QuantizationPlan | None = None
) -> int:
    """Bytes of a model's weights on the device: quantized matrices as they are kept there, others in the device's type.

    Args:
        tensors: a checkpoint's tensors, by name; those that the model does not use count too.
        plan: how matrices are quantized; None: as the checkpoint has them.

    Raises:
        CheckpointError: a tensor's stored type is not supported.
    """
    total = 0
    for tensor in tensors.values():
        source = None
        if len(tensor.shape) > 1 and platform.has_own_kernels:
            source = tensor.row_source() if plan is None else plan.keep(tensor).source
        total += kept_bytes(source, tensor.shape, platform.dtype, tile=platform.weight_tile)
    return total


def kept_bytes(source: RowSource | RowStack | None, shape: Sequence[int], dtype: jnp.dtype, *, tile: int) -> int:
    """Bytes of one weight in memory.

    Args:
        source: its quantized rows; None: it is kept as plain numbers.
        shape: shape of the plain numbers.
        dtype: type of the plain numbers.
        tile: see `Platform.weight_tile`.
    """
    if source is None:
        return prod(shape) * jnp.dtype(dtype).itemsize
    matrices = source.count if isinstance(source, RowStack) else 1
    return matrices * -(-source.size_out // tile) * tile * source.format.num_words * 4


SMALLER = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""Ways to quantize at load, from the one that loses least to the smallest."""


def check_weights(num_bytes: int, free: int, *, quantized: Callable[[str], int]) -> None:
    """Compares a model's weights with the free memory, before any of them is read.

    Args:
        num_bytes: bytes of the weights as they would be kept.
        free: bytes that are free.
        quantized: gives bytes of the weights by a scheme of SMALLER.

    Raises:
        ConfigError: they do not fit; the hint names the first scheme with which they do, if there is one.
    """
    if num_bytes <= free:
        return
    sizes = ((scheme, quantized(scheme)) for scheme in SMALLER)
    fitting = next(((scheme, size) for scheme, size in sizes if size <= free), None)
    hint = "free some memory, or take a smaller model"
    if fitting is not None:
        hint = f"--quantization {fitting[0]} takes {_size(fitting[1])}; or {hint}"
    raise ConfigError(f"the model's weights take {_size(num_bytes)} of memory, and {_size(free)} are free", hint=hint)
