"""Default sampling parameters of requests: from generation_config.json, and the user's settings in its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmjax.checkpoint.checkpoint import GENERATION_CONFIG
from llmjax.checkpoint.files import read_object
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

# Keys of generation_config.json that are defaults for requests, as in vLLM, with their names in SamplingParams.
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repeat_last_n": "repeat_last_n",
    "max_new_tokens": "max_tokens",
}

# Keys that would change what is generated, and have no counterpart here, with the values that change nothing.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}


def generation_config(config: EngineConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json as ``generation_config`` and ``override_generation_config`` have it.

    Args:
        own: the model's.

    Raises:
        ConfigError: there is no such file.
    """
    settings = dict(own)
    if config.generation_config == "none":
        settings = {}
    elif config.generation_config != "auto":
        path = Path(config.generation_config).expanduser() / GENERATION_CONFIG
        if not path.is_file():
            raise ConfigError(f"generation_config must be auto, none or a folder with {GENERATION_CONFIG}: no {path}")
        settings = read_object(path)
    return {**settings, **config.override_generation_config}


def check_generation_config(config: EngineConfig) -> None:
    """Checks the settings before a model is loaded.

    Raises:
        ConfigError: there is no file where ``generation_config`` says, or an override is not a sampling parameter in
            range.
    """
    generation_config(config, {})
    for name in config.override_generation_config:
        if name not in (*SAMPLING_DEFAULTS, "do_sample"):
            known = ", ".join(SAMPLING_DEFAULTS)
            raise ConfigError(f"override_generation_config has {name!r}; defaults of requests are {known}")
    try:
        SamplingParams(**sampling_defaults(config.override_generation_config))
    except InvalidRequest as error:
        raise ConfigError(f"override_generation_config: {error}") from None


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a model's makers recommend.

    ``do_sample: false`` means greedy, as in transformers, whatever temperature stands beside it. Where the key is
    absent the numbers count, as in vLLM, although transformers would be greedy then too.
    """
    ignored = [k for k, neutral in WITHOUT_EFFECT.items() if generation_config.get(k) not in (None, *neutral)]
    if ignored:
        logger.warning("generation_config: %s have no effect here", ", ".join(ignored))
    defaults = {
        field: value for key, field in SAMPLING_DEFAULTS.items() if (value := generation_config.get(key)) is not None
    }
    return {**defaults, "temperature": 0.0} if generation_config.get("do_sample") is False else defaults
