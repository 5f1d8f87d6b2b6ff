"""Writes golden layers with the packages that made such checkpoints: run by hand, in an environment of its own.

    pip install torch==2.13.0 transformers==5.23.0 accelerate scipy requests omegaconf pulp
    pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9 nvidia-modelopt==0.47.0
    python make_packers.py

Each file holds the tensors of a layer ``model.layers.0.mlp.up_proj``, and what the package itself makes of them
(``expected``, [out, in]); its metadata holds quantization_config. Marlin's own dequantization runs on a GPU alone:
there ``expected`` is the fake-quantized matrix that its packer was given.
"""

# mypy: ignore-errors

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

NAME = "model.layers.0.mlp.up_proj"


def without_init(*packages: str) -> None:
    """Makes packages importable module by module, where their __init__ asks for CUDA or for old versions of others."""
    for name in packages:
        parent, _, last = name.rpartition(".")
        roots = sys.modules[parent].__path__ if parent else find_spec(name).submodule_search_locations
        module = ModuleType(name)
        module.__path__ = [f"{root}/{last}" if parent else root for root in roots]
        sys.modules[name] = module


without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")

from auto_gptq.nn_modules.qlinear import qlinear_cuda, qlinear_marlin  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor  # noqa: E402
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize  # noqa: E402


def linear(outputs: int, inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.data = torch.randn(outputs, inputs) * 0.05
    return layer


def gptq(bits: int, group: int, *, symmetric: bool, act: bool):
    outputs, inputs = 32, 128
    size = inputs if group == -1 else group
    scales = ((torch.rand(outputs, inputs // size) + 0.5) * 0.3 / 2**bits).half().float()
    middle = torch.full(scales.shape, 2.0 ** (bits - 1))
    zeros = middle if symmetric else torch.randint(1, 2**bits, scales.shape).float()
    group_of = torch.arange(inputs) // size
    if act:
        group_of = group_of[torch.randperm(inputs)]
    # As GPTQ leaves the weights: each is one of the values that its group has.
    full = linear(outputs, inputs)
    of_column, zero = scales[:, group_of], zeros[:, group_of]
    codes = (full.weight.data / of_column + zero).round().clamp(0, 2**bits - 1)
    full.weight.data = (codes - zero) * of_column
    layer = qlinear_cuda.QuantLinear(bits, group, inputs, outputs, bias=False, weight_dtype=torch.float32)
    layer.autogptq_cuda_available = False
    layer.pack(full, scales, zeros, group_of.int())
    expected = layer(torch.eye(inputs)).T
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": symmetric}
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half(), "g_idx": layer.g_idx}
    return settings, parts, expected


def marlin(group: int):
    outputs, inputs = 64, 256
    size = inputs if group == -1 else group
    scales = ((torch.rand(outputs, inputs // size) + 0.5) * 0.02).half()
    codes = torch.randint(-8, 8, (outputs, inputs))
    full = linear(outputs, inputs)
    full.weight.data = codes.half() * scales.repeat_interleave(size, dim=1)
    packer = qlinear_marlin.QuantLinear
    layer = packer.__new__(packer)  # its __init__ asks for a GPU
    nn.Module.__init__(layer)
    layer.infeatures, layer.outfeatures, layer.group_size, layer.bias = inputs, outputs, size, None
    layer.register_buffer("B", torch.empty(inputs // 16, outputs * 2, dtype=torch.int32))
    layer.register_buffer("s", torch.empty(inputs // size, outputs, dtype=torch.half))
    layer.pack(full, scales)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False}
    return settings | {"checkpoint_format": "marlin"}, {"B": layer.B, "s": layer.s}, full.weight.data


def awq(group: int):
    outputs, inputs = 64, 128
    scales = ((torch.rand(inputs // group, outputs) + 0.5) * 0.02).half()
    zeros = torch.randint(0, 16, scales.shape)
    full = linear(outputs, inputs)
    wide, zero = (part.repeat_interleave(group, dim=0).T.float() for part in (scales, zeros))
    full.weight.data = ((full.weight.data / wide + zero).round().clamp(0, 15) - zero) * wide
    layer = WQLinear_GEMM.from_linear(full, 4, group, scales=scales.float(), zeros=zeros)
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return settings, {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}, expected


def fp8_blocks():
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(32, 64), scale_fmt="float"))
    made = Fp8Quantize(quantizer)._quantize_one("weight", linear(96, 128).weight.data)
    expected = Fp8Dequantize(quantizer)._dequantize_one(made["weight"], made["weight_scale_inv"])
    return settings, made, expected


def modelopt_fp8():
    made, scale = FP8QTensor.quantize(linear(64, 96).weight.data)
    settings = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}
    parts = {"weight": made._quantized_data, "weight_scale": scale.float().reshape(())}
    return settings, parts, made.dequantize(torch.float32, scale=scale)


def modelopt_nvfp4():
    made, scale, tensor_scale = NVFP4QTensor.quantize(linear(64, 96).weight.data, 16)
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "producer": {"name": "modelopt"}}
    parts = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": tensor_scale.reshape(())}
    expected = made.dequantize(torch.float32, scale=scale, double_scale=tensor_scale, block_sizes={-1: 16})
    return settings, parts, expected


LAYERS = {
    "gptq_4_bits": lambda: gptq(4, 32, symmetric=False, act=False),
    "gptq_4_bits_act_order": lambda: gptq(4, 32, symmetric=True, act=True),
    "gptq_3_bits": lambda: gptq(3, 64, symmetric=False, act=False),
    "gptq_8_bits_one_group": lambda: gptq(8, -1, symmetric=True, act=False),
    "marlin_groups": lambda: marlin(128),
    "marlin_one_group": lambda: marlin(-1),
    "awq": lambda: awq(32),
    "fp8_blocks": fp8_blocks,
    "modelopt_fp8": modelopt_fp8,
    "modelopt_nvfp4": modelopt_nvfp4,
}


def main() -> None:
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        settings, parts, expected = make()
        tensors = {f"{NAME}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        file = Path(__file__).parent / "packers" / f"{name}.safetensors"
        metadata = {"quantization_config": json.dumps(settings)}
        save_file(tensors | {"expected": expected.detach().contiguous()}, file, metadata=metadata)
        print(name, {part: (tuple(t.shape), t.dtype) for part, t in parts.items()}, expected.dtype)


if __name__ == "__main__":
    main()
