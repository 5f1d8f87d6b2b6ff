"""Checkpoints written as GGUF: read back, they are the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import RopeConfig, model_config
from llmjax.quantization.gguf_export import Report, export_gguf
from llmjax.quantization.mixes import Choice
from llmjax.weights.ggml.reference import quantize
from tests.checkpoints import GOLDEN

FAMILIES = ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "gemma3"]
F32 = np.dtype(np.float32)


def exported(source: Checkpoint, path: Path, *, scheme: str = "f32", **options: Any) -> tuple[Checkpoint, Report]:
    report = export_gguf(source, path, scheme=scheme, **options)
    return open_checkpoint(path), report


def close(left: RopeConfig, right: RopeConfig) -> bool:
    factors = np.isclose(left.attention_factor, right.attention_factor, rtol=1e-6)
    return bool(factors) and np.allclose(left.inv_freq, right.inv_freq, rtol=3e-7)


def check_same_model(source: Checkpoint, found: Checkpoint) -> None:
    ours, theirs = model_config(found.config), model_config(source.config)
    assert all(map(close, ours.ropes, theirs.ropes)) and len(ours.ropes) == len(theirs.ropes)
    # Numbers that f32 keys round are compared by themselves; the type of the weights is not a key.
    layers = []
    for our, their in zip(ours.layers, theirs.layers, strict=True):
        assert np.isclose(our.mixer.scale, their.mixer.scale, rtol=1e-6)
        mixer = replace(our.mixer, rope=their.mixer.rope, scale=their.mixer.scale)
        layers.append(replace(our, mixer=mixer))
    assert replace(ours, layers=tuple(layers), dtype=theirs.dtype) == theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_the_same_model_again(tmp_path: Path, name: str) -> None:
    """Equal weights and an equal model give equal logits, which tests/models compares with transformers'."""
    source = open_checkpoint(GOLDEN / name, overrides={"use_sliding_window": False} if name == "qwen2" else {})
    found, report = exported(source, tmp_path / "a.gguf")
    check_same_model(source, found)
    assert report.notes == () and found.config["eos_token_id"] == 2
    for key, tensor in found.tensors.items():
        expected = source.tensors[key].read(F32)
        offset = 1.0 if name == "gemma3" and key.endswith("norm.weight") else 0.0
        # Norms of Gemma go through 1 + w, which f32 rounds.
        assert np.allclose(tensor.read(F32), expected, rtol=0, atol=6e-8 if offset else 0)
    assert found.tensors.keys() == source.tensors.keys() - (
        {"lm_head.weight"} if source.config.get("tie_word_embeddings") else set()
    )


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    untied = exported(source, tmp_path / "untied.gguf", scheme="q4_k_m")
    tied = exported(llama(tmp_path / "tied", tie_word_embeddings=True), tmp_path / "tied.gguf", scheme="q4_k_m")
    assert "output.weight" in types(untied[1]) and types(untied[1])["token_embd.weight"] == "Q4_K"
    assert "output.weight" not in types(tied[1]) and types(tied[1])["token_embd.weight"] == "Q6_K"
    assert tied[0].model_config().tie_word_embeddings and not untied[0].model_config().tie_word_embeddings


ROPES = sorted(path.stem for path in (GOLDEN / "llama").glob("rope-*.json"))


REFUSED = {case: "dynamic" for case in ROPES if case.startswith("rope-dynamic")}
REFUSED["rope-yarn-mscale"] = "yarn"  # it has truncate: false


@pytest.mark.parametrize("case", [case for case in ROPES if case not in REFUSED])
def test_rope_scalings(tmp_path: Path, case: str) -> None:
    source = open_checkpoint(GOLDEN / "llama", overrides=json.loads((GOLDEN / "llama" / f"{case}.json").read_text()))
    found, _ = exported(source, tmp_path / "a.gguf")
    check_same_model(source, found)


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for case, kind in REFUSED.items():
        rope = json.loads((GOLDEN / "llama" / f"{case}.json").read_text())
        with pytest.raises(CheckpointError, match=rf"rope scaling '{kind}' as config\.json has it cannot be written"):
            export_gguf(open_checkpoint(GOLDEN / "llama", overrides=rope), path, scheme="f32")
    with pytest.raises(CheckpointError, match="the sliding window of Qwen2ForCausalLM cannot be written as GGUF"):
        export_gguf(open_checkpoint(GOLDEN / "qwen2"), path, scheme="f32")
    mixed = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(CheckpointError, match="the sliding window of MistralForCausalLM cannot be written"):
        export_gguf(open_checkpoint(GOLDEN / "mistral", overrides=mixed), path, scheme="f32")
    with pytest.raises(ConfigError, match="quantization 'q4_k_x' is unknown"):
        export_gguf(open_checkpoint(GOLDEN / "llama"), path, scheme="q4_k_x")
    more = open_checkpoint(GOLDEN / "llama", overrides={"num_hidden_layers": 4})
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.3.input_layernorm.weight' is missing"):
        export_gguf(more, path, scheme="f32")
    assert not path.exists()


def test_layer_types_of_gemma(tmp_path: Path) -> None:
    kinds = ["full_attention" if i in (1, 2, 5) else "sliding_attention" for i in range(6)]
    source = open_checkpoint(GOLDEN / "gemma3", overrides={"layer_types": kinds})
    found, _ = exported(source, tmp_path / "a.gguf")
    check_same_model(source, found)
    assert GGUFFile.open(tmp_path / "a.gguf").metadata["gemma3.attention.sliding_window_pattern"].tolist() == [
        kind == "sliding_attention" for kind in kinds
    ]


def test_notes_and_sampling_settings(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama", overrides={"eos_token_id": [2, 3, 4, 5]})
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.25}
    found, report = exported(replace(source, generation_config=settings), tmp_path / "a.gguf")
    assert report.notes == ("GGUF names 3 tokens that end a text; [5] of config.json are left out",)
    assert found.config["eos_token_id"] == [2, 3, 4] and found.generation_config == settings


def llama(folder: Path, **config: Any) -> Checkpoint:
    """A random model whose rows fill super-blocks."""
    folder.mkdir()
    keys = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 256,
        "intermediate_size": 288, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys | config))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
        "self_attn.o_proj": (256, 256), "mlp.gate_proj": (288, 256), "mlp.up_proj": (288, 256),
        "mlp.down_proj": (256, 288), "input_layernorm": (256,), "post_attention_layernorm": (256,),
    }  # fmt: skip
    names = {f"model.layers.{i}.{stem}.weight": shape for i in range(8) for stem, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
    if not config.get("tie_word_embeddings"):
        names["lm_head.weight"] = (64, 256)
    save_file(
        {name: rng.standard_normal(shape).astype(np.float16) for name, shape in names.items()},
        folder / "model.safetensors",
    )
    return open_checkpoint(folder)


def types(report: Report) -> Mapping[str, str]:
    return {tensor.name: tensor.info.type_name for tensor in report.tensors}


def test_a_mix_with_rules(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    seen: list[str] = []
    rules = {r"layers\.3\.mlp\.up": "q2k", r"layers\.4\.mlp\.up": "none"}
    path = tmp_path / "a.gguf"
    report = export_gguf(source, path, scheme="q4_k_m", rules=rules, progress=lambda tensor: seen.append(tensor.name))
    found = types(report)
    assert seen == list(found)
    assert found["token_embd.weight"] == "Q4_K" and found["output.weight"] == "Q6_K"
    assert found["blk.3.ffn_up.weight"] == "Q2_K" and found["blk.4.ffn_up.weight"] == "F16"
    assert found["blk.1.attn_v.weight"] == "Q4_K" and found["blk.0.attn_v.weight"] == "Q6_K"
    assert found["blk.0.attn_norm.weight"] == "F32"
    down = next(tensor for tensor in report.tensors if tensor.name == "blk.0.ffn_down.weight")
    assert down.choice == Choice("q8_0", "q6_k") and down.choice.fell_back and down.info.type_name == "Q8_0"

    file = GGUFFile.open(path)
    assert file.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    weights = load_file(tmp_path / "source" / "model.safetensors")
    gate = weights["model.layers.2.mlp.gate_proj.weight"]
    assert np.array_equal(file.tensors["blk.2.ffn_gate.weight"].raw.reshape(288, -1), quantize(gate, "q4_k"))
    queries = weights["model.layers.2.self_attn.q_proj.weight"]  # rows of a head's halves interleave
    interleaved = np.ascontiguousarray(queries.reshape(4, 2, 32, 256).swapaxes(1, 2)).reshape(256, 256)
    assert np.array_equal(file.tensors["blk.2.attn_q.weight"].raw.reshape(256, -1), quantize(interleaved, "q4_k"))
    reader = gguf.GGUFReader(path)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == found


def test_one_scheme_for_all_and_plain_types(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    assert set(types(export_gguf(source, tmp_path / "a.gguf", scheme="q5k")).values()) == {"Q5_K", "Q5_1", "F32"}
    assert set(types(export_gguf(source, tmp_path / "b.gguf", scheme="bf16")).values()) == {"BF16", "F32"}
    assert GGUFFile.open(tmp_path / "a.gguf").metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q5_K_S


def test_weights_that_cannot_be_quantized_are_named(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = np.inf
    save_file(weights, tmp_path / "source" / "model.safetensors")
    source = open_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.1.mlp.up_proj.weight': weights that are infinite"):
        export_gguf(source, tmp_path / "a.gguf", scheme="q4_0")
    assert not (tmp_path / "a.gguf").exists()


def test_a_gguf_source_keeps_its_metadata_and_types(tmp_path: Path) -> None:
    first = tmp_path / "first.gguf"
    tokens = {"tokenizer.ggml.model": "x", "tokenizer.ggml.scores": np.array([0.5], np.float32), "odd": np.int8(-3)}
    export_gguf(llama(tmp_path / "source"), first, scheme="q8_0", tokenizer=tokens)
    source = open_checkpoint(first)
    found, report = exported(source, tmp_path / "second.gguf", scheme="q4_k_m")
    assert found.gguf is not None and found.config == source.config
    before, after = gguf.GGUFReader(first), gguf.GGUFReader(tmp_path / "second.gguf")
    for key, stored in before.fields.items():
        if not key.startswith("GGUF.") and key != "general.file_type":
            assert after.fields[key].contents() == stored.contents()
            assert after.fields[key].types == stored.types
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert types(report)["blk.0.attn_q.weight"] == "Q4_K"
    again, report = exported(source, tmp_path / "third.gguf", scheme="q8_0")
    assert again.gguf is not None and source.gguf is not None
    for tensor in again.gguf.tensors.values():
        assert np.array_equal(tensor.raw, source.gguf.tensors[tensor.name].raw)


def test_parts_of_a_split_file_become_one(tmp_path: Path) -> None:
    export_gguf(llama(tmp_path / "source"), tmp_path / "whole.gguf", scheme="q8_0")
    whole = GGUFFile.open(tmp_path / "whole.gguf")
    tensors = list(whole.tensors.values())
    for index, part in enumerate((tensors[:9], tensors[9:])):
        split = {"split.no": np.uint16(index), "split.count": np.uint16(2), "split.tensors.count": len(tensors)}
        metadata = (dict(whole.metadata) if index == 0 else {}) | split
        infos = [TensorInfo(tensor.name, tensor.shape, tensor.type_name) for tensor in part]
        with open_gguf_writer(tmp_path / f"s-{index + 1:05}-of-00002.gguf", metadata, infos) as writer:
            for tensor in part:
                writer.write(tensor.name, [tensor.raw])
    joined, _ = exported(open_checkpoint(tmp_path / "s-00001-of-00002.gguf"), tmp_path / "joined.gguf", scheme="q8_0")
    assert joined.gguf is not None and not any(key.startswith("split.") for key in joined.gguf.metadata)
    assert [tensor.name for tensor in joined.gguf.tensors.values()] == [tensor.name for tensor in tensors]
