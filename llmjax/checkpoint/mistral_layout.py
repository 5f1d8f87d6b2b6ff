"""Mistral's own layout of a model: params.json and consolidated.safetensors, read as Hugging Face's files would be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmjax.checkpoint.files import read_object
from llmjax.checkpoint.rows import RowsOf
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.nested import unwrapped

CONFIG, PARAMS = "config.json", "params.json"
WEIGHTS, PROCESSOR = "consolidated.safetensors", "preprocessor_config.json"
MAX_LENGTH = 131072  # of models whose files do not say; transformers' converters have it too
IMAGE = 10  # the id of the token at which rows of pictures stand, where files do not say
MERGING = "patch_merge"  # the name of the projector that joins squares of patches
# Keys of the text model by Hugging Face's names.
TEXT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "rms_norm_eps": "norm_eps",
    "vocab_size": "vocab_size",
}
# Keys of encoders that have the same names.
VISION = (
    "hidden_size",
    "num_channels",
    "patch_size",
    "rope_theta",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Keys that say nothing of what is computed.
NEUTRAL = frozenset({"model_type", "max_batch_size", "model_parallel", "dtype"})
READ = frozenset(
    {
        *TEXT.values(),
        "head_dim",
        "n_kv_heads",
        "rope_theta",
        "sliding_window",
        "max_seq_len",
        "max_position_embeddings",
        "tied_embeddings",
        "yarn",
        "llama_4_scaling",
        "vision_encoder",
    }
)
VISION_READ = frozenset(
    {
        *VISION,
        "image_size",
        "max_image_size",
        "adapter_bias",
        "mm_projector_id",
        "spatial_merge_size",
        "image_token_id",
        "image_break_token_id",
        "image_end_token_id",
        "add_pre_mm_projector_layer_norm",
    }
)
_INNER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    **{f"layers.*.{own}": f"model.layers.*.{name}" for own, name in _INNER.items()},
}
_TOWER = "vision_tower.transformer.layers.*"
VISION_NAMES = {
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    **{
        f"vision_encoder.transformer.layers.*.{own}": f"{_TOWER}.{name}"
        for own, name in {
            **{f"attention.w{part}": f"attention.{part}_proj" for part in "qkvo"},
            "feed_forward.w1": "feed_forward.gate_proj",
            "feed_forward.w2": "feed_forward.down_proj",
            "feed_forward.w3": "feed_forward.up_proj",
            "attention_norm": "attention_norm",
            "ffn_norm": "ffn_norm",
        }.items()
    },
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_native(folder: Path) -> bool:
    """Whether a folder's files are Mistral's own alone."""
    return not (folder / CONFIG).is_file() and (folder / PARAMS).is_file()


def config_in(folder: Path) -> dict[str, Any]:
    """A folder's config.json, or what transformers' converters make of its params.json; of a model that is inside
    another, its own.

    Raises:
        CheckpointError: the file cannot be read, or a key of it is missing, wrong, or not understood.
    """
    if not is_native(folder):
        return unwrapped(read_object(folder / CONFIG))
    params = _Params(read_object(folder / PARAMS), folder / PARAMS)
    params.refuse_unread(READ | NEUTRAL)
    text: dict[str, Any] = {name: params.values.get(own) for name, own in TEXT.items()}
    if missing := next((TEXT[name] for name, value in text.items() if value is None), None):
        params.fail(missing, "is missing")
    text["num_key_value_heads"] = params.values.get("n_kv_heads") or text["num_attention_heads"]
    for key in ("head_dim", "rope_theta"):
        if params.values.get(key) is not None:
            text[key] = params.values[key]
    text["sliding_window"] = params.window()
    lengths = (params.values.get(key) for key in ("max_position_embeddings", "max_seq_len"))
    text["max_position_embeddings"] = next((length for length in lengths if length is not None), MAX_LENGTH)
    text["tie_word_embeddings"] = bool(params.values.get("tied_embeddings"))
    text |= {"model_type": "mistral", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
    if (scaled := params.scaled()) is not None:
        text |= {"model_type": "ministral3", "rope_parameters": scaled}
        text.pop("rope_theta", None)
    named = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}[text["model_type"]]
    if not params.values.get("vision_encoder"):
        return {**text, "architectures": [named]}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    seeing = _seeing(_Params.within(params, "vision_encoder"))
    return {"text_config": {**text, "architectures": [named]}, **seeing, **tied}


def _seeing(params: _Params) -> dict[str, Any]:
    """Keys of config.json that say what sees."""
    params.refuse_unread(VISION_READ)
    own = params.values
    vision = {key: own[key] for key in VISION if own.get(key) is not None}
    vision |= {"model_type": "pixtral", "hidden_act": "silu", "image_size": _longest(own, params)}
    found: dict[str, Any] = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": vision,
        "image_token_index": own.get("image_token_id", IMAGE),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": bool(own.get("adapter_bias", False)),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    kind, merges = own.get("mm_projector_id") or "", own.get("spatial_merge_size") or 1
    if kind not in ("", MERGING):
        params.fail("mm_projector_id", f"is {kind!r}; supported are {MERGING!r} and none")
    if (kind == MERGING) != (merges > 1) or bool(own.get("add_pre_mm_projector_layer_norm", kind)) != bool(kind):
        params.fail("mm_projector_id", "does not go with spatial_merge_size and add_pre_mm_projector_layer_norm")
    if kind:
        found |= {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "spatial_merge_size": merges,
        }
    return found


def processor_in(folder: Path) -> dict[str, Any]:
    """The preprocessor_config.json that a folder's params.json stands for; empty: the model does not see.

    Raises:
        CheckpointError: the file cannot be read, or lacks a key.
    """
    params = _Params(read_object(folder / PARAMS), folder / PARAMS)
    if not params.values.get("vision_encoder"):
        return {}
    params = _Params.within(params, "vision_encoder")
    return {"patch_size": params.values.get("patch_size"), "size": {"longest_edge": _longest(params.values, params)}}


def renamed(tensors: Mapping[str, SafetensorsTensor], *, nested: bool, path: Path) -> dict[str, SafetensorsTensor]:
    """Tensors by the names that transformers' converters give them.

    Args:
        nested: whether the text model is a part of one that sees.
        path: where the tensors are, for messages.

    Raises:
        CheckpointError: a tensor is not known.
    """
    found: dict[str, SafetensorsTensor] = {}
    for stored, tensor in tensors.items():
        module, _, kind = stored.rpartition(".")
        pattern, numbers = _NUMBER.sub("*", f".{module}.")[1:-1], _NUMBER.findall(f".{module}.")
        known = NAMES.get(pattern)
        if known is not None:
            known = f"language_model.{known}" if nested else known
        elif nested:
            known = VISION_NAMES.get(pattern)
        if known is None or kind not in ("weight", "bias"):
            raise CheckpointError(f"{path}: tensor {stored!r} is none of those that {PARAMS} speaks of")
        for number in numbers:
            known = known.replace("*", number, 1)
        found[f"{known}.{kind}"] = tensor
    return found


def halved(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    """Tensors with the rows of queries' and keys' heads in halves, as Hugging Face has them.

    In Mistral's files the entries of a head that rotary positions turn together are neighbors.

    Args:
        config: the keys of the model, or of its encoder, that has the tensors.

    Raises:
        CheckpointError: a matrix has rows that are not of whole heads.
    """
    heads = config["num_attention_heads"]
    counts = {".q_proj.weight": heads, ".k_proj.weight": config.get("num_key_value_heads", heads)}
    found = dict(tensors)
    for name, tensor in tensors.items():
        count = next((count for end, count in counts.items() if name.endswith(end)), None)
        if count is None:
            continue
        if (rows := tensor.shape[0]) % (2 * count):
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has {rows} rows, which are not {count} heads of pairs"
            )
        order = np.arange(rows).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)
        found[name] = RowsOf(name, (tensor,), order)
    return found


def _longest(vision: Mapping[str, Any], params: _Params) -> int:
    """Pixels along the longer side of the largest picture."""
    longest = vision.get("max_image_size") or vision.get("image_size")
    return longest if isinstance(longest, int) else params.fail("max_image_size", "must be a number of pixels")


class _Params:
    """The keys of params.json, or of an object in it."""

    def __init__(self, values: Mapping[str, Any], path: Path, inside: str = "") -> None:
        self.values, self._path, self._inside = values, path, inside

    @classmethod
    def within(cls, outer: _Params, key: str) -> _Params:
        """The keys of an object."""
        values = outer.values[key]
        if not isinstance(values, Mapping):
            outer.fail(key, "must be an object")
        return cls(values, outer._path, f"{key}.")

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises the error that names a key."""
        raise CheckpointError(f"{self._path}: {self._inside}{key} {problem}")

    def refuse_unread(self, known: frozenset[str]) -> None:
        """Refuses keys that are not read, unless they say that something is off."""
        for key, value in self.values.items():
            if key not in known and value not in (None, False, [], {}, ""):
                self.fail(key, f"= {str(value)[:60]} is not supported; use the layout of Hugging Face, if there is one")

    def window(self) -> int | None:
        """Tokens that each sees, which older files have as a text."""
        value = self.values.get("sliding_window")
        if value is None or isinstance(value, int):
            return value
        if not isinstance(value, str) or not value.isdecimal():
            self.fail("sliding_window", f"is {str(value)[:60]!r}, not one number for all layers")
        return int(value)

    def scaled(self) -> dict[str, Any] | None:
        """The scaling of rotary positions, and of queries (Ministral 3); None: there is none."""
        if not self.values.get("yarn") and not self.values.get("llama_4_scaling"):
            return None
        yarn, queries = (self.values.get(key) or {} for key in ("yarn", "llama_4_scaling"))
        length = yarn.get("original_max_position_embeddings")
        if yarn.get("apply_scale") or any(key not in yarn for key in ("factor", "alpha", "beta")) or not length:
            self.fail("yarn", "must have factor, alpha, beta and original_max_position_embeddings, and no apply_scale")
        if queries.get("original_max_position_embeddings", length) != length or "beta" not in queries:
            self.fail("llama_4_scaling", "must have a beta, and original_max_position_embeddings as in yarn")
        return {
            "rope_type": "yarn",
            "rope_theta": self.values.get("rope_theta", 1e6),
            "factor": float(yarn["factor"]),
            "original_max_position_embeddings": length,
            "beta_fast": float(yarn["beta"]),
            "beta_slow": float(yarn["alpha"]),
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": queries["beta"],
        }
