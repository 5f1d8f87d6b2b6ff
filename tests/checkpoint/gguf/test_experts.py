"""GGUF files of mixtures of experts, written by the gguf package under the names that it gives Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax import models
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.experts import ExpertStack, with_separate_experts
from llmjax.errors import CheckpointError
from llmjax.quantization.gguf_export import export_gguf
from tests.checkpoints import GOLDEN

F32 = np.dtype(np.float32)
ARCHITECTURES = {
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen2-moe": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "qwen3-moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
}
Change = Callable[[gguf.GGUFWriter], None]


def converted(source: Checkpoint, name: str, tensor: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to a tensor under its Hugging Face name."""
    config = source.config
    if config["model_type"] == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor[0] if name.endswith("shared_expert_gate.weight") else tensor


def write(path: Path, name: str, *, one_by_one: bool = False, change: Change = lambda writer: None) -> Checkpoint:
    """A golden checkpoint as GGUF; returns the golden one."""
    source = open_checkpoint(GOLDEN / name)
    config = models.model_config(source.config)
    attention = config.layers[0].mixer
    experts = next(spec.feed_forward for spec in config.layers if isinstance(spec.feed_forward, models.Experts))
    arch, kind = ARCHITECTURES[name]
    # The second for layers without experts.
    maps = [gguf.get_tensor_name_map(kind, config.num_layers) for kind in (kind, gguf.MODEL_ARCH.LLAMA)]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(source.config["intermediate_size"])
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_freq_base(source.config.get("rope_theta", 1e6))
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    if name != "mixtral":
        writer.add_expert_feed_forward_length(experts.inner)
    if experts.shared is not None:
        writer.add_expert_shared_feed_forward_length(experts.shared.inner)
    change(writer)
    for key, tensor in source.tensors.items():
        values = converted(source, key, tensor.read(F32))
        stem = next(filter(None, (names.get_name(key, try_suffixes=(".weight", ".bias")) for names in maps)))
        if one_by_one and isinstance(tensor, ExpertStack):
            for expert, matrix in enumerate(values):
                writer.add_tensor(f"{stem.replace('_exps', '')[:-7]}.{expert}.weight", matrix)
        else:
            writer.add_tensor(stem, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source


@pytest.mark.parametrize(("name", "one_by_one"), [*((name, False) for name in ARCHITECTURES), ("mixtral", True)])
def test_the_same_model(tmp_path: Path, name: str, one_by_one: bool) -> None:
    source = write(tmp_path / "x.gguf", name, one_by_one=one_by_one)
    found = open_checkpoint(tmp_path / "x.gguf")
    assert models.model_config(found.config).layers == models.model_config(source.config).layers
    assert found.config["architectures"] == source.config["architectures"]
    assert set(found.tensors) == set(source.tensors)
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32))
    names = set(with_separate_experts(found.tensors, mixtral=name == "mixtral"))
    assert names == set(with_separate_experts(source.tensors, mixtral=name == "mixtral"))


def test_sizes_that_older_files_leave_out(tmp_path: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["qwen2moe.expert_shared_feed_forward_length"]
        del writer.kv_data[0]["qwen2moe.expert_feed_forward_length"]

    write(tmp_path / "x.gguf", "qwen2-moe", change=without)
    config = open_checkpoint(tmp_path / "x.gguf").config
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (48 // 3, 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "expert_gating_func' is 2"),
        (lambda writer: writer.add_expert_weights_scale(2.5), "expert_weights_scale' is 2.5"),
        (lambda writer: writer.add_expert_weights_norm(False), "expert_weights_norm' is False"),
        (lambda writer: writer.add_expert_group_count(4), "expert_group_count' is not understood"),
    ],
)
def test_other_routers_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path / "x.gguf", "qwen3-moe", change=change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "x.gguf")


def test_layers_without_experts_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="layers with and without experts cannot be written as GGUF"):
        export_gguf(open_checkpoint(GOLDEN / "qwen2-moe"), tmp_path / "x.gguf", scheme="f32")


def test_shares_that_llama_cpp_would_not_make_cannot_be_written(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "qwen3-moe", overrides={"norm_topk_prob": False})
    with pytest.raises(CheckpointError, match="norm_topk_prob = False of Qwen3MoeForCausalLM cannot be written"):
        export_gguf(source, tmp_path / "x.gguf", scheme="f32")


def test_tensors_of_other_names_stay(tmp_path: Path) -> None:
    odd = np.arange(6, dtype=np.float32).reshape(2, 3)
    write(tmp_path / "x.gguf", "qwen3-moe", change=lambda writer: writer.add_tensor("odd", odd))
    export_gguf(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "y.gguf", scheme="f16")
    found = gguf.GGUFReader(tmp_path / "y.gguf").tensors
    np.testing.assert_array_equal(next(tensor.data for tensor in found if tensor.name == "odd"), odd)
