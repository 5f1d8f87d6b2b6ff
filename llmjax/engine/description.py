"""Descriptions of an engine as plain data: its model, device, memory and step programs; and answers to controls."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from llmjax.adapters.reference import AdapterReference
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control
from llmjax.engine.front.generation_config import generation_config, sampling_defaults
from llmjax.engine.info import CONTEXTS, EngineInfo, PoolerInfo, ProgramInfo, VisionInfo
from llmjax.engine.loaded import LoadedEngine
from llmjax.engine.loading.memory import ProgramMemory
from llmjax.engine.loading.model import LoadedModel
from llmjax.kernels.cpu.library import describe, why_slow
from llmjax.kernels.qtensor import INT8_DECODES, QTensor
from llmjax.models.classifiers import ORIGINAL_QWEN3
from llmjax.models.vision.spec import VisionSpec

logger = logging.getLogger(__name__)


def info_of(engine: LoadedEngine) -> EngineInfo:
    """Describes an engine."""
    config, model, plan, platform = engine.config, engine.model, engine.kv_plan, engine.platform
    generation = generation_config(config, model.checkpoint.generation_config)
    weights = [weight for weight in model.params.values() if isinstance(weight, QTensor)]
    return EngineInfo(
        model_name=next(iter(config.served_names), None) or _model_name(config, model.path),
        model_path=str(model.path),
        architecture=model.config.architecture,
        num_layers=model.config.num_layers,
        vocab_size=model.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=frozenset([*_ints(generation.get("eos_token_id")), *model.config.eos_token_ids]),
        default_sampling_params=sampling_defaults(generation),
        device=", ".join(map(str, platform.devices)),
        platform=platform.name,
        dtype=str(platform.dtype),
        kernels=describe() if platform.is_cpu else None,
        weight_bytes=model.num_bytes,
        offloaded_bytes=model.offloaded_bytes,
        load_seconds=model.load_seconds,
        kv_bytes=plan.num_bytes * len(platform.devices),
        kv_tokens=plan.num_tokens,
        kv_dtype=plan.layout.dtype.name,
        kv_calibrated=model.kv_calibration is not None,
        page_size=plan.page_size,
        longest_contexts={n: plan.longest_context(n) for n in CONTEXTS if n <= config.max_num_seqs},
        sampler_bytes=engine.runner.executor.sampler_bytes,
        pooler=_pooler(model),
        vision=_vision(engine),
        dequantized_from=model.dequantized_from,
        slow=why_slow() if platform.is_cpu else None,
        drafts=0 if config.speculative is None else config.speculative.num_speculative_tokens,
        activations=describe_activations({w.activations for w in weights}, cpu=platform.is_cpu) if weights else "",
    )


def _vision(engine: LoadedEngine) -> VisionInfo | None:
    media, encoder = engine.runner.media, engine.model.encoder
    if media is None or encoder is None:
        return None
    one_step = engine.scheduler.max_num_batched_tokens - engine.config.max_num_seqs  # beside a decode of each other
    return VisionInfo(
        max_rows=media.num_rows,
        max_tokens=one_step if media.whole else engine.kv_plan.max_model_len,
        side=encoder.graph.spec.side,
        axes=media.axes,
        whole=_whole(encoder.graph.spec),
        adapter=engine.model.own_adapter,
    )


def _whole(spec: VisionSpec) -> Literal["image", "text", "images", "prompt"] | None:
    if not spec.bidirectional:
        return None
    if spec.whole_images:
        return "images"
    return "prompt" if spec.whole_prompt else "text" if spec.whole_text else "image"


def describe_activations(activations: Collection[str], *, cpu: bool) -> str:
    """What products with quantized weights round, and whether a request's tokens depend on others.

    Args:
        activations: values of `QTensor.activations`.
        cpu: whether the device is a CPU.
    """
    if INT8_DECODES in activations:
        return "int8 where tokens are generated, bfloat16 in prompts; --batch-invariant: the same tokens in any batch"
    if activations == {"float"}:
        return "not rounded to int8"
    if not cpu:
        return " or ".join(sorted(activations))
    return "int8 but for outliers, each row in its own way: the same tokens in any batch"


def _pooler(model: LoadedModel) -> PoolerInfo | None:
    pooler, modules, logit_score = model.config.pooler, model.checkpoint.modules, model.checkpoint.logit_score
    if pooler is None:
        return None
    return PoolerInfo(
        kind=pooler.kind,
        task=pooler.task,
        size=pooler.size(model.config.hidden_size),
        normalize=pooler.normalize,
        activation=pooler.activation,
        labels=list(pooler.labels),
        whole=not model.config.causal,
        matryoshka_dimensions=_ints(model.checkpoint.config.get("matryoshka_dimensions")),
        prompts={} if modules is None else dict(modules.prompts),
        default_prompt=None if modules is None else modules.default_prompt,
        lowercase=pooler.lowercase or (modules is not None and modules.lowercase),
        pair_template=_pair_template(model),
        instruction=None if logit_score is None else logit_score.instruction,
        filled_to=pooler.filled_to,
    )


def _pair_template(model: LoadedModel) -> str | None:
    checkpoint = model.checkpoint
    if checkpoint.config.get(ORIGINAL_QWEN3) is True:
        return "qwen3-reranker"
    return "default" if checkpoint.logit_score is not None and checkpoint.convert != "embed" else None


def programs_of(engine: LoadedEngine) -> list[ProgramInfo]:
    """All step programs, cheapest first."""
    ready = {program.bucket: program for program in engine.runner.programs.ready}
    infos = []
    for bucket in engine.runner.programs.buckets:
        seconds = num_bytes = None
        if (program := ready.get(bucket)) is not None:
            memory = ProgramMemory.of(program.executable)
            seconds, num_bytes = program.seconds, None if memory is None else memory.total
        infos.append(ProgramInfo(decode=bucket.decode, tokens=bucket.tokens, seconds=seconds, num_bytes=num_bytes))
    return infos


def obey(engine: LoadedEngine, control: Control, adapter: AdapterReference | None = None) -> Any:
    """Carries out a control; ``Control`` says what it returns.

    Args:
        adapter: the adapter that it is about, where it is about one.
    """
    match control:
        case Control.PING:
            return None
        case Control.PROGRAMS:
            return programs_of(engine)
        case Control.KV_STATS:
            return engine.kv_stats()
        case Control.RESET_PREFIX_CACHE:
            return engine.reset_prefix_cache()
        case Control.WAIT_READY:
            return engine.runner.wait_ready()
        case Control.WARM_UP:
            return engine.runner.warm_up()
        case Control.SLEEP | Control.SLEEP_DEEPLY:
            return engine.sleep(discard=control is Control.SLEEP_DEEPLY)
        case Control.WAKE_WEIGHTS:
            return engine.wake_weights()
        case Control.WAKE_KV_CACHE:
            return engine.wake_kv_cache()
        case Control.FREEZE:
            return engine.freeze()
        case Control.GO_ON:
            return engine.go_on()
        case Control.LOAD_ADAPTER:
            assert adapter is not None
            return engine.read_adapter(adapter)
        case Control.START_PROFILE:
            return engine.profiler.start()
        case Control.STOP_PROFILE:
            return engine.profiler.stop()


def _model_name(config: EngineConfig, path: Path) -> str:
    """A file or folder is known by its name, without the path that led to it; anything else as the user named it."""
    if path.suffix == ".gguf":
        return path.stem
    local = os.path.expanduser(config.model)
    return Path(local).resolve().name if os.path.exists(local) else config.model


def _ints(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
