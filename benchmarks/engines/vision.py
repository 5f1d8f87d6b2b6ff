"""Transformers' encoders with random weights: ``python vision.py JOB``, without llmjax's packages.

JOB is a JSON object: ``architecture`` and ``vision_config`` as in config.json, ``side`` (patches along a tile's),
``tiles``, ``dtype`` and ``threads``. Each line of stdin is one run; the answer is a line with seconds (``wall``) and
seconds of all processors (``cpu``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def encoder(job: dict[str, Any], dtype: Any) -> tuple[Any, Callable[[Any], object]]:
    """The model, and what runs it."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # which encoders do not need
    config, tiles, side = job["vision_config"], job["tiles"], job["side"]
    if job["architecture"].startswith("Qwen2_5_VL"):
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (  # type: ignore[import-not-found,unused-ignore]
            Qwen2_5_VLVisionConfig,
        )
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (  # type: ignore[import-not-found,unused-ignore]
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        made = Qwen2_5_VLVisionConfig(attn_implementation="sdpa", **config)
        values = torch.randn(tiles * side**2, 3 * made.temporal_patch_size * made.patch_size**2, dtype=dtype)
        grid = torch.tensor([[1, side, side]] * tiles)
        return Qwen2_5_VisionTransformerPretrainedModel(made), lambda model: model(values, grid_thw=grid)
    pixels = torch.randn(tiles, 3, side * config["patch_size"], side * config["patch_size"], dtype=dtype)
    if config.get("model_type") == "clip_vision_model":
        from transformers import CLIPVisionConfig, CLIPVisionModel  # type: ignore[import-not-found,unused-ignore]

        return CLIPVisionModel(CLIPVisionConfig(attn_implementation="sdpa", **config)), lambda model: model(
            pixel_values=pixels
        )
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import (  # type: ignore[import-not-found,unused-ignore]
        Idefics3VisionTransformer,
    )

    made = Idefics3VisionConfig(hidden_act="gelu_pytorch_tanh", attn_implementation="sdpa", **config)
    return Idefics3VisionTransformer(made), lambda model: model(pixel_values=pixels)


def main() -> None:
    import torch

    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model, run = encoder(job, dtype)
    model = model.to(dtype).eval()
    for _ in sys.stdin:
        with torch.inference_mode():
            wall, cpu = time.perf_counter(), time.process_time()
            run(model)
            print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
