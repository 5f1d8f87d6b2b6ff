"""What adapters cost: streams that each name one of several random ones, beside the same streams without.

    python -m benchmarks.adapters [--shape 0.5b] [--streams 16] [--adapters 8] [--rank 16] [--rounds 3]

One engine serves all, and both take turns, round after round. The table has medians of tokens a second while all
streams decode, and the longest step in which an adapter came to the device, beside the longest one without. Settings of
the engine are JSON: ``--settings '{"quantization": "q4k"}'``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import this_machine
from benchmarks.random_model import SHAPES, Shape, write_config
from llmjax import LLM, SamplingParams
from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.engine.core.request import EngineRequest

PROMPT = 16  # tokens


def write_adapter(folder: Path, shape: Shape, *, rank: int, seed: int) -> None:
    """Writes a PEFT folder with an adapter of every matrix in the layers but routers, those of experts one by one."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, size in shape.tensors().items():
        if ".layers." not in name or len(size) == 1 or name.endswith(".mlp.gate.weight"):
            continue
        before, experts, after = name.removesuffix(".weight").partition(".experts.")
        for stem in [f"{before}{experts}{i}.{after}" for i in range(size[0])] if experts else [before]:
            a = rng.random((rank, size[-1]), np.float32) * size[-1] ** -0.5
            tensors[f"base_model.model.{stem}.lora_A.weight"] = a
            tensors[f"base_model.model.{stem}.lora_B.weight"] = rng.random((size[-2], rank), np.float32) * 1e-3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


class Streams:
    """Streams of one engine.

    Args:
        count: number of streams.
        tokens: number of tokens that each makes.
    """

    def __init__(self, llm: LLM, *, count: int, tokens: int) -> None:
        self._engine, self._count, self._tokens, self._number = llm.engine, count, tokens, 0

    def run(self, adaptations: list[Adaptation | None]) -> tuple[float, float]:
        """Tokens a second while all streams decode, and the seconds of the longest step until then."""
        params = SamplingParams(temperature=0.0, max_tokens=self._tokens, ignore_eos=True)
        for i in range(self._count):
            self._number += 1
            self._engine.add(
                EngineRequest(
                    request_id=self._number,
                    prompt_token_ids=[7 + self._number % 97 + j for j in range(PROMPT)],
                    params=params,
                    max_tokens=self._tokens,
                    stop_token_ids=frozenset(),
                    adaptation=adaptations[i % len(adaptations)],
                )
            )
        begun: set[int] = set()
        made, started, longest = 0, 0.0, 0.0
        while self._engine.num_requests:
            at = time.perf_counter()
            outputs = self._engine.step()
            if len(begun) < self._count:
                begun |= {output.request_id for output in outputs}
                longest, started = max(longest, time.perf_counter() - at), time.perf_counter()
            else:
                made += sum(len(output.new_token_ids) for output in outputs)
        return made / (time.perf_counter() - started), longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_config(folder / "model", shape, max_position_embeddings=1024)
        named: list[Adaptation | None] = []
        for i in range(options.adapters):
            write_adapter(folder / str(i), shape, rank=options.rank, seed=i)
            reference = AdapterReference.read(str(i), folder / str(i), number=i + 1)
            named.append(Adaptation.of([ScaledAdapter(reference=reference)]))
        settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": options.streams,
            "auto_speculation": False,
            "enable_prefix_caching": False,
            "enable_lora": True,
            "max_loras": options.adapters,
            "max_lora_rank": options.rank,
            **options.settings,
        }
        llm = LLM(str(folder / "model"), **settings)
        llm.engine.runner.warm_up()
        streams = Streams(llm, count=options.streams, tokens=options.tokens)
        kinds: dict[str, list[Adaptation | None]] = {"without": [None], "with": named}
        first = {kind: streams.run(own)[1] for kind, own in kinds.items()}  # adapters come to the device
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, own in kinds.items():
                found[kind].append(streams.run(own)[0])
        llm.close()
    medians = {kind: statistics.median(rates) for kind, rates in found.items()}
    print(f"{this_machine()}: {options.shape}, {options.streams} streams, {options.adapters} adapters, {settings}")
    print("| adapters | tokens a second | share | longest step at first, ms |")
    print("|---|---:|---:|---:|")
    for kind, rate in medians.items():
        print(f"| {kind} | {rate:.1f} | {rate / medians['without']:.2f} | {1000 * first[kind]:.0f} |")


if __name__ == "__main__":
    main()
