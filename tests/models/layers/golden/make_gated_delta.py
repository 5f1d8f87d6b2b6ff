"""Writes ``gated_delta.npz`` beside it: weights, inputs and outputs of Hugging Face's ``Qwen3NextGatedDeltaNet``.

Needs ``torch`` (CPU) and ``transformers``, which the tests do not:

    python tests/models/layers/golden/make_gated_delta.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from transformers import Qwen3NextConfig  # type: ignore[import-not-found,unused-ignore]
from transformers.models.qwen3_next.modeling_qwen3_next import (  # type: ignore[import-not-found,unused-ignore]
    Qwen3NextGatedDeltaNet,
)

TOKENS, SIZE = 23, 20


@torch.no_grad()
def main() -> None:
    config = Qwen3NextConfig(
        hidden_size=SIZE,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
    )
    module = Qwen3NextGatedDeltaNet(config, 0).float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        scale = 0.4 if parameter.ndim == 1 else 1.6 / parameter.shape[-1] ** 0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    x = torch.randn((TOKENS, SIZE), generator=generator)
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    np.savez_compressed(
        Path(__file__).with_name("gated_delta.npz"),
        allow_pickle=False,
        x=x.numpy(),
        y=module(x[None])[0].numpy(),
        **arrays,
    )


if __name__ == "__main__":
    main()
