"""Writes ``picture_vectors/``: tiny random models that make vectors of texts and of pictures, and what transformers'
models make.

Needs ``torch`` (CPU), ``transformers``, ``sentencepiece``, ``safetensors`` and ``tokenizers``, of which the tests need
the last three:

    python -m tests.engine.golden.make_picture_vectors [name ...]

An archive a checkpoint, ``<name>.zip``, of a folder in Hugging Face layout with a tokenizer and
``preprocessor_config.json``, and ``golden.npz``: pictures ``image<i>`` u8 [H, W, 3] with what the processor makes of
them, ``image<i>/pixels``, and their vectors, ``image<i>/vector`` f32; ``text<i>`` the UTF-8 of texts,
``text<i>/tokens`` their ids with padding, and ``text<i>/vector``. Vectors have length one.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sentencepiece
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from PIL import Image
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.checkpoints import pack
from tests.models.vision.golden.make_golden import pictures, randomize

HERE = Path(__file__).parent / "picture_vectors"
SENTENCE = "a cat sits and two dogs play on green grass while the photo of they dont know is made"
TEXTS = ["a cat", "A photo of TWO dogs; they don't play -- on grass!", "x"]
TEXT = {
    "vocab_size": 300,
    "hidden_size": 56,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "max_position_embeddings": 70,
}
VISION = {
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "image_size": 30,
    "patch_size": 6,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("CLIP", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 44}),
    "metaclip2": (
        "MetaClip2",
        {
            "text_config": {**TEXT, "eos_token_id": 1, "hidden_act": "gelu"},
            "vision_config": VISION,
            "projection_dim": 52,
        },
    ),
    "siglip": (
        "Siglip",
        {
            "text_config": {**TEXT, "max_position_embeddings": 24, "projection_size": 60},
            "vision_config": VISION,
        },
    ),
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CHECKPOINTS:
        with TemporaryDirectory() as folder:
            write(name, Path(folder))
            pack(Path(folder), HERE / f"{name}.zip")


def write(name: str, folder: Path) -> None:
    kind, keys = CHECKPOINTS[name]
    of_siglip = kind == "Siglip"
    tokenizer = siglip_tokenizer(folder) if of_siglip else clip_tokenizer()
    tokenizer.save_pretrained(folder)
    keys["text_config"] |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = getattr(transformers, f"{kind}Config")(**keys)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}Model")(config).float().eval()
    randomize(model, seed=sum(map(ord, name)))
    model.save_pretrained(folder)
    tensors = {key: value.to(torch.bfloat16) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    of_images = transformers.SiglipImageProcessorPil if of_siglip else transformers.CLIPImageProcessorPil
    side = {"height": 30, "width": 30}
    size = {"size": side} if of_siglip else {"size": {"shortest_edge": 30}, "crop_size": side}
    processor = of_images(**size)
    processor.save_pretrained(folder)
    arrays: dict[str, np.ndarray] = {}
    for number, picture in enumerate(pictures()):
        pixels = processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            vector = model.get_image_features(pixel_values=pixels).pooler_output[0]
        arrays |= {f"image{number}": picture, f"image{number}/pixels": pixels.numpy()}
        arrays[f"image{number}/vector"] = torch.nn.functional.normalize(vector, dim=0).numpy()
    length = {"padding": "max_length", "max_length": 24} if of_siglip else {}
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt", **length)["input_ids"]
        with torch.no_grad():
            vector = model.get_text_features(input_ids=ids).pooler_output[0]
        arrays[f"text{number}"] = np.frombuffer(text.encode(), np.uint8)
        arrays[f"text{number}/tokens"] = ids[0].numpy().astype(np.int32)
        arrays[f"text{number}/vector"] = torch.nn.functional.normalize(vector, dim=0).numpy()
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(name, sum(path.stat().st_size for path in folder.iterdir()))


def clip_tokenizer() -> Any:
    """Bytes in lower case between the two tokens that CLIP puts around texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<|startoftext|>": 256, "<|endoftext|>": 257}
    own = Tokenizer(models.BPE({**{letter: i for i, letter in enumerate(alphabet)}, **special}, []))
    own.normalizer = normalizers.Lowercase()
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    first, last = special.items()
    own.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A {last[0]}", special_tokens=[first, last])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=first[0], eos_token=last[0], pad_token=last[0]
    )


def siglip_tokenizer(folder: Path) -> Any:
    """A SentencePiece model whose ids of special tokens are those of the published one."""
    words = SENTENCE.split()
    sentences = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
    )
    (folder / "spiece.model").write_bytes(written.getvalue())
    tokenizer = transformers.SiglipTokenizer(str(folder / "spiece.model"))
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "SiglipTokenizer"
    return tokenizer


if __name__ == "__main__":
    main()
