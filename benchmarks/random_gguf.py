"""A GGUF file of a given shape and type with random weights and a real file's vocabulary, for comparing engines.

    python -m benchmarks.random_gguf OUTPUT.gguf --like FILE.gguf --shape 1.5b --type q4_k

All matrices are of the type, the embedding too, which is the head's as well. Speeds are those of a real model of that
shape; what it writes means nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from benchmarks.random_model import SHAPES, Shape

BLOCKS = 1 << 14  # random blocks, which every tensor repeats
Fill = Callable[[np.ndarray, float], None]


def _scales(places: Mapping[int, float]) -> Fill:
    """Fills in a block's float16 factors: at byte offsets, in parts of the weights' scale."""

    def fill(blocks: np.ndarray, scale: float) -> None:
        for offset, part in places.items():
            blocks[:, offset : offset + 2] = np.array([part * scale], np.float16).view(np.uint8)

    return fill


# What makes random bytes numbers of about the scale 1: the factors of a block, as ggml lays it out.
FACTORS: dict[str, Fill] = {
    "q4_0": _scales({0: 1 / 5}),  # d * (0 to 15, less 8)
    "q4_1": _scales({0: 1 / 5, 2: -1.5}),  # d * (0 to 15) + m
    "q5_0": _scales({0: 1 / 9}),  # d * (0 to 31, less 16)
    "q8_0": _scales({0: 1 / 74}),  # d * (-128 to 127)
    "q4_k": _scales({0: 1 / 200, 2: 7.5 / 200}),  # d * (0 to 63) * (0 to 15) - dmin * (0 to 63)
    "q6_k": _scales({208: 1 / 1300}),  # d * (-128 to 127) * (0 to 63, less 32)
}
TYPES = (*FACTORS, "f16", "bf16")
SHORT_ROWS = {"q4_k": "q5_0", "q6_k": "q8_0"}  # what llama.cpp takes where 256 does not divide a row


def write_random_gguf(
    path: Path, shape: Shape, *, type_name: str, like: Path | None = None, chat_template: str | None = None
) -> None:
    """Writes the file.

    Args:
        shape: shape of the model, except its vocabulary if it gets another's.
        type_name: one of `TYPES`.
        like: a GGUF file, whose tokenizer the new one gets; None: it has none.
        chat_template: instead of that file's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = {} if like is None else dict(gguf.GGUFReader(like).fields)
    if chat_template is not None:
        vocabulary.pop("tokenizer.chat_template", None)
    tokens = len(vocabulary["tokenizer.ggml.tokens"].data) if vocabulary else shape.vocab_size
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(tokens)
    for name, field in vocabulary.items():
        if name.startswith("tokenizer."):
            array = field.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    scale = shape.hidden_size**-0.5
    for hugging_face, sizes in shape.tensors().items():
        name = names.get_name(hugging_face, try_suffixes=(".weight",))
        assert name is not None
        if len(sizes) == 1:
            writer.add_tensor(name, np.ones(sizes, np.float32))
        else:
            size_out = tokens if hugging_face.startswith("model.embed_tokens") else sizes[0]
            kind = SHORT_ROWS.get(type_name, type_name) if sizes[1] % 256 else type_name
            rows = _random((size_out, sizes[1]), type_name=kind, scale=scale)
            writer.add_tensor(name, rows, raw_dtype=_kind(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def _kind(type_name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type_name.upper()]


def _random(sizes: tuple[int, int], *, type_name: str, scale: float) -> np.ndarray:
    """Rows of a matrix, as they are stored."""
    numbers, size = gguf.GGML_QUANT_SIZES[_kind(type_name)]
    if sizes[1] % numbers:
        raise ValueError(f"rows of {sizes[1]} numbers are not whole blocks of {numbers}, as {type_name} has them")
    random = np.random.default_rng(0)
    if type_name in FACTORS:
        block = random.integers(0, 256, (BLOCKS, size), np.uint8)
        FACTORS[type_name](block, scale)
    else:
        values = random.standard_normal((BLOCKS, numbers), np.float32) * scale
        block = gguf.quants.quantize(values, _kind(type_name)).reshape(BLOCKS, -1).view(np.uint8)
    return np.resize(block, (sizes[0], sizes[1] // numbers * size))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_gguf",
        description="Write a GGUF file with random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--like", type=Path, required=True, help="a GGUF file, whose tokenizer the new one gets")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", help="sizes of the model")
    parser.add_argument("--type", choices=TYPES, default="q4_k", help="of all matrices")
    parser.add_argument("--chat-template", type=Path, help="a file, whose template the new one gets (default: FILE's)")
    options = parser.parse_args(arguments)
    template = options.chat_template and options.chat_template.read_text()
    shape = SHAPES[options.shape]
    write_random_gguf(options.output, shape, type_name=options.type, like=options.like, chat_template=template)


if __name__ == "__main__":
    main(sys.argv[1:])
