"""From a configuration to an engine with its text side: what ``LLM`` and ``AsyncLLM`` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmjax.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.frontend import Frontend
from llmjax.tokenizer import Tokenizer, load_tokenizer

# Keys of generation_config.json that are defaults for requests, as in vLLM.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Setup:
    """An engine and what belongs to it."""

    engine: Engine
    frontend: Frontend
    tokenizer: Tokenizer | None
    model_name: str
    default_sampling_params: dict[str, Any]


def set_up(config: EngineConfig) -> Setup:
    """Loads the model and its tokenizer and starts to compile."""
    engine = Engine(config)
    checkpoint = engine.model.checkpoint
    try:
        tokenizer = _tokenizer(config, engine)
    except BaseException:
        engine.close()  # or its compiler threads would go on for nobody
        raise
    eos = set(_ints(checkpoint.generation_config.get("eos_token_id"))) | set(engine.model.config.eos_token_ids)
    if tokenizer is not None:
        eos |= tokenizer.eos_token_ids
    frontend = Frontend(
        config,
        tokenizer=tokenizer,
        vocab_size=engine.model.config.vocab_size,
        max_model_len=engine.kv_plan.max_model_len,
        eos_token_ids=frozenset(eos),
    )
    generation = checkpoint.generation_config
    return Setup(
        engine=engine,
        frontend=frontend,
        tokenizer=tokenizer,
        model_name=config.served_model_name or _model_name(config, engine.model.path),
        default_sampling_params={k: generation[k] for k in SAMPLING_DEFAULTS if generation.get(k) is not None},
    )


def _tokenizer(config: EngineConfig, engine: Engine) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(_tokenizer_path(config), chat_template=config.chat_template)
    gguf = engine.model.checkpoint.gguf
    return load_tokenizer(engine.model.path, gguf=gguf, chat_template=config.chat_template)


def _tokenizer_path(config: EngineConfig) -> Path:
    from llmjax.checkpoint.resolve import resolve

    assert config.tokenizer is not None
    path = Path(config.tokenizer).expanduser()
    if path.exists():
        return path  # a folder with a tokenizer alone is no model, so resolve would refuse it
    return resolve(
        config.tokenizer,
        revision=None,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        offline=config.offline,
    )


def _model_name(config: EngineConfig, path: Path) -> str:
    """A GGUF file is known by its name, anything else as the user named it."""
    return path.stem if path.suffix == ".gguf" else config.model


def _ints(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
