"""PEFT folders that are not understood, and names that other programs write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.adapters.adapter import Adapter
from llmjax.adapters.peft_config import PeftConfig
from llmjax.adapters.read import AdapterReader
from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from tests.checkpoints import ADAPTERS, GOLDEN

Change = Callable[[dict[str, np.ndarray], dict[str, Any]], None]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def changed(folder: Path, change: Change, *, name: str = "plain") -> Path:
    """A golden adapter with other tensors or another configuration."""
    tensors = load_file(ADAPTERS / name / "adapter_model.safetensors")
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    change(tensors, config)
    save_file({key: np.ascontiguousarray(one) for key, one in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, *, base: str = "llama", rank: int = 16) -> Adapter:
    checkpoint = open_checkpoint(GOLDEN / base)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if len(tensor.shape) > 1}
    return AdapterReader(checkpoint, checkpoint.model_config(), shapes, rank).read(folder, "")


def keys(**new: Any) -> Change:
    return lambda tensors, config: config.update(new)


def tensor(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda tensors, config: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (keys(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (keys(alora_invocation_tokens=[1]), "alora_invocation_tokens is set, which is not supported"),
        (keys(use_qalora=True), "use_qalora is set"),
        (keys(layer_replication=[[0, 2], [1, 3]]), "layer_replication is set"),
        (keys(use_bdlora={"nblocks": 2}), "use_bdlora is set"),
        (keys(megatron_config={"x": 1}), "megatron_config is set"),
        (keys(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4': the adapter is for a base"),
        (keys(bias="some"), "bias is 'some', not one of none, all, lora_only"),
        (keys(r="4"), "r is '4', not a whole number above 0"),
        (keys(lora_alpha=float("inf")), "lora_alpha is inf, not a number"),
        (keys(use_dora="yes"), "use_dora is 'yes', neither true nor false"),
        (keys(rank_pattern={"(": 3}), "rank_pattern has '\\(', which is not a regular expression"),
        (keys(rank_pattern={"q_proj": 0}), "rank_pattern is 0, not a whole number above 0"),
        (keys(novel_method={"x": 1}), "novel_method is .*, and is not understood"),
        (keys(r=8), "has lora_A of rank 4 and lora_B of rank 4; adapter_config.json says 8"),
        (keys(use_dora=True), "use_dora without magnitudes"),
        (lambda tensors, config: tensors.pop(f"{Q}.lora_B.weight"), "q_proj.lora_B is missing, but"),
        (tensor(f"{Q}.lora_A.weight", lambda a: a[:, :-1]), "it is for another model"),
        (tensor(f"{Q}.lora_A.weight", lambda a: a * np.nan), "not a finite number"),
        (tensor(f"{Q}.lora_A.weight", lambda a: a[None]), "has shape \\[1, 4, 32\\]"),
        (
            lambda tensors, config: tensors.update({"base_model.model.lm_head.weight": np.ones((96, 32), np.float32)}),
            "lm_head.weight' is not understood",
        ),
        (
            lambda tensors, config: tensors.update({f"{Q}.lora_C.weight": np.ones((1, 1), np.float32)}),
            "q_proj.lora_C.weight' is not understood",
        ),
        (
            lambda tensors, config: tensors.update(
                {name.replace("q_proj", "z_proj"): one for name, one in list(tensors.items()) if name.startswith(Q)}
            ),
            "z_proj.weight has an adapter, but is not a matrix",
        ),
    ],
)
def test_what_is_not_understood_is_named(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(changed(tmp_path, change))


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has rank 4; max_lora_rank is 2"):
        read(ADAPTERS / "plain", rank=2)
    with pytest.raises(CheckpointError, match="but the model has no experts"):
        read(ADAPTERS / "qwen3-moe")
    grown = changed(
        tmp_path, tensor("base_model.model.lm_head.weight", lambda one: np.concatenate([one, one])), name="saved"
    )
    with pytest.raises(CheckpointError, match="adapters that change the vocabulary's size are not supported"):
        read(grown, rank=32)


def test_names_that_other_programs_write(tmp_path: Path) -> None:
    """Without PEFT's prefix, with the adapter's own name, and with that of compiled modules."""

    def rename(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        for name in list(tensors):
            own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            tensors[own.replace("layers.1.", "layers.1._orig_mod.")] = tensors.pop(name)

    found, expected = read(changed(tmp_path, rename)), read(ADAPTERS / "plain")
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        np.testing.assert_array_equal(found.parts[name].b, part.b)


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(
            {
                "r": 8,
                "lora_alpha": 4,
                "use_rslora": True,
                "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 4, "proj": 3},
                "alpha_pattern": {r"layers\.\d+\.mlp\..*": 16},
            }
        )
    )
    config = PeftConfig.read(tmp_path)
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.2.self_attn.q_proj") == 4
    assert config.rank_of("model.layers.2.self_attn.k_proj") == 8  # a pattern is all of a name's end
    assert config.scale_of("model.layers.0.mlp.up_proj") == 16 / 8**0.5
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 4 / 2**0.5


def test_replaced_rows_have_the_rank_of_their_number(tmp_path: Path) -> None:
    """A head of which two rows were trained is a change of rank two."""
    head = open_checkpoint(GOLDEN / "llama").tensors["lm_head.weight"].read(np.dtype(np.float32))

    def train(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        values = head.copy()
        values[[5, 70]] += 1
        tensors["base_model.model.lm_head.weight"] = values

    part = read(changed(tmp_path, train, name="saved")).parts["lm_head.weight"]
    assert part.rank == 2
    np.testing.assert_allclose(part.delta()[[5, 70]], 1, atol=1e-5)
    assert not part.delta()[:5].any()
