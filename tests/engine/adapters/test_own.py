"""A model's own adapter: prompts with pictures are computed with it, those without as if there were none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax import LoRARequest, SamplingParams
from llmjax.errors import CheckpointError
from llmjax.outputs import RequestOutput
from tests.checkpoints import SEEING
from tests.engine.test_images import check, engine_of, golden, prompt_of, scored

pytestmark = pytest.mark.jax_api

NAME, CASES = "phi4_multimodal", ("one", "none", "two")
FOLDER = SEEING / NAME
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def published(target: Path) -> Path:
    """The golden checkpoint as Microsoft's own code has it: both adapters among the weights, other names and keys."""
    shutil.copytree(FOLDER, target, ignore=shutil.ignore_patterns("vision-lora", "golden.npz"))
    config = json.loads((FOLDER / "config.json").read_text())
    config |= {
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "partial_rotary_factor": 0.75,
        "rope_theta": 1e4,
        "img_processor": None,
        "audio_processor": {"name": "cascades", "config": config.pop("audio_config")},
        "embd_layer": {
            "embedding_cls": "image_audio",
            "audio_embd_layer": {"embedding_cls": "audio"},
            "image_embd_layer": {
                "crop_size": 30,
                "embedding_cls": "tune_image",
                "hd_transform_order": "sub_glb",
                "image_token_compression_cls": "avg_pool_2d",
                "projection_cls": "mlp",
                "use_hd_transform": True,
                "with_learnable_separator": True,
            },
        },
        "vision_lora": {"dp": 0.0, "layer": "layers.*", "r": 5, "lora_alpha": 15},
        "speech_lora": {"dp": 0.01, "layer": "layers.*", "r": 3, "lora_alpha": 6},
    }
    config.pop("rope_parameters")
    (target / "config.json").write_text(json.dumps(config))
    (target / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 4})
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (target / file).write_text((FOLDER / file).read_text().replace("<|image|>", "<|endoftext10|>"))
    parts = {
        "img_projection_up": "img_projection.0",
        "img_projection_down": "img_projection.2",
        "sub_img_feature_extensor": "sub_GN",
        "global_img_feature_extensor": "glb_GN",
    }
    tensors = load_file(FOLDER / "model.safetensors")
    for old, new in parts.items():
        tensors = {name.replace(f".{old}", f".{new}"): tensor for name, tensor in tensors.items()}
    for name, tensor in load_file(FOLDER / "vision-lora" / "adapter_model.safetensors").items():
        plain = name.removeprefix("base_model.model.")
        module, part, kind = plain.rsplit(".", 2)
        tensors[f"{module}.{part}.vision.{kind}"] = tensor
        shape = (3, tensor.shape[1]) if part == "lora_A" else (tensor.shape[0], 3)
        tensors[f"{module}.{part}.speech.{kind}"] = np.ones(shape, np.float32)
        if f"{module}.{kind}" in tensors:
            tensors[f"{module}.base_layer.{kind}"] = tensors.pop(f"{module}.{kind}")
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("layout", ["converted", "published"])
def test_prompts_with_pictures_have_it_and_others_do_not(layout: str, compile_cache_dir: str, tmp_path: Path) -> None:
    """Side by side in the same steps, and one after another in the prefix cache."""
    folder = FOLDER if layout == "converted" else published(tmp_path / "model")
    llm = engine_of(NAME, compile_cache_dir, folder=folder, max_num_seqs=3)
    prompts = [prompt_of(NAME, case) for case in CASES]
    if layout == "published":
        prompts = [{**one, "prompt": one["prompt"].replace("<|image|>", "<|image_1|>")} for one in prompts]
    for _ in range(2):
        for case, output in zip(CASES, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert tokens_of(output) == golden(NAME)[f"{case}/continued"].tolist()
    for case, output in zip(CASES, llm.generate(prompts, scored(max_tokens=1), use_tqdm=False), strict=True):
        check(NAME, case, output, prompt=False)
        assert output.num_cached_tokens
    llm.close()


def test_an_adapter_that_a_request_names_takes_its_place(compile_cache_dir: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(FOLDER / "vision-lora", other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    llm = engine_of(NAME, compile_cache_dir, enable_lora=True, max_loras=2, max_lora_rank=2)
    prompts = [prompt_of(NAME, case) for case in ("one", "one", "none", "none")]
    asked = [LoRARequest("own", 1, str(FOLDER / "vision-lora")), LoRARequest("other", 2, str(other)), None, None]
    outputs = llm.generate(prompts, GREEDY, lora_request=asked, use_tqdm=False)
    assert tokens_of(outputs[0]) == golden(NAME)["one/continued"].tolist() != tokens_of(outputs[1])
    assert tokens_of(outputs[2]) == tokens_of(outputs[3]) == golden(NAME)["none/continued"].tolist()
    llm.close()


def test_a_model_without_the_files_reads_pictures_as_it_is(
    compile_cache_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("vision-lora"))
    llm = engine_of(NAME, compile_cache_dir, folder=folder)
    assert "prompts with pictures are computed without an adapter" in caplog.text
    assert llm.info.vision is not None and llm.info.vision.adapter is None
    (output,) = llm.generate([prompt_of(NAME, "one")], GREEDY, use_tqdm=False)
    assert tokens_of(output) != golden(NAME)["one/continued"].tolist()
    llm.close()


def test_what_does_not_go_with_it_is_said_at_the_start(compile_cache_dir: str, tmp_path: Path) -> None:
    folder, changes = published(tmp_path / "model"), {"vision_lora": {"r": 5, "lora_alpha": 15, "use_dora": True}}
    config = json.loads((folder / "config.json").read_text())
    for keys, problem in ((changes, "config.json: use_dora"), ({"vision_lora": None}, "config.json: vision_lora")):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        with pytest.raises(CheckpointError, match=problem):
            engine_of(NAME, compile_cache_dir, folder=folder)
