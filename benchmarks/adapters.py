"""What adapters cost: streams that each name one of several random ones, beside the same streams without.

    python -m benchmarks.adapters [--shape 0.5b] [--streams 16] [--adapters 8] [--rank 16] [--rounds 3]

One engine serves all, and both take turns, round after round. The table has medians of tokens a second while all
streams decode, and of prompts, as many as there are adapters; the same by seconds of all processors, which say more
where others use the machine; and the longest step in which an adapter came to the device, beside the longest one
without. Settings of the engine are JSON: ``--settings '{"quantization": "q4k"}'``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import this_machine
from benchmarks.random_model import SHAPES, Shape, write_config
from llmjax import LLM, SamplingParams
from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.engine.core.request import EngineRequest

PROMPT = 16  # tokens of a stream's
STREAMS, PROMPTS = "streams", "prompts"


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


@dataclass(frozen=True)
class Speed:
    """How fast tokens were computed."""

    rate: float  # tokens a second
    rate_of_processors: float  # tokens a second of all processors

    @classmethod
    def of(cls, tokens: int, seconds: Seconds) -> Speed:
        spent = seconds.until_now()
        return cls(tokens / spent.wall, tokens / spent.processors)


@dataclass(frozen=True)
class Seconds:
    """A time, by the clock and by what processors have done for this process."""

    wall: float
    processors: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Seconds:
        now = Seconds.now()
        return Seconds(now.wall - self.wall, now.processors - self.processors)


@dataclass(frozen=True)
class Speeds:
    """The medians of several rounds."""

    found: list[Speed]

    @property
    def rate(self) -> float:
        return statistics.median(speed.rate for speed in self.found)

    @property
    def of_processors(self) -> float:
        return statistics.median(speed.rate_of_processors for speed in self.found)


class Requests:
    """Requests to one engine."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self._number = llm.engine, 0

    def decode(self, adaptations: list[Adaptation | None], *, streams: int, tokens: int) -> tuple[Speed, float]:
        """The speed while all streams decode, and the seconds of the longest step until then.

        Args:
            streams: number of streams.
            tokens: number of tokens that each makes.
        """
        for i in range(streams):
            self._add(adaptations[i % len(adaptations)], prompt=PROMPT, tokens=tokens)
        begun: set[int] = set()
        made, started, longest = 0, Seconds.now(), 0.0
        while self._engine.num_requests:
            at = time.perf_counter()
            outputs = self._engine.step()
            if len(begun) < streams:
                begun |= {output.request_id for output in outputs}
                longest, started = max(longest, time.perf_counter() - at), Seconds.now()
            else:
                made += sum(len(output.new_token_ids) for output in outputs)
        return Speed.of(made, started), longest

    def read(self, adaptations: list[Adaptation | None], *, prompts: int, length: int) -> Speed:
        """The speed of prompts, one after the other."""
        started = Seconds.now()
        for i in range(prompts):
            self._add(adaptations[i % len(adaptations)], prompt=length, tokens=1)
            while self._engine.num_requests:
                self._engine.step()
        return Speed.of(prompts * length, started)

    def _add(self, adaptation: Adaptation | None, *, prompt: int, tokens: int) -> None:
        self._number += 1
        self._engine.add(
            EngineRequest(
                request_id=self._number,
                prompt_token_ids=[7 + self._number % 97 + j for j in range(prompt)],
                params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
                max_tokens=tokens,
                stop_token_ids=frozenset(),
                adaptation=adaptation,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts that are timed")
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
        requests = Requests(llm)
        kinds: dict[str, list[Adaptation | None]] = {"without": [None], "with": named}
        sizes = {"streams": options.streams, "tokens": options.tokens}
        first = {kind: requests.decode(own, **sizes)[1] for kind, own in kinds.items()}  # adapters come to the device
        found: dict[tuple[str, str], list[Speed]] = {}
        for _ in range(options.rounds):
            for kind, own in kinds.items():
                found.setdefault((STREAMS, kind), []).append(requests.decode(own, **sizes)[0])
                read = requests.read(own, prompts=options.adapters, length=options.prompt)
                found.setdefault((PROMPTS, kind), []).append(read)
        llm.close()
    print(f"{this_machine()}: {options.shape}, {options.streams} streams, {options.adapters} adapters, {settings}")
    print("| | tokens a second without | with | share | by processors' seconds | longest step at first, ms |")
    print("|---|---:|---:|---:|---:|---:|")
    for what in (STREAMS, PROMPTS):
        without, with_them = (Speeds(found[what, kind]) for kind in kinds)
        shares = f"{with_them.rate / without.rate:.2f} | {with_them.of_processors / without.of_processors:.2f}"
        steps = f"{1000 * first['without']:.0f}, {1000 * first['with']:.0f}" if what == STREAMS else ""
        print(f"| {what} | {without.rate:.1f} | {with_them.rate:.1f} | {shares} | {steps} |")


if __name__ == "__main__":
    main()
