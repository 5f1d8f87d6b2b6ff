"""Transformers' encoder of Idefics3 with random weights: ``python vision.py JOB``, without llmjax's packages.

JOB is a JSON object: ``config`` (keys of a vision_config), ``tiles``, ``dtype`` and ``threads``. Each line of stdin is
one run; the answer is a line with seconds (``wall``) and seconds of all processors (``cpu``).
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import Idefics3VisionConfig  # type: ignore[import-not-found,unused-ignore]
    from transformers.models.idefics3.modeling_idefics3 import (  # type: ignore[import-not-found,unused-ignore]
        Idefics3VisionTransformer,
    )

    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    config = Idefics3VisionConfig(hidden_act="gelu_pytorch_tanh", attn_implementation="sdpa", **job["config"])
    model = Idefics3VisionTransformer(config).to(dtype).eval()
    size = config.image_size
    pixels = torch.randn(job["tiles"], 3, size, size, dtype=dtype)
    for _ in sys.stdin:
        with torch.inference_mode():
            wall, cpu = time.perf_counter(), time.process_time()
            model(pixel_values=pixels)
            print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
