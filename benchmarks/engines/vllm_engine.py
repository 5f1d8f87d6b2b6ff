"""vLLM on a CPU. It reads no GGUF there, so transformers turns the file into bfloat16 weights first, once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import vllm

from benchmarks.engines.interface import EngineOptions


class VLLMEngine:
    """Adapter. The engine runs in this process, without its own tokenizer; programs are compiled as by default."""

    def __init__(self, options: EngineOptions) -> None:
        folder = bfloat16_folder(Path(options.model), Path(options.work_dir))
        # vLLM's CPU settings are environment variables; this process is vLLM's alone.
        cores = sorted(os.sched_getaffinity(0))[: options.threads]  # left alone it keeps one core for its frontend
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._llm = vllm.LLM(
            str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=options.max_tokens,
            max_num_seqs=options.max_streams,
        )

    def details(self) -> dict[str, str]:
        return {"vllm": vllm.__version__, "torch": torch.__version__, "weights": "bfloat16 made of the file"}

    def warm_up(self) -> None:
        """Compiled while loading."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """The process ends."""


def bfloat16_folder(gguf: Path, work_dir: Path) -> Path:
    """The model as a Hugging Face folder of bfloat16 weights, made unless it is there."""
    stat = gguf.stat()
    name = hashlib.sha256(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = work_dir / f"{gguf.stem}-{name}"
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, GgufConfig

        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=plain
        )
        part = folder.with_name(folder.name + ".part")
        model.save_pretrained(part)
        part.rename(folder)
    return folder
