"""The description of one ``general.architecture`` of GGUF files, and readers that several architectures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.changes import Change
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys

LAYER_NORM = "attention.layer_norm_epsilon"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The mapping of one ``general.architecture`` to Hugging Face.

    Attributes:
        hf_class: name for config.json's ``architectures``.
        model_type: config.json's ``model_type``.
        layer_tensors: stem of ``blk.N.<stem>`` to the module below ``model.layers.N``.
        permuted_qk: whether query and key rows are stored for interleaved rotary embedding.
        norm_offset: the number that the converter added to weights ending in ``norm.weight``.
        bias_keys: whether config.json says which projections have biases (else the class knows).
        variants: by a stem that only some files have: modules that differ in these.
        fused_gate: whether ``ffn_up`` holds the gate too, in its first rows.
        eps: key of the norms' eps in the file, and in config.json.
        activation: config key and value of the MLP's activation.
        attends: whether any layer has attention, and there are keys about it.
        latent: whether attention is latent, with other sizes of heads.
        mixed: whether layers are of several kinds: arrays then have 0 for layers that a key does not concern.
        family_names: whether ``layer_tensors`` have the names in the family's checkpoints, not the model's names.
        changes: by stem: other changes that the converter makes to a tensor. Takes config.json too.
        parts: by stem: the modules that a tensor is split into. Takes config.json too.
        stacks: by the stem of a tensor outside of layers: the module that its matrices are numbered below.
        scales: by stem: name below ``model.layers.N`` of ``<stem>.scale`` tensors that do not scale weights.
        numbers: keys with a number for each layer, each with its name below ``model.layers.N`` and its shape.
        specialize: makes the keys of this family, from the keys so far and the file.
    """

    hf_class: str
    model_type: str
    layer_tensors: Mapping[str, str]
    permuted_qk: bool = False
    norm_offset: float = 0.0
    bias_keys: bool = True
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_gate: bool = False
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    activation: tuple[str, str] = ("hidden_act", "silu")
    attends: bool = True
    latent: bool = False
    mixed: bool = False
    family_names: bool = False
    changes: Mapping[str, Callable[[GGUFTensor, Mapping[str, Any]], Change]] = field(default_factory=dict)
    parts: Mapping[str, Callable[[GGUFTensor, Mapping[str, Any]], Mapping[str, Change]]] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    specialize: Callable[[ArchitectureKeys, dict[str, Any], GGUFFile], dict[str, Any]] = lambda keys, config, gguf: {}

    def modules(self, gguf: GGUFFile) -> Mapping[str, str]:
        """The modules of a layer by stem, in one file."""
        found = dict(self.layer_tensors)
        for stem, differences in self.variants.items():
            if in_first_layer(gguf, f"{stem}.weight"):
                found |= differences
        return found


def in_first_layer(gguf: GGUFFile, name: str) -> bool:
    """Whether the first layer has a tensor ``blk.0.<name>``."""
    return f"blk.0.{name}" in gguf.tensors


def window_of(keys: ArchitectureKeys) -> int | None:
    """The sliding window in tokens; None: there is none."""
    return keys.integer("attention.sliding_window", 0, least=0) or None


def layer_kinds(keys: ArchitectureKeys, layers: int, period: int) -> list[str]:
    """Kinds of layers: listed in the file, or with a full one in each ``period``."""
    given = keys.value("attention.sliding_window_pattern", period)
    if isinstance(given, np.ndarray):
        if given.shape != (layers,):
            keys.fail("attention.sliding_window_pattern", f"has {given.size} elements for {layers} layers")
        sliding = given.tolist()
    else:
        period = keys.integer("attention.sliding_window_pattern", period)
        sliding = [(i + 1) % period > 0 for i in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]
