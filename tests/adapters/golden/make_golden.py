"""Writes the golden files beside it: random adapters and the f32 logits of PEFT's models with them.

Needs ``torch`` (CPU), ``transformers`` and ``peft``, none of which the tests need:

    python -m tests.adapters.golden.make_golden [name ...]

An archive an adapter, ``<name>.zip``, of a PEFT folder (``adapter_config.json``, ``adapter_model.safetensors``) and
``golden.npz``: ``tokens`` i64 [n], ``logits`` f32 [n, V] with the adapter as it is (of a classifier: [labels], of an
embedder the vector of the text), and
``merged``, with its matrices merged into the weights, where PEFT can do that. ``base.txt`` names the golden checkpoint
that it is for. Those of models that see are in ``seeing/``; their prompt is the case ``one`` of the checkpoint's own
golden file, with its picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import peft  # type: ignore[import-not-found,unused-ignore]
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import load_file, save_file

from tests.checkpoints import GOLDEN, POOLED, SEEING, pack

HERE = Path(__file__).parent
TOKENS = 21
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def logits_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits[0]


def last_vector(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The vector of a text: its last hidden state, of length one."""
    hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
    return hidden / hidden.norm()


def of_headless(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors as PEFT saves them of the model without its head, which embedders are trained as."""
    before = "base_model.model.model."
    return {name.replace(before, "base_model.model."): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Case:
    """An adapter.

    Attributes:
        base: name of a golden checkpoint.
        config: arguments of ``LoraConfig``.
        rewrite: changes the saved tensors and the configuration, into what other programs save.
        merges: whether PEFT merges the adapter into what it changes, and into nothing else, such as a tied head.
        sees: whether the base is one of the models that see.
        read: what the model makes of inputs.
    """

    base: str
    config: dict[str, Any] = field(default_factory=dict)
    rewrite: Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]] | None = None
    merges: bool = True
    sees: bool = False
    read: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor] = logits_of


def one_by_one(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of experts as they were before Transformers stacked experts: two for each matrix."""
    found = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            found[name] = tensor
            continue
        module, is_a = name[: name.index(".mlp.experts.")], ".lora_A." in name
        inner = ".base_layer." in name  # gate and up in PEFT's order here
        rank = config["r"]
        count = tensor.shape[0 if is_a else 1] // rank
        for expert in range(count):
            if is_a:
                one = tensor[expert * rank : (expert + 1) * rank]
            else:
                one = tensor.reshape(len(tensor), rank, count)[:, :, expert]
            end = f"lora_{'A' if is_a else 'B'}.weight"
            if not inner:
                found[f"{module}.mlp.experts.{expert}.down_proj.{end}"] = one
                continue
            halves = (one, one) if is_a else one.chunk(2)
            for projection, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                found[f"{module}.mlp.experts.{expert}.{projection}.{end}"] = half
    config["target_parameters"] = None
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def one_by_one_in_turn(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`one_by_one` where rows of gate and up take turns."""
    found = one_by_one(tensors, config)
    for name in [name for name in found if name.endswith("gate_proj.lora_B.weight")]:
        other = name.replace("gate_proj", "up_proj")
        whole = torch.cat((found[name], found[other]))
        found[name], found[other] = whole[0::2].contiguous(), whole[1::2].contiguous()
    return found


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS_ALONE = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "plain": Case("llama", {"target_modules": "all-linear"}),
    "other": Case("llama", {"target_modules": [*ATTENTION, "gate_proj"], "r": 3, "lora_alpha": 5}),
    "rslora": Case("llama", {"target_modules": ["up_proj", "down_proj"], "use_rslora": True}),
    "patterns": Case(
        "llama",
        {
            "target_modules": r".*\.layers\.\d\.self_attn\.(q|k)_proj|.*mlp\.up_proj",
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"self_attn\.[qk]_proj": 6},
            "alpha_pattern": {"up_proj": 16, "k_proj": 3},
        },
    ),
    "layers": Case("llama", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
    "dora": Case("llama", {"target_modules": "all-linear", "use_dora": True}),
    "biases": Case("llama-bias", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "lora-bias": Case("llama", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "embeddings": Case("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "scaled-embedding": Case("gemma2", {"target_modules": ["embed_tokens", "q_proj"]}, merges=False),
    "saved": Case("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "rows": Case("llama", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 17, 40]}),
    "tied-rows": Case("gemma2", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 17, 40]}),
    "gpt2": Case("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2-dora": Case("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "qwen2": Case("qwen2", {"target_modules": "all-linear"}),
    "qwen3": Case("qwen3", {"target_modules": "all-linear"}),
    "gemma3": Case("gemma3", {"target_modules": "all-linear"}),
    "gpt-neox": Case("gpt-neox", {"target_modules": "all-linear"}),
    "falcon": Case("falcon-40b", {"target_modules": "all-linear"}),
    "phi3": Case("phi3", {"target_modules": "all-linear"}),
    "opt": Case("opt", {"target_modules": "all-linear"}),
    "mamba2": Case("mamba2", {"target_modules": ["in_proj"]}),
    "qwen3-next": Case("qwen3-next", {"target_modules": "all-linear", "lora_alpha": 4}),
    "mixtral": Case("mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "qwen3-moe": Case("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3-moe-one-by-one": Case(
        "qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, rewrite=one_by_one
    ),
    "labels": Case("qwen2-labels", {"target_modules": ["q_proj", "up_proj"], "task_type": "SEQ_CLS"}),
    "deepseek": Case("deepseek-v2", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    "deepseek-latent": Case(
        "deepseek-v2", {"target_modules": ["kv_b_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]}
    ),
    "deepseek-latent-dora": Case("deepseek-v3", {"target_modules": ["kv_b_proj"], "use_dora": True}),
    "deepseek-latent-bias": Case("deepseek-v3", {"target_modules": ["kv_b_proj", "o_proj"], "lora_bias": True}),
    "gpt-oss": Case("gpt-oss", {"target_modules": [*ATTENTION], "target_parameters": EXPERTS}),
    "gpt-oss-one-by-one": Case(
        "gpt-oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, rewrite=one_by_one_in_turn
    ),
    "gemma": Case("gemma", {"target_modules": "all-linear"}),
    "embedder": Case(
        "qwen3-embedding", {"target_modules": "all-linear"}, rewrite=of_headless, read=last_vector, merges=False
    ),
    "qwen2_5-vl": Case("qwen2_5-vl", {"target_modules": "all-linear"}, sees=True),
    "qwen2_5-vl-patches": Case(
        "qwen2_5-vl", {"target_modules": ["proj", "qkv", "q_proj"], "use_rslora": True}, sees=True
    ),
    "idefics3": Case("idefics3", {"target_modules": "all-linear"}, sees=True),
    "gemma3-vision": Case("gemma3", {"target_modules": "all-linear"}, sees=True),
    "llava": Case("llava", {"target_modules": "all-linear"}, sees=True),
    "llava-dora": Case("llava", {"target_modules": ["linear_1", "fc1", "v_proj"], "use_dora": True}, sees=True),
    "llava-text": Case("llava", {"target_modules": r".*language_model.*\.(q|v)_proj"}, sees=True),
    "untied-embedding": Case("llama", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    "tied-embedding": Case(
        "gemma2", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, merges=False
    ),
    "tied-saved": Case(
        "gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
    "gpt2-rows": Case(
        "gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "trainable_token_indices": [3, 17, 40]}
    ),
    "head-rows": Case(
        "llama", {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [3, 17], "lm_head": [4]}}
    ),
    "granite-moe": Case("granite-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS_ALONE}),
    "jamba": Case("jamba", {"target_modules": ["q_proj", "in_proj"], "target_parameters": EXPERTS_ALONE}),
}


def main() -> None:
    for seed, (name, case) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(seed)
        model = adapted(case)
        inputs = inputs_of(case)
        with TemporaryDirectory() as temporary, torch.no_grad():
            folder = Path(temporary)
            save(model, case, folder)
            arrays = {"tokens": inputs["input_ids"][0].numpy(), "logits": case.read(model, inputs).numpy()}
            try:
                if not case.merges:
                    raise NotImplementedError("it would be merged into a tied head")
                merged = model.merge_and_unload()
                arrays["merged"] = case.read(merged, inputs).numpy()
            except (NotImplementedError, RuntimeError, ValueError) as error:
                print(name, "is not merged:", error)
            plain = case.read(model_of(case), inputs).numpy()
            print(name, "changes logits by up to", np.abs(plain - arrays["logits"]).max())
            np.savez(folder / "golden.npz", **arrays)
            (folder / "base.txt").write_text(case.base)
            pack(folder, (HERE if "pixel_values" not in inputs else HERE / "seeing") / f"{name}.zip")


def base_of(case: Case) -> Path:
    """The folder of the base."""
    roots = [SEEING] if case.sees else [GOLDEN, POOLED]
    return next(root / case.base for root in roots if (root / case.base).exists())


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    """What the model is given."""
    if not case.sees:
        return {"input_ids": torch.randint(3, 96, (1, TOKENS))}
    config = json.loads((base_of(case) / "config.json").read_text())
    with np.load(base_of(case) / "golden.npz") as golden:
        (number,) = golden["one/images"].tolist()
        tokens = torch.tensor(golden["one/tokens"].astype(np.int64))[None]
        inputs = {"input_ids": tokens, "pixel_values": torch.tensor(golden[f"image{number}/pixels"])}
        if f"image{number}/grid" in golden:
            inputs["image_grid_thw"] = torch.tensor(golden[f"image{number}/grid"].astype(np.int64))[None]
        of_image = (tokens == config.get("image_token_id", config.get("image_token_index"))).long()
        if config["model_type"] == "qwen2_5_vl":
            inputs["mm_token_type_ids"] = of_image
        if config["model_type"] == "gemma3":
            inputs["token_type_ids"] = of_image
    return inputs


def model_of(case: Case) -> torch.nn.Module:
    """The base, in f32."""
    folder = base_of(case)
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def adapted(case: Case) -> torch.nn.Module:
    """The base with a random adapter."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **case.config})
    model = peft.get_peft_model(model_of(case), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_A" in name or "lora_embedding_A" in name or "lora_B" in name or "lora_embedding_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save(model: torch.nn.Module, case: Case, folder: Path) -> None:
    """Writes the adapter as PEFT does, maybe rewritten."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    written = folder / "adapter_config.json"
    config = json.loads(written.read_text())
    config["base_model_name_or_path"] = case.base
    weights = folder / "adapter_model.safetensors"
    if case.rewrite is not None:
        tensors = case.rewrite(load_file(weights), config)
        save_file(tensors, weights, metadata={"format": "pt"})
    written.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
