"""References to adapters, and digests of their content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter, digest_of
from llmjax.adapters.request import LoRARequest
from llmjax.errors import CheckpointError, InvalidRequest

pytestmark = pytest.mark.smoke


def write(folder: Path, *, rank: int = 2, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 4}))
    values = np.random.default_rng(seed).standard_normal((rank, 4), np.float32)
    save_file({"base_model.model.x.lora_A.weight": values}, str(folder / "adapter_model.safetensors"))
    return folder


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first = digest_of(write(tmp_path / "a"))
    assert len(first) == 64
    assert digest_of(write(tmp_path / "b")) == first
    assert digest_of(write(tmp_path / "b", seed=1)) != first  # other weights
    folder = write(tmp_path / "c")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    assert digest_of(folder) != first  # another scale
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    assert digest_of(tmp_path / "d.gguf") != first


def test_what_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not an adapter: it has no adapter_config\.json"):
        digest_of(tmp_path / "nowhere")
    folder = write(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is pickled, so save the adapter as safetensors"):
        digest_of(folder)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"give a PEFT folder, or a \.gguf file"):
        digest_of(tmp_path / "model.safetensors")


def test_a_file_beyond_all_bounds_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.gguf").open("wb") as file:
        file.truncate(9 * 2**30)  # without taking room
    with pytest.raises(CheckpointError, match="where 8589934592 are the most"):
        digest_of(tmp_path / "huge.gguf")


def reference(name: str) -> AdapterReference:
    return AdapterReference(name=name, path=f"/{name}", digest=name * 64, number=1)


def test_sums_are_told_apart_by_adapters_and_factors() -> None:
    a, b = reference("a"), reference("b")

    def digest(*parts: tuple[AdapterReference, float]) -> str:
        return Adaptation.of(ScaledAdapter(reference=one, scale=scale) for one, scale in parts).digest

    assert digest((a, 1.0)) == a.digest
    assert digest((a, 1.0), (b, 0.5)) == digest((b, 0.5), (a, 1.0))  # a sum
    assert digest((a, 1.0), (b, 0.0)) == a.digest  # it adds nothing
    assert (
        len({digest((a, 1.0)), digest((a, 0.5)), digest((a, -1.0)), digest((a, 1.0), (b, 1.0)), digest((b, 1.0))}) == 5
    )
    assert Adaptation.of([ScaledAdapter(reference=a, scale=0.0)]).parts == ()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("", 1, "/a"), "lora_name"),
        (("a", 0, "/a"), "lora_int_id"),
        (("a", True, "/a"), "lora_int_id"),
        (("a", "1", "/a"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
    ],
)
def test_wrong_requests(arguments: tuple[str, int, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoRARequest(*arguments)
    assert caught.value.field == field
