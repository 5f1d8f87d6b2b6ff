"""Drafts that nobody has asked for: where they change no token, and steps are long enough for them to pay."""

from __future__ import annotations

from llmjax.config import EngineConfig
from llmjax.engine.loading.model import LoadedModel
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import candidates
from llmjax.kernels.qtensor import QTensor
from llmjax.models.layers.state import LastState
from llmjax.platforms import Platform

DRAFTS = 16
LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
    "disable_by_batch_size": 2,
}
"""The ``speculative_config``; `Speculation` takes fewer drafts, or none, where it measures that more cost more."""
WORTH = 64 << 20  # bytes of weights: below, a step takes little more than the host needs for it


def with_automatic_drafts(config: EngineConfig, model: LoadedModel, platform: Platform) -> EngineConfig:
    """The configuration, with prompt lookup where nobody has said anything about drafts and they change no token: the
    products of a row do not depend on how many there are, as tokens would depend on the time that steps take else."""
    native = library()
    wanted = config.speculative_config is None and config.auto_speculation
    if native is None or not wanted or not platform.is_cpu or platform.mesh or config.nnodes > 1 or config.is_staged:
        return config
    recurrent = any(isinstance(span, LastState) for span in model.config.spans)
    if model.config.pooler is not None or model.encoder is not None or recurrent:
        return config
    matrices = [weight for weight in model.params.values() if len(weight.shape) > 1]
    exact = all(isinstance(one, QTensor) and candidates(one, native) == ("int8 vectors",) for one in matrices)
    fits = config.max_num_batched_tokens > DRAFTS
    if not exact or not fits or model.num_bytes < WORTH:
        return config
    return config.replace(speculative_config=LOOKUP)
