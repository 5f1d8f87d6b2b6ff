"""How long encoders of pictures take, beside transformers and llama.cpp, on this machine.

    python -m benchmarks.vision [--peer PYTHON] [--llama-cpp FOLDER] [--shapes smolvlm-256m clip-l-336] [--tiles 1 4]
        [--layers 4] [--rounds 5]

Encoders have random weights and the shapes of published ones; `--layers` cuts them short, as layers cost the same.
Tiles of a tower that has none are pictures. PYTHON is the interpreter of an environment with torch and transformers,
which get the same shapes, type and number of threads. FOLDER is a checkout of llama.cpp that is built in its folder
`build`; it gets SigLIP's towers, with weights in F16 and Q8_0. All take turns, and the fastest round counts. `cpu` is
the time of all processors together, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import this_machine
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import traced_for
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.functional import abstract_encoder, encode
from llmjax.models.vision.packing import pack
from llmjax.models.vision.registry import vision_spec_of
from llmjax.weights.memory import HugePages
from llmjax.weights.panels import in_panels, panels_help

WORKER = Path(__file__).parent / "engines" / "vision.py"
MTMD = Path(__file__).parent / "engines" / "mtmd.py"
MTMD_TYPES = ("F16", "Q8_0")
SIGLIP: Mapping[str, object] = {"architecture": "Idefics3ForConditionalGeneration", "scale_factor": 2}
# Of each tower the architecture and keys of its config.json, and vision_config with what published models have there.
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "smolvlm-256m": {
        **SIGLIP,
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
    },
    "so400m": {
        **SIGLIP,
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 364,
            "patch_size": 14,
        },
    },
    "clip-l-336": {
        "architecture": "LlavaForConditionalGeneration",
        "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
    },
    "qwen2.5-vl-3b": {
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "image_size": 504,
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "depth": 32,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
Encode = Callable[[], "Taken"]


@dataclass(frozen=True)
class Taken:
    """Seconds of an encoder's run: of the clock, and of all processors."""

    wall: float
    cpu: float


@dataclass(frozen=True, eq=False)
class Tiles:
    """A picture of some tiles with random values, as ``pack`` takes it."""

    patches: np.ndarray[Any, Any]
    grid: tuple[int, int, int]
    num_rows: int
    further: tuple[()] = ()
    sources: None = None
    shares: None = None
    unseen: None = None


def shortened(tower: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """The tower cut to a number of layers; None: it keeps all."""
    vision = dict(tower["vision_config"])
    if layers is not None:
        vision["depth" if "depth" in vision else "num_hidden_layers"] = layers
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [n for n in vision["fullatt_block_indexes"] if n < vision["depth"]]
    return {**tower, "vision_config": vision}


def side_of(tower: Mapping[str, Any]) -> int:
    """Patches along a side of a tile."""
    vision = tower["vision_config"]
    side: int = tower.get("image_size", vision.get("image_size")) // vision["patch_size"]
    return side


def ours(tower: Mapping[str, Any], tiles: int, dtype: str) -> Encode:
    """Our encoder with its projector, compiled, on random tiles."""
    rest = {key: value for key, value in tower.items() if key not in ("architecture", "image_size")}
    config = {"architectures": [tower["architecture"]], "text_config": {"hidden_size": 576}, **rest}
    spec = vision_spec_of(config)
    assert spec is not None
    library()
    graph, shapes = abstract_encoder(spec, dtype=jnp.dtype(dtype), activation_dtype=jnp.float32)
    rng = np.random.default_rng(0)
    memory = HugePages()
    weights: dict[str, Any] = {}
    for name, one in shapes.items():
        weights[name] = jnp.asarray(0.02 * rng.standard_normal(one.shape), one.dtype)
        if panels_help(name, one):
            weights[name] = in_panels(weights[name], memory)
    side = side_of(tower)
    values = rng.standard_normal((tiles, side**2, spec.patch_values)).astype(np.float32)
    if spec.tile is None:
        pictures = [Tiles(one, (1, side, side), side**2 // spec.side**2) for one in values]
    else:
        pictures = [Tiles(values.reshape(-1, spec.patch_values), (tiles, side, side), tiles * side**2 // spec.side**2)]
    batch = PatchBatch(**pack(spec, pictures, patches=tiles * side**2))  # type: ignore[arg-type]  # NumPy's arrays
    with traced_for("cpu"):
        program = jax.jit(lambda weights, batch: encode(graph, weights, batch).rows).lower(weights, batch).compile()

    def run() -> Taken:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(program(weights, batch))
        return Taken(time.perf_counter() - wall, time.process_time() - cpu)

    return run


class Peer:
    """Another's encoder in a process of its own; arguments after `dtype` are what the worker is told beside."""

    def __init__(
        self, python: str, tower: Mapping[str, Any], tiles: int, dtype: str, worker: Path = WORKER, **others: str
    ) -> None:
        own = {**tower, "side": side_of(tower), "tiles": tiles, "dtype": dtype, "threads": usable_cores()}
        self._name = worker.stem
        self._process = subprocess.Popen(
            [python, str(worker), json.dumps({**own, **others})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self) -> Taken:
        """One run; raises SystemExit if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return Taken(**json.loads(self._process.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self._name} has ended: does its environment have what it needs?") from None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(encoders: Mapping[str, Encode], rounds: int) -> dict[str, Taken]:
    """The fastest round of each encoder, wall and cpu apart; the first round warms up."""
    taken: dict[str, list[Taken]] = {name: [] for name in encoders}
    names = list(encoders)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            one = encoders[name]()
            if number:
                taken[name].append(one)
    return {name: Taken(min(t.wall for t in all_), min(t.cpu for t in all_)) for name, all_ in taken.items()}


def rows(label: str, best: Mapping[str, Taken]) -> list[str]:
    """Rows of the table: one for each encoder, with its time as a multiple of ours."""
    first = best["llmjax"]
    return [
        f"| {label} | {name} | {one.wall * 1e3:.0f} | {one.wall / first.wall:.2f}x | {one.cpu * 1e3:.0f} "
        f"| {one.cpu / first.cpu:.2f}x |"
        for name, one in best.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="an environment with torch and transformers")
    parser.add_argument("--llama-cpp", metavar="FOLDER", help="a checkout of llama.cpp, built in its folder build")
    parser.add_argument("--shapes", nargs="+", choices=TOWERS, default=list(TOWERS))
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 4], help="tiles at once")
    parser.add_argument("--layers", type=int, help="layers of each encoder; default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if min([*options.tiles, options.rounds, options.layers or 1]) < 1:
        parser.error("--tiles, --layers and --rounds must be at least 1")
    print(f"{this_machine()}, {options.dtype}\n")
    print("| encoder | engine | wall ms | of ours | cpu ms | of ours |\n|---|---|---|---|---|---|")
    for name in options.shapes:
        tower = shortened(TOWERS[name], options.layers)
        vision = tower["vision_config"]
        for tiles in options.tiles:
            peers = {"transformers": Peer(options.peer, tower, tiles, options.dtype)} if options.peer else {}
            for kind in MTMD_TYPES if options.llama_cpp and tower["architecture"] == SIGLIP["architecture"] else ():
                told = {"llama_cpp": options.llama_cpp}
                peers[f"llama.cpp {kind}"] = Peer(sys.executable, tower, tiles, kind, MTMD, **told)
            try:
                encoders: dict[str, Encode] = {"llmjax": ours(tower, tiles, options.dtype), **peers}
                label = f"{name}, {vision.get('depth', vision.get('num_hidden_layers'))} layers, {tiles} tiles"
                print("\n".join(rows(label, measure(encoders, options.rounds))), flush=True)
            finally:
                for peer in peers.values():
                    peer.close()


if __name__ == "__main__":
    sys.exit(main())
