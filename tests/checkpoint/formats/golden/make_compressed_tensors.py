"""Writes golden layers with the compressed-tensors package: run by hand, in an environment of its own.

    pip install compressed-tensors==0.20.0 torch==2.13.0 && python make_compressed_tensors.py

Each file holds the compressed tensors of a layer ``model.layers.0.mlp.up_proj``, and what the package itself
decompresses them to (``expected``); its metadata holds quantization_config.
"""

# mypy: ignore-errors

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up_proj"
OUT, IN = 40, 128
INT = {"type": "int"}
FLOAT = {"type": "float", "num_bits": 8}

SCHEMES = {
    "w4_group": ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4_asym": ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
    "w4_channel": ("pack-quantized", INT | {"num_bits": 4, "strategy": "channel"}),
    "w4_tensor": ("pack-quantized", INT | {"num_bits": 4, "strategy": "tensor"}),
    "w8_group": ("pack-quantized", INT | {"num_bits": 8, "strategy": "group", "group_size": 128}),
    "w8_channel_asym": ("pack-quantized", INT | {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "w3_asym": ("pack-quantized", INT | {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}),
    "w2_group": ("pack-quantized", INT | {"num_bits": 2, "strategy": "group", "group_size": 32}),
    "w5_group": ("pack-quantized", INT | {"num_bits": 5, "strategy": "group", "group_size": 32}),
    "int8_channel": ("int-quantized", INT | {"num_bits": 8, "strategy": "channel"}),
    "int8_tensor_asym": ("int-quantized", INT | {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    "int8_group": ("int-quantized", INT | {"num_bits": 8, "strategy": "group", "group_size": 64}),
    "fp8_tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}),
    "fp8_channel": ("float-quantized", FLOAT | {"strategy": "channel"}),
    "fp8_block": ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [32, 64]}),
    "mxfp4": ("mxfp4-pack-quantized", {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}),
    "w7_asym": ("pack-quantized", INT | {"num_bits": 7, "strategy": "group", "group_size": 32, "symmetric": False}),
    "nvfp4": ("nvfp4-pack-quantized", {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
}


def scale_shape(args: QuantizationArgs) -> tuple[int, ...]:
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "channel":
        return (OUT, 1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        return (-(-OUT // rows), -(-IN // columns))
    return (OUT, IN // args.group_size)


def main() -> None:
    torch.manual_seed(0)
    for name, (form, settings) in SCHEMES.items():
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        weight = torch.randn(OUT, IN) * 0.05
        weight[0], weight[1, ::2], weight[2] = 0.0, -0.0, 1e4  # nothing, negative zeros, all clipped
        reach = 0.15 / (448 if form == "float-quantized" else 2 ** (args.num_bits - 1))
        scale = (torch.rand(scale_shape(args)) * reach + reach / 2).to(torch.bfloat16)
        if form == "mxfp4-pack-quantized":
            scale = torch.exp2(torch.randint(-9, -3, scale_shape(args))).to(torch.bfloat16)
        if form == "nvfp4-pack-quantized":
            scale = (torch.rand(scale_shape(args)) * 400 + 40).to(torch.float8_e4m3fn).float()
        state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale}
        if not args.symmetric:
            low = -(2 ** (args.num_bits - 1))
            state["weight_zero_point"] = torch.randint(low, -low, scale.shape, dtype=torch.int8)
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = torch.tensor([448 * 6 / 0.2])
        compressor = BaseCompressor.get_value_from_registry(form)
        compressed = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(compressed), scheme)["weight"]
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"]).to_dict()
        tensors = {f"{NAME}.{part}": tensor.contiguous() for part, tensor in compressed.items()}
        file = Path(__file__).parent / "compressed_tensors" / f"{name}.safetensors"
        metadata = {"quantization_config": json.dumps(config, default=str)}
        save_file(tensors | {"expected": expected.contiguous()}, file, metadata=metadata)
        print(name, {part: (tuple(t.shape), t.dtype) for part, t in compressed.items()}, expected.dtype)


if __name__ == "__main__":
    main()
