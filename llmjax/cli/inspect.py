"""``llmjax inspect``: what a model's files hold and what they will need, without loading them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmjax.cli.parser import Parser, add_config_flags, add_model, configs_of
from llmjax.config import EngineConfig
from llmjax.errors import CheckpointError, ConfigError, TokenizerError

if TYPE_CHECKING:
    from llmjax.checkpoint.checkpoint import Checkpoint
    from llmjax.checkpoint.inspection import Inspection
    from llmjax.models.config import ModelConfig
    from llmjax.platforms import Platform
    from llmjax.tokenizer import Tokenizer

SHOWN_ITEMS = 4  # of a longer list in a setting, only the length is shown
TEMPLATE_LINES = 3
SIZES = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "heads": "num_attention_heads",
    "KV heads": "num_key_value_heads",
    "head size": "head_dim",
    "experts": "num_experts",
    "experts a token": "num_experts_per_tok",
}

Facts = dict[str, Any]


def main(argv: list[str]) -> int:
    """Prints the report, or with ``--chat-template`` the template alone.

    Returns:
        0; 1 if llmjax cannot run the model.

    Raises:
        LLMJaxError: the model cannot be found, its containers cannot be read, or a setting is wrong.
    """
    parser = Parser(
        prog="llmjax inspect",
        description="Show what a model's files hold, without loading them. The exit status is 1 if it cannot be run.",
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")
    # Instead of the engine's setting of that name, which takes a value: here nothing is rendered.
    parser.add_argument(
        "--chat-template", dest="template_alone", action="store_true", help="print the chat template and nothing else"
    )
    add_config_flags(parser, without=("chat_template",))
    values = parser.parse(argv)
    config = configs_of(values, model=values.positional_model).engine
    inspection = _open(config)
    tokenizer = _tokenizer(inspection, config)
    if values.template_alone:
        _print_template(tokenizer)
        return 0
    facts = _facts(inspection, tokenizer, config)
    if values.tensors:
        facts["tensors"] = [
            {"name": t.name, "type": t.type_name, "shape": list(t.shape), "bytes": t.nbytes}
            for t in inspection.tensors.values()
        ]
    if values.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False, default=_plain))
    else:
        # Wide enough for names and paths: without a terminal nothing says how long lines may be.
        Console(width=None if sys.stdout.isatty() else 160).print(_report(facts), highlight=False, markup=False)
    return int(facts["problem"] is not None)


def facts_of(config: EngineConfig) -> Facts:
    """What the files of a configuration's model hold and need, as ``--json`` has it.

    Raises:
        LLMJaxError: the model cannot be found, or its containers cannot be read.
    """
    inspection = _open(config)
    return _facts(inspection, _tokenizer(inspection, config), config)


def _open(config: EngineConfig) -> Inspection:
    from llmjax.checkpoint.inspection import inspect_model
    from llmjax.checkpoint.resolve import resolve_model

    path = resolve_model(config)
    return inspect_model(path, overrides=config.hf_overrides, max_model_len=config.max_model_len)


def _tokenizer(inspection: Inspection, config: EngineConfig) -> Tokenizer | TokenizerError:
    """The tokenizer, or why there is none."""
    from llmjax.tokenizer import load_tokenizer

    try:
        return load_tokenizer(inspection.path, gguf=inspection.gguf, chat_template=config.chat_template)
    except TokenizerError as error:
        return error


def _print_template(tokenizer: Tokenizer | TokenizerError) -> None:
    if isinstance(tokenizer, TokenizerError):
        raise tokenizer
    if tokenizer.chat_template is None:
        raise TokenizerError("the model has no chat template")
    sources = tokenizer.chat_template.sources
    for name, source in sources.items():
        print((f"{{# {name} #}}\n" if len(sources) > 1 else "") + source)


def _facts(inspection: Inspection, tokenizer: Tokenizer | TokenizerError, config: EngineConfig) -> Facts:
    """Everything that is reported, as JSON has it."""
    facts: Facts = {
        "path": str(inspection.path),
        "container": inspection.container,
        "architecture": inspection.architecture,
        "problem": inspection.problem,
        "parameters": inspection.parameters,
        "bytes": inspection.nbytes,
        "types": [asdict(kind) for kind in inspection.types],
        "quantization": inspection.quantization(),
        "sizes": {name: inspection.setting(key) for name, key in SIZES.items() if inspection.setting(key) is not None},
        "vocab_size": inspection.setting("vocab_size"),
        "context_length": inspection.setting("max_position_embeddings"),
        "rope": {
            key: value
            for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters")
            if (value := inspection.setting(key)) is not None
        },
        "windows": _windows(inspection.model) if inspection.model is not None else None,
    }
    if inspection.model is not None:
        model = inspection.model
        facts["sizes"] |= _sizes(model)
        facts |= {"vocab_size": model.vocab_size, "context_length": model.max_position}
    facts["encoder"] = None if inspection.checkpoint is None else _encoder(inspection.checkpoint)
    facts["tokenizer"] = _tokenizer_facts(tokenizer)
    if inspection.gguf is not None and "kind" in facts["tokenizer"]:
        metadata = inspection.gguf.metadata
        named = [metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        facts["tokenizer"]["kind"] += " " + "/".join(str(name) for name in named if name)
    try:
        facts["memory"] = _memory(inspection, config)
    except CheckpointError as error:  # a stored type that is not supported
        facts |= {"memory": None, "problem": str(error)}
    return facts


def _sizes(model: ModelConfig) -> Facts:
    """Under the names of SIZES."""
    from llmjax.models import Experts

    facts: Facts = {"layers": model.num_layers, "hidden size": model.hidden_size}
    for layer in model.layers:
        for mixer in (layer.beside, layer.mixer):
            facts |= mixer.sizes if mixer is not None else {}
        if isinstance(experts := layer.feed_forward, Experts):
            facts |= {"experts": experts.count, "experts a token": experts.per_token}
    return facts


def _encoder(checkpoint: Checkpoint) -> Facts | None:
    """The encoder of pictures; None: the model sees none."""
    spec, tensors = checkpoint.vision, checkpoint.vision_tensors.values()
    if spec is None:
        return None
    return {
        "layers": len(spec.layers),
        "hidden_size": spec.size,
        "tensors": len(tensors),
        "parameters": sum(prod(tensor.shape) for tensor in tensors),
        "types": sorted({tensor.type_name for tensor in tensors}),
    }


def _windows(model: ModelConfig) -> list[Facts]:
    """How many layers see how much."""
    from llmjax.models.layers.state import Paged

    windows = [state.window for state in model.states if isinstance(state, Paged)]
    return [{"window": window, "layers": windows.count(window)} for window in model.windows]


def _tokenizer_facts(tokenizer: Tokenizer | TokenizerError) -> Facts:
    if isinstance(tokenizer, TokenizerError):
        return {"problem": str(tokenizer)}
    from llmjax.tokenizer.backend import HuggingFaceBackend

    backend = tokenizer.backend
    kind = type(backend.tokenizer.model).__name__ if isinstance(backend, HuggingFaceBackend) else "SentencePiece"

    def token(token_id: int | None) -> Facts | None:
        return None if token_id is None else {"id": token_id, "text": tokenizer.id_to_token(token_id)}

    template = tokenizer.chat_template
    return {
        "kind": kind,
        "tokens": tokenizer.vocab_size,
        "bos": token(tokenizer.bos_token_id),
        "eos": token(tokenizer.eos_token_id),
        "pad": token(tokenizer.pad_token_id),
        "ends": [token(token_id) for token_id in sorted(tokenizer.eos_token_ids)],
        "special_tokens": len(tokenizer.all_special_ids),
        "chat_templates": dict(template.sources) if template is not None else {},
    }


def _memory(inspection: Inspection, config: EngineConfig) -> Facts | None:
    """What weights and KV cache need; None where the model cannot be run."""
    if inspection.checkpoint is None or inspection.model is None:
        return None
    from llmjax.engine.loading.memory import KV_TYPES, kv_footprint, weight_bytes
    from llmjax.platforms import select_platform

    platform = select_platform(config)
    weights = weight_bytes(inspection.checkpoint.tensors, platform)
    free = _free_memory(platform)
    kinds = []
    for name, dtype in KV_TYPES.items():
        kv = kv_footprint(inspection.model, dtype, page_size=config.page_size)
        kinds.append(
            {
                "type": name,
                "bytes_per_token": kv.first_token_bytes,
                "bytes_per_token_beyond_windows": kv.token_bytes,
                "tokens_that_fit": None if free is None else kv.tokens_in(free - weights),
            }
        )
    return {"device": str(platform.device), "free": free, "weights": weights, "kv_cache": kinds}


def _free_memory(platform: Platform) -> int | None:
    try:
        return platform.free_memory()
    except ConfigError:  # a device that does not say
        return None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


# The report for people


def _report(facts: Facts) -> RenderableType:
    parts: list[RenderableType] = [pairs(general(facts))]
    parts += ["", _grid(("stored type", "tensors", "parameters", "bytes", "share"), _type_rows(facts))]
    if facts["memory"] is not None:
        parts += ["", *_memory_tables(facts["memory"])]
    if "tensors" in facts:
        rows = ((t["name"], t["type"], " × ".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in facts["tensors"])
        parts += ["", _grid(("tensor", "type", "shape", "bytes"), rows, left=3)]
    return Group(*parts)


def general(facts: Facts) -> Iterable[tuple[str, str]]:
    """The rows about the whole model: a name, and its value."""
    yield "path", facts["path"]
    yield "container", facts["container"]
    yield "architecture", facts["architecture"] + ("" if facts["problem"] is None else " (cannot be run)")
    if facts["problem"] is not None:
        yield "problem", facts["problem"]
    yield "parameters", f"{facts['parameters']:,} in {_size(facts['bytes'])}"
    if facts["quantization"] is not None:
        rest = dict(facts["quantization"])
        method = str(rest.pop("quant_method", "no quant_method"))
        yield "quantization", method + (f": {_settings(rest)}" if rest else "")
    yield "sizes", ", ".join(f"{name} {_short(value)}" for name, value in facts["sizes"].items())
    if (encoder := facts["encoder"]) is not None:
        stored = ", ".join(encoder["types"])
        yield (
            "sees pictures",
            f"encoder of {encoder['layers']} layers, hidden size {encoder['hidden_size']:,}: "
            f"{encoder['parameters']:,} more parameters in {encoder['tensors']} tensors ({stored})",
        )
    if facts["context_length"] is not None:
        yield "context", f"{_short(facts['context_length'])} tokens"
    if facts["rope"]:
        yield "rope", _settings(facts["rope"])
    if facts["windows"] is not None:
        yield "attention", ", ".join(map(_window, facts["windows"]))
    if facts["vocab_size"] is not None:
        yield "vocabulary", f"{_short(facts['vocab_size'])} rows"
    yield from _tokenizer_pairs(facts["tokenizer"])


def _window(facts: Facts) -> str:
    layers = f"{facts['layers']} layer" + ("" if facts["layers"] == 1 else "s")
    return f"{layers} over all tokens" if facts["window"] is None else f"{layers} over {facts['window']:,} tokens"


def _tokenizer_pairs(facts: Facts) -> Iterable[tuple[str, str]]:
    if "problem" in facts:
        yield "tokenizer", facts["problem"]
        return
    yield "tokenizer", f"{facts['kind']}, {facts['tokens']:,} tokens, {facts['special_tokens']:,} of them special"
    named = {kind: facts[kind] for kind in ("bos", "eos", "pad") if facts[kind] is not None}
    shown = [f"{kind} {_token(token)}" for kind, token in named.items()]
    shown += [f"end {_token(token)}" for token in facts["ends"] if token != facts["eos"]]
    yield "special tokens", ", ".join(shown) or "none"
    for name, source in facts["chat_templates"].items():
        lines = source.splitlines()
        more = f"\n… {len(lines) - TEMPLATE_LINES} more lines" if len(lines) > TEMPLATE_LINES else ""
        title = "chat template" + (f" ({name})" if len(facts["chat_templates"]) > 1 else "")
        yield title, "\n".join(_cut(line, 120) for line in lines[:TEMPLATE_LINES]) + more
    if not facts["chat_templates"]:
        yield "chat template", "none"


def _token(token: Facts) -> str:
    return f"{token['id']} {token['text']!r}"


def _type_rows(facts: Facts) -> Iterable[Sequence[str]]:
    for kind in facts["types"]:
        share = kind["nbytes"] / facts["bytes"] if facts["bytes"] else 0.0
        yield kind["name"], f"{kind['tensors']:,}", f"{kind['parameters']:,}", _size(kind["nbytes"]), f"{share:.1%}"


def _memory_tables(memory: Facts) -> Iterable[RenderableType]:
    free = "of unknown size" if memory["free"] is None else f"{_size(memory['free'])} free"
    yield pairs([("memory", f"{memory['device']}, {free}"), ("weights", f"{_size(memory['weights'])} when loaded")])
    rows = [
        (
            kind["type"],
            _size(kind["bytes_per_token"]),
            _size(kind["bytes_per_token_beyond_windows"]),
            "unknown" if memory["free"] is None else "any" if (n := kind["tokens_that_fit"]) is None else f"{n:,}",
        )
        for kind in memory["kv_cache"]
    ]
    columns = ("KV cache type", "a token", "beyond windows", "tokens beside the weights, in all free memory")
    if all(kind["bytes_per_token"] == kind["bytes_per_token_beyond_windows"] for kind in memory["kv_cache"]):
        rows = [(name, each, fit) for name, each, _, fit in rows]  # type: ignore[misc]
        columns = (*columns[:2], columns[3])  # type: ignore[assignment]
    yield ""
    yield _grid(columns, rows)


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of rows: a name in bold, and its value."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))  # Text: brackets in names and templates are not markup
    return table


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    """A setting in a few words."""
    if isinstance(value, Mapping):
        return "{" + _settings(value) + "}"
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        few = len(value) <= SHOWN_ITEMS
        return "[" + (", ".join(map(_short, value)) if few else f"{len(value)} values") + "]"
    if type(value) is int:
        return f"{value:,}"
    return _cut(" ".join(str(value).split()), 100)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
