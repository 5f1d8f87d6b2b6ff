"""Models written as folders: read back, they are the model that was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError, ConfigError
from llmjax.quantization.folder_export import check_target, copy_companions, export_folder
from llmjax.quantization.gguf_export import export_gguf
from llmjax.quantization.plan import SavePlan
from llmjax.quantization.rounding import Result, round_to_nearest
from llmjax.weights.uniform import SAVED_SCHEMES
from tests.checkpoints import GOLDEN

FAMILIES = ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "gemma3"]
OWN_NAMES = ["yi", "falcon-7b", "gpt2", "chatglm", "stablelm-2-12b", "nemotron-h-moe", "dbrx", "lfm2-moe", "mamba2"]
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def no_tokenizer(folder: Path) -> None:
    pass


def written(source: Checkpoint, folder: Path, scheme: str, *, shard_bytes: int = 1 << 30, **options: Any) -> Checkpoint:
    plan = SavePlan.of(source, scheme, **options)
    results = round_to_nearest(source.tensors, plan.layers)
    export_folder(plan, folder, results=results, write_tokenizer=no_tokenizer, shard_bytes=shard_bytes)
    return open_checkpoint(folder)


@pytest.mark.parametrize("scheme", SAVED_SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_scheme(family: str, scheme: str, tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / family)
    group = {"group_size": 16} if scheme.startswith("int4") or scheme == "int8_g128" else {}
    plan = SavePlan.of(source, scheme, **group)
    found = written(source, tmp_path / "out", scheme, **group)
    assert found.tensors.keys() == source.tensors.keys() and found.quantization == "compressed-tensors"
    assert len(plan.layers) == 7 * source.config["num_hidden_layers"]
    for name, tensor in source.tensors.items():
        expected = tensor.read(F32)
        if name in plan.layers:
            plan.layers[name].quantize(expected).dequantize(out := np.empty_like(expected))
            expected = out
            assert found.tensors[name].type_name.startswith("CT-")
        else:
            assert found.tensors[name].type_name == tensor.type_name
        assert np.array_equal(found.tensors[name].read(F32), expected), name
    ours = {key: value for key, value in found.config.items() if key != "quantization_config"}
    assert ours.items() >= source.config.items() and "lm_head" in found.config["quantization_config"]["ignore"]


@pytest.mark.parametrize("family", OWN_NAMES)
def test_families_with_names_of_their_own(family: str, tmp_path: Path) -> None:
    """What their files have in one tensor, or transposed, too; and again, of what has been written."""
    source, rules = open_checkpoint(GOLDEN / family), {r"layers\.1\..*(up|out)_proj": "none"}
    plan = SavePlan.of(source, "int8", rules=rules)
    export_folder(
        plan,
        tmp_path / "out",
        results=round_to_nearest(plan.tensors, plan.layers),
        write_tokenizer=no_tokenizer,
        shard_bytes=1 << 30,
    )
    found = open_checkpoint(tmp_path / "out")
    assert found.tensors.keys() == source.tensors.keys() and found.model_config() == source.model_config()
    again = SavePlan.of(found, "int8", rules=rules)
    assert again.layers.keys() == plan.layers.keys() and again.tensors.keys() == plan.tensors.keys()
    for name, tensor in plan.tensors.items():
        expected = tensor.read(F32)
        if name in plan.layers:
            plan.layers[name].quantize(expected).dequantize(out := np.empty_like(expected))
            expected = out
        assert np.array_equal(again.tensors[name].read(F32), expected), name


def test_the_names_are_those_of_the_familys_files(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "gpt2")
    written(source, tmp_path / "out", "int8")
    modules, original = (
        {name.rpartition(".")[0] for name in stored_tensors(path)} for path in (tmp_path / "out", GOLDEN / "gpt2")
    )
    fused = {f"h.{i}.attn.c_attn" for i in range(2)}
    parts = {f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkv"}
    assert {name.removeprefix("transformer.") for name in original} - fused | parts == {
        name.removeprefix("transformer.") for name in modules
    }


def test_rules_and_the_head(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama")
    rules = {r"layers\.1\.mlp": "fp8", "lm_head": "int8", r"v_proj|embed": "none", "norm": "int8"}
    found = written(source, tmp_path / "out", "int4", group_size=16, rules=rules)
    kinds = {name: tensor.type_name for name, tensor in found.tensors.items()}
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "CT-FLOAT8"
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "CT-INT4"
    assert kinds["lm_head.weight"] == "CT-INT8"
    assert kinds["model.layers.2.self_attn.v_proj.weight"] == kinds["model.embed_tokens.weight"] == "BF16"
    config = found.config["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == [f"model.layers.{i}.self_attn.v_proj" for i in range(3)]


@pytest.mark.parametrize(("form", "scheme", "kind"), [("gptq", "int4", "GPTQ-4"), ("awq", "int4_asym", "AWQ-4")])
def test_other_formats(form: str, scheme: str, kind: str, tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama")
    found = written(source, tmp_path / "out", scheme, group_size=16, form=form)
    assert found.quantization == form
    assert found.tensors["model.layers.2.mlp.down_proj.weight"].type_name == kind


def test_shards(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama")
    found = written(source, tmp_path / "out", "int8", shard_bytes=10_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert found.tensors.keys() == source.tensors.keys()


def test_a_quantized_source(tmp_path: Path) -> None:
    """A GGUF source: what was stored quantized and stays plain gets the model's type."""
    export_gguf(open_checkpoint(GOLDEN / "llama"), tmp_path / "a.gguf", scheme="q8_0")
    source = open_checkpoint(tmp_path / "a.gguf")
    assert source.tensors["model.embed_tokens.weight"].type_name == "Q8_0" and source.quantization == "gguf"
    found = written(source, tmp_path / "out", "int8")
    embedding = found.tensors["model.embed_tokens.weight"]
    assert embedding.type_name == "BF16" and found.tensors["model.norm.weight"].type_name == "F32"
    assert np.array_equal(embedding.read(BF16), source.tensors[embedding.name].read(BF16))
    assert found.config["torch_dtype"] == "bfloat16" and found.config["architectures"] == ["LlamaForCausalLM"]
    again = written(found, tmp_path / "again", "int4", group_size=16)
    assert again.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_refusals(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama")
    with pytest.raises(ConfigError, match="scheme 'int5' is unknown; known are int8, int8_g128"):
        SavePlan.of(source, "int5")
    with pytest.raises(ConfigError, match="scheme 'q4_0' is unknown"):
        SavePlan.of(source, "int8", rules={"mlp": "q4_0"})
    with pytest.raises(ConfigError, match="--format 'marlin' is unknown; known are compressed-tensors, gptq, awq"):
        SavePlan.of(source, "int8", form="marlin")
    with pytest.raises(
        ConfigError, match=r"tensor 'model\.layers\.0\..*: 48 columns are not a multiple of int4's groups"
    ):
        SavePlan.of(source, "int4")
    with pytest.raises(ConfigError, match="--group-size does not go with fp8"):
        SavePlan.of(source, "fp8", group_size=16)
    with pytest.raises(ConfigError, match="must be a multiple of 16, or 0"):
        SavePlan.of(source, "int4", group_size=24)
    with pytest.raises(CheckpointError, match="no linear layer that would be quantized"):
        SavePlan.of(source, "int8", rules={".": "none"})


def test_families_with_names_of_their_own_are_not_written_as_gguf(tmp_path: Path) -> None:
    for name in ("phi3", "gpt2"):
        checkpoint = open_checkpoint(GOLDEN / name)
        with pytest.raises(CheckpointError, match="cannot be written as GGUF"):
            export_gguf(checkpoint, tmp_path / "model.gguf", scheme="q8_0")


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    plan = SavePlan.of(open_checkpoint(GOLDEN / "llama"), "int8")

    def fails() -> Any:
        yield Result("model.norm.weight", np.ones(32, np.float32), None)
        raise CheckpointError("stop")

    with pytest.raises(CheckpointError, match="stop"):
        export_folder(plan, tmp_path / "a", results=fails(), write_tokenizer=no_tokenizer, shard_bytes=1 << 30)
    with pytest.raises(CheckpointError, match="was not written"):
        export_folder(plan, tmp_path / "a", results=[], write_tokenizer=no_tokenizer, shard_bytes=1 << 30)
    assert not list(tmp_path.iterdir())


def test_only_models_are_replaced_and_only_when_asked(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "llama")
    target = tmp_path / "out"
    written(source, target, "int8", shard_bytes=20_000)
    (target / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        written(source, target, "int8")
    plan = SavePlan.of(source, "fp8")
    results = round_to_nearest(source.tensors, plan.layers)
    export_folder(plan, target, results=results, write_tokenizer=no_tokenizer, shard_bytes=1 << 30, replace=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "mine.txt"}
    assert open_checkpoint(target).tensors["model.layers.0.mlp.up_proj.weight"].type_name == "CT-FLOAT8"
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.txt").write_text("")
    for path, message in (
        (tmp_path / "papers", "not a model that could be replaced"),
        (target, "is what is read"),
        (tmp_path, "is what is read"),
        (tmp_path / "no" / "where", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_target(path, target / "model.safetensors", replace=True)
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", target, replace=False)


@pytest.mark.parametrize("exchange", [True, False])
def test_what_stands_there_is_one_whole_model_at_every_moment(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before each change to a folder; without an exchange of names there is a moment between two of them."""
    source, target = open_checkpoint(GOLDEN / "llama"), tmp_path / "out"
    written(source, target, "int8", shard_bytes=20_000)
    (target / "notes" / "deep").mkdir(parents=True)
    (target / "notes" / "deep" / "mine.txt").write_text("kept")
    (tmp_path / "link").symlink_to(target)
    seen: list[str] = []

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if target.exists():
                found = open_checkpoint(target)
                assert (target / "notes" / "deep" / "mine.txt").read_text() == "kept"
                assert all(tensor.read(F32) is not None for tensor in found.tensors.values())
                seen.append(found.tensors["model.layers.0.mlp.up_proj.weight"].type_name)
            return change(*args, **options)

        return call

    if not exchange:
        monkeypatch.setattr("llmjax.quantization.folder_export._exchange", lambda left, right: False)
    plan = SavePlan.of(source, "fp8")
    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "unlink", "rmdir", "link"):
            patched.setattr(os, name, watched(getattr(os, name)))
        results = round_to_nearest(source.tensors, plan.layers)
        link = tmp_path / "link"
        export_folder(plan, link, results=results, write_tokenizer=no_tokenizer, shard_bytes=1 << 30, replace=True)
    assert set(seen) == {"CT-INT8", "CT-FLOAT8"} and seen == sorted(seen, reverse=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "notes"}
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}


def test_what_is_copied_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    names = ["tokenizer.json", "tokenizer.model", "merges.txt", "LICENSE", "additional_chat_templates/rag.jinja"]
    for name in (*names, "config.json", "model.safetensors", "quantize_config.json"):
        (source / name).write_text(name)
    copy_companions(source, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == sorted(names) and (target / "merges.txt").read_text() == "merges.txt"


def test_numbers_of_gguf_are_json(tmp_path: Path) -> None:
    overrides = {"rms_norm_eps": np.float32(0.5), "eos_token_id": np.arange(2)}
    source = open_checkpoint(GOLDEN / "llama", overrides=overrides)
    written(source, tmp_path / "out", "int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["eos_token_id"]) == (0.5, [0, 1])
