"""Writes the golden files in ``llama_cpp/``: what llama.cpp's server computes with adapters that it has converted.

Needs what ``make_golden`` does, a checkout of llama.cpp, and its ``llama-server``:

    python -m tests.adapters.golden.make_llama_cpp CHECKOUT SERVER [name ...]

Base and adapter are golden checkpoints and golden PEFT folders, which llama.cpp's own converters write as GGUF in f32;
the base gets a vocabulary of made-up pieces, as prompts are ids. (Of other families the converters refuse the golden
checkpoints, or the server computes with other settings, and it ends at adapters of an embedding that is the head.)
An archive is ``<name>.zip``, of ``adapter.gguf`` and ``golden.npz``: ``tokens`` i32 [n], a prompt and what the server
generates greedily, ``prompt`` i32 [], the length of the first, and ``logprobs`` f32 [n - prompt, V] of each token that
it generated. ``base.txt`` names the golden checkpoint, and ``scale.txt`` is the factor that the server was given for
the adapter.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.checkpoints import ADAPTERS, GOLDEN, pack

HERE = Path(__file__).parent / "llama_cpp"
VOCAB = 96


@dataclass(frozen=True)
class Case:
    """A golden adapter, and how it is asked.

    Attributes:
        scale: the factor of what it adds.
        prompt, generated: how many tokens; together no more than a window has, which llama.cpp may not know of.
    """

    adapter: str
    scale: float = 1.0
    prompt: int = 13
    generated: int = 8


CASES = {
    "llama": Case("plain"),
    "llama-half": Case("other", scale=0.5),
    "qwen2": Case("qwen2", prompt=4, generated=6),
    "qwen3": Case("qwen3"),
    "gemma": Case("gemma"),
    "qwen3-moe-one-by-one": Case("qwen3-moe-one-by-one"),
}


def main() -> None:
    checkout, server, *names = sys.argv[1:]
    sys.path[:0] = [checkout, f"{checkout}/gguf-py"]
    for seed, (name, case) in enumerate(CASES.items()):
        if names and name not in names:
            continue
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "golden"
            folder.mkdir()
            source = ADAPTERS / case.adapter
            base = (source / "base.txt").read_text()
            model, whole = Path(temporary) / "base.gguf", Path(temporary) / "base"
            shutil.copytree(GOLDEN / base, whole)
            vocab = {f"t{number}": number for number in range(VOCAB)}  # of which some converters read the size alone
            (whole / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
            write_base(whole, model)
            convert = [sys.executable, f"{checkout}/convert_lora_to_gguf.py", "--base", str(whole)]
            written = ["--outtype", "f32", "--outfile", str(folder / "adapter.gguf"), str(source)]
            subprocess.run([*convert, *written], check=True)
            prompt = np.random.default_rng(seed).integers(3, VOCAB, case.prompt).tolist()
            np.savez_compressed(
                folder / "golden.npz", allow_pickle=False, **served(server, model, folder, prompt, case)
            )
            (folder / "base.txt").write_text(base)
            (folder / "scale.txt").write_text(str(case.scale))
            pack(folder, HERE / f"{name}.zip")


def write_base(folder: Path, path: Path) -> None:
    """Has llama.cpp's converter write a checkpoint, with a vocabulary of made-up pieces."""
    import gguf  # type: ignore[import-not-found,unused-ignore]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # type: ignore[import-not-found,unused-ignore]

    hparams = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))

    class Base(kind):  # type: ignore[misc,valid-type]
        model_arch = kind.model_arch

        def set_vocab(self) -> None:
            writer = self.gguf_writer
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{number}".encode() for number in range(3, VOCAB))])
            writer.add_token_scores([-float(number) for number in range(VOCAB)])
            writer.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])

    Base(folder, gguf.LlamaFileType.ALL_F32, path, hparams=hparams).write()


def served(server: str, model: Path, folder: Path, prompt: list[int], case: Case) -> dict[str, Any]:
    """What the server says of a prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    adapter = f"{folder / 'adapter.gguf'}:{case.scale}"
    options = ["--lora-scaled", adapter, "--port", port, "--host", "127.0.0.1", "--threads", "1", "--ctx-size", "64"]
    exact = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-warmup", "--parallel", "1"]
    process = subprocess.Popen([server, "-m", str(model), *options, *exact], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "listening on http" in line:
                break
        else:
            raise RuntimeError("".join(log[-30:]))
        asked = {"prompt": prompt, "n_predict": case.generated, "temperature": 0, "n_probs": VOCAB, "ignore_eos": True}
        data = json.dumps({**asked, "samplers": ["temperature"], "return_tokens": True, "cache_prompt": False}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)
    finally:
        process.kill()
        process.communicate()
    logprobs = np.full((case.generated, VOCAB), -np.inf, np.float32)
    for row, step in zip(logprobs, said["completion_probabilities"], strict=True):
        for entry in step["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    tokens = np.array([*prompt, *said["tokens"]], np.int32)
    print(case.adapter, said["tokens"], float(logprobs.max()), int(np.isfinite(logprobs).sum()))
    return {"tokens": tokens, "prompt": np.int32(len(prompt)), "logprobs": logprobs}


if __name__ == "__main__":
    main()
