"""Writes golden codes and scales with the compressed-tensors package: run by hand, in an environment of its own.

    pip install compressed-tensors==0.20.0 torch==2.13.0 && python make_uniform.py

`weight` f32 [out, in] and, for each scheme, `<scheme>.scale`, `<scheme>.code` and, if it has zero points,
`<scheme>.zero` as the package computes them. Weights are float16 numbers, from which the package computes float16
scales: those of groups without zero points.
"""

# mypy: ignore-errors

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT, IN = 24, 256
SCHEMES = {
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8_g128": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "int4_g64": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN) * 0.05
    weight[0], weight[1, ::2], weight[2, 7], weight[3] = 0.0, -0.0, 1e3, weight[3] * 1e-4
    weight[4] = torch.randint(-15, 16, (IN,)) / 2.0  # ties
    weight = weight.half().float()
    tensors = {"weight": weight}
    for name, settings in SCHEMES.items():
        args = QuantizationArgs(**settings, symmetric=True)
        grouped = (weight.half() if args.group_size else weight).reshape(OUT, -1, args.group_size or IN)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        dtype = torch.float8_e4m3fn if args.type == "float" else torch.int8
        tensors[f"{name}.code"] = quantize(weight, scale.float(), zero, args, dtype=dtype)
        tensors[f"{name}.scale"] = scale
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
    scale, zero = calculate_qparams(weight.min(), weight.max(), args)
    tensors["fp8_tensor.code"] = quantize(weight, scale, zero, args, dtype=torch.float8_e4m3fn)
    tensors["fp8_tensor.scale"] = scale.expand(OUT, 1)
    for bits in (4, 8):
        args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=64, symmetric=False)
        grouped = weight.reshape(OUT, -1, 64)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        tensors[f"int{bits}_asym.code"] = quantize(weight, scale, zero, args, dtype=torch.int8)
        tensors |= {f"int{bits}_asym.scale": scale, f"int{bits}_asym.zero": zero.to(torch.int8)}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, Path(__file__).parent / "uniform.safetensors"
    )


if __name__ == "__main__":
    main()
