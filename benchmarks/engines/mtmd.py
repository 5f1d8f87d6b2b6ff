"""llama.cpp's encoder of Idefics3 with random weights: ``python mtmd.py JOB``.

JOB is a JSON object: ``vision_config``, ``tiles``, ``dtype`` (F16, F32 or Q8_0), ``threads``, and
``llama_cpp``, a checkout of llama.cpp that is built in its folder ``build``. Writes files of an encoder and a text
model, compiles `mtmd_encoder.cc`, and becomes that program: each line of stdin is one run, and the answer is a line
with seconds (``wall``) and seconds of all processors (``cpu``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SOURCE = Path(__file__).with_name("mtmd_encoder.cc")
TEXT_SIZE = 576  # of SmolVLM-256M
# What Idefics3's prompts have around pictures.
TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "\n", "\n\n", "<s>", "</s>"]
RNG = np.random.default_rng(0)


def matrix(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Adds random weights; a row that Q8_0 cannot divide is F16, as llama.cpp's converter has it."""
    values = (0.02 * RNG.standard_normal(shape)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype if shape[-1] % 32 == 0 or dtype != "Q8_0" else "F16"]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def write_encoder(path: Path, config: Mapping[str, int], dtype: str) -> None:
    """Writes an encoder's file as llama.cpp's converter does for SmolVLM and Idefics3."""
    size, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    side = config["image_size"] // patch
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": config["image_size"],
        "patch_size": patch,
        "embedding_length": size,
        "feed_forward_length": inner,
        "projection_dim": TEXT_SIZE,
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "projector.scale_factor": 2,
        "preproc_image_size": config["image_size"],
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    matrix(writer, "v.patch_embd.weight", (size, 3, patch, patch), "F16")
    writer.add_tensor("v.patch_embd.bias", np.zeros(size, np.float32))
    matrix(writer, "v.position_embd.weight", (side**2, size), "F32")
    matrix(writer, "mm.model.fc.weight", (TEXT_SIZE, 4 * size), dtype)
    for norm in ("v.post_ln", *(f"v.blk.{n}.ln{k}" for n in range(config["num_hidden_layers"]) for k in (1, 2))):
        writer.add_tensor(f"{norm}.weight", np.ones(size, np.float32))
        writer.add_tensor(f"{norm}.bias", np.zeros(size, np.float32))
    shapes = {f"attn_{part}": (size, size) for part in ("q", "k", "v", "out")}
    for number in range(config["num_hidden_layers"]):
        for part, shape in {**shapes, "ffn_up": (inner, size), "ffn_down": (size, inner)}.items():
            matrix(writer, f"v.blk.{number}.{part}.weight", shape, dtype)
            writer.add_tensor(f"v.blk.{number}.{part}.bias", np.zeros(shape[0], np.float32))
    written(writer)


def write_text(path: Path) -> None:
    """Writes the smallest model that the encoder's rows go into: no time is spent in it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(TEXT_SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    letters = [chr(code) for code in range(33, 127)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*TOKENS, *letters])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(TOKENS) + [gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges(["a b"])
    size, inner = TEXT_SIZE, 64
    shapes = {"attn_q": (size, size), "attn_k": (size, size), "attn_v": (size, size), "attn_output": (size, size)}
    shapes |= {"ffn_gate": (inner, size), "ffn_up": (inner, size), "ffn_down": (size, inner)}
    for part, shape in shapes.items():
        matrix(writer, f"blk.0.{part}.weight", shape, "F32")
    matrix(writer, "token_embd.weight", (len(TOKENS) + len(letters), size), "F32")
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(size, np.float32))
    written(writer)


def written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compiled(llama_cpp: Path, program: Path) -> None:
    """Compiles the program against llama.cpp's libraries."""
    libraries = llama_cpp / "build" / "bin"
    headers = [f"-I{llama_cpp / part}" for part in ("include", "ggml/include", "tools/mtmd")]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lmtmd", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run(["c++", "-O2", "-std=c++17", *headers, str(SOURCE), "-o", str(program), *links], check=True)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(tempfile.mkdtemp(prefix="mtmd-"))
    model, encoder, program = folder / "text.gguf", folder / "mmproj.gguf", folder / "mtmd_encoder"
    write_text(model)
    write_encoder(encoder, job["vision_config"], job["dtype"])
    compiled(Path(job["llama_cpp"]), program)
    arguments = [model, encoder, job["vision_config"]["image_size"], job["tiles"], job["threads"]]
    os.execv(program, [str(program), *map(str, arguments)])


if __name__ == "__main__":
    main()
