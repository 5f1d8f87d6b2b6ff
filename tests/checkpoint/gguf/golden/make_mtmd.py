"""Writes the golden files beside it: what llama.cpp makes of the golden checkpoints of models that see.

    python -m tests.checkpoint.gguf.golden.make_mtmd LLAMA_CPP BUILD [name ...]

LLAMA_CPP is a checkout of llama.cpp and BUILD a folder in which it is built, with ``libmtmd`` and ``libllama`` in
``bin``; needs ``torch`` and ``transformers``, and a C++ compiler. Its converter writes text model and encoder in f32, a
program against its libraries (``mtmd_rows.cpp``) computes a picture's feature rows from them, in f32 and without flash
attention, and an archive ``<name>.npz`` keeps what the tests compare:

* ``keys``: JSON, the metadata of the encoder's file as the converter wrote it
* ``tensors``: JSON, each tensor's shape and the CRC-32 of its f32 values
* ``count``: the number of the picture's feature rows
* ``rows``: f32, every `STEP`-th number of all rows, and ``scale``, the largest number of them
* ``tokens``: the prompt's tokens as llama.cpp has them, with -1 in the place of each feature row
* ``next``: the tokens that it writes greedily after that, where the text model is the checkpoint's own
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.checkpoint.gguf.golden.mtmd_cases import CASES, HERE, STEP, Case, picture
from tests.checkpoints import SEEING

# The tokenizers of the golden checkpoints are none that the converter knows, and it has too few names for Llama 4's
# projector where an encoder has two layers.
CONVERT = """
import sys
sys.modules["torchvision"] = None
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base as base
import gguf
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
named = gguf.get_tensor_name_map
gguf.get_tensor_name_map = lambda arch, blocks: named(arch, max(blocks, 4))
import convert_hf_to_gguf
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""


def as_published(name: str, case: Case, folder: Path) -> None:
    """Writes a golden checkpoint with the names and keys of published ones."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from safetensors.torch import load_file, save_file

    shutil.copytree(SEEING / name, folder)
    path = folder / "model.safetensors"
    tensors = {}
    for own, values in load_file(path).items():
        start = next((start for start in case.renamed if own.startswith(start)), "")
        if case.table is not None and own.endswith(("pos_emb.weight", "position_embedding_table")):
            values = torch.tensor(case.table.changed(values.float().numpy())).to(values.dtype)
        tensors[case.renamed.get(start, "") + own.removeprefix(start)] = values
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **case.whole, "vision_config": {**config["vision_config"], **case.vision}}
    (folder / "config.json").write_text(json.dumps(config))


def stand_in(name: str, folder: Path) -> None:
    """Writes a Llama with the checkpoint's vocabulary and width: feature rows do not depend on the text model."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import transformers  # type: ignore[import-not-found,unused-ignore]

    config = json.loads((SEEING / name / "config.json").read_text())
    text = config.get("text_config", config)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    ).save_pretrained(folder)
    for extra in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SEEING / name / extra, folder)


def convert(llama_cpp: Path, folder: Path, path: Path, *options: str) -> None:
    command = [sys.executable, "-c", CONVERT, str(llama_cpp), str(folder), "--outtype", "f32", "--outfile", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    if done.returncode or not path.exists():
        raise SystemExit(f"{folder.name}: the converter fails:\n{done.stderr[-2000:]}")


def contents(llama_cpp: Path, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a file, and the shape and checksum of each tensor."""
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general."))}
    tensors = {
        each.name: [[int(size) for size in reversed(each.shape)], zlib.crc32(each.data.astype(np.float32).tobytes())]
        for each in reader.tensors
    }
    return keys, tensors


def run(program: Path, model: Path, encoder: Path, image: np.ndarray, prompt: str, count: int) -> dict[str, Any]:
    """The program's answer: ``tokens``, ``next`` and ``rows``."""
    pixels, out = model.with_name("picture"), model.with_name("rows")
    pixels.write_bytes(image.tobytes())
    height, width, _ = image.shape
    arguments = [model, encoder, pixels, width, height, prompt, count, out]
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{encoder.name}: {done.stderr[-3000:]}")
    found: dict[str, Any] = {"tokens": [], "next": []}
    for kind, *numbers in map(str.split, done.stdout.splitlines()):
        if kind == "text":
            found["tokens"] += map(int, numbers)
        elif kind == "image":
            found["tokens"] += [-1] * int(numbers[0])
        elif kind == "width":
            found["rows"] = np.fromfile(out, np.float32).reshape(-1, int(numbers[0]))
        elif kind == "next":
            found["next"] = list(map(int, numbers))
    return found


def compiled(llama_cpp: Path, build: Path, folder: Path) -> Path:
    program, libraries = folder / "mtmd_rows", build / "bin"
    headers = [f"-I{llama_cpp / part}" for part in ("include", "ggml/include", "tools/mtmd")]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lmtmd", "-lllama", "-lggml", "-lggml-base"]
    command = ["c++", "-O1", "-std=c++17", *headers, str(HERE / "mtmd_rows.cpp"), "-o", str(program), *links]
    subprocess.run(command, check=True)
    return program


def make(name: str, llama_cpp: Path, program: Path, folder: Path) -> None:
    case = CASES[name]
    as_published(name, case, folder / name)
    model, encoder = folder / "model.gguf", folder / "mmproj.gguf"
    text = folder / name
    if not case.text:
        text = folder / f"{name}-text"
        stand_in(name, text)
    convert(llama_cpp, text, model)
    if case.converted:
        convert(llama_cpp, folder / name, encoder, "--mmproj")
    else:
        from tests.checkpoint.gguf.encoder_files import written

        written(name, encoder)
    keys, tensors = contents(llama_cpp, encoder)
    with np.load(SEEING / name / "golden.npz") as golden:
        image = picture(golden["image2"], case)
    found = run(program, model, encoder, image, "One: <__media__> what?\n", 32 if case.text else 0)
    rows = found["rows"]
    np.savez_compressed(
        HERE / f"{name}.npz",
        keys=np.frombuffer(json.dumps(keys).encode(), np.uint8),
        tensors=np.frombuffer(json.dumps(tensors).encode(), np.uint8),
        count=np.int32(len(rows)),
        rows=rows.reshape(-1)[::STEP],
        scale=np.abs(rows).max(),
        tokens=np.array(found["tokens"], np.int32),
        next=np.array(found["next"], np.int32),
    )
    print(name, len(rows), "rows, at most", np.abs(rows).max(), found["tokens"], found["next"], flush=True)


def main() -> None:
    llama_cpp, build, *names = sys.argv[1:]
    with TemporaryDirectory() as folder:
        program = compiled(Path(llama_cpp), Path(build), Path(folder))
        for name in names or CASES:
            own = Path(folder) / f"{name}.d"
            own.mkdir()
            make(name, Path(llama_cpp), program, own)


if __name__ == "__main__":
    main()
