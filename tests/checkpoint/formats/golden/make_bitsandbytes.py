"""Writes golden layers with the bitsandbytes package: run by hand, in an environment of its own.

    pip install bitsandbytes==0.50.2 torch==2.13.0 safetensors && python make_bitsandbytes.py

Each file holds the stored tensors of a layer ``model.layers.0.mlp.up_proj``, and what the package itself dequantizes
them to (``expected``).
"""

# mypy: ignore-errors

from pathlib import Path

import torch
from bitsandbytes import functional
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up_proj"
OUT, IN = 48, 128  # whole blocks a row: where they run on into the next, 0.50.2 dequantizes wrongly on CPUs
FOUR_BIT = {"nf4_nested": ("nf4", 64, True), "nf4": ("nf4", 128, False), "fp4_nested": ("fp4", 64, True)}


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN) * 0.05
    weight[0], weight[1, ::2], weight[2] = 0.0, -0.0, 1e4  # nothing, negative zeros, large
    files = {}
    for name, (kind, blocksize, nested) in FOUR_BIT.items():
        packed, state = functional.quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind
        )
        tensors = {f"{NAME}.weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        expected = functional.dequantize_4bit(packed, state)
        files[name] = tensors | {f"{NAME}.weight": packed, "expected": expected}
    codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    expected = functional.int8_vectorwise_dequant(codes, scales)
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    files["int8"] = {f"{NAME}.{part}": tensor for part, tensor in parts.items()} | {"expected": expected}
    for name, tensors in files.items():
        print(name, {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in tensors.items()})
        tensors = {part: tensor.contiguous().clone() for part, tensor in tensors.items()}
        save_file(tensors, Path(__file__).parent / "bitsandbytes" / f"{name}.safetensors")


if __name__ == "__main__":
    main()
