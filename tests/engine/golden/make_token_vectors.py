"""Writes ``token_vectors/``: tiny random models that make a vector of each token, and what transformers' models make.

Needs ``torch`` (CPU), ``transformers``, ``safetensors`` and ``tokenizers``, of which the tests need the last two:

    python -m tests.engine.golden.make_token_vectors [name ...]

An archive a checkpoint, ``<name>.zip``, of a folder in Hugging Face layout with a tokenizer, and the processor's files
where it sees; and ``golden.npz``: ``query<i>`` and ``document<i>``, the UTF-8 of texts, or a picture u8 [H, W, 3], of
each ``…/tokens`` its ids and ``…/vectors`` f32 [n, size] of length one; and ``scores`` f32 [queries, documents].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from PIL import Image
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tests.checkpoints import pack
from tests.models.vision.golden import make_golden as seeing

HERE = Path(__file__).parent / "token_vectors"
QUERIES = ["w7 w9 w11", "w5"]
DOCUMENTS = ["w20 w9 w31 w40 w41 w42 w43", "w11 w7", "w30 w31 w32 w33 w34 w35 w36 w37 w38 w39 w7 w9 w11 w50"]
VOCAB = 96
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[Q] ", "[D] "]
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "max_position_embeddings": 64,
}
MODERN = {
    **ENCODER,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZE = 36  # of a vector
ASKED = ["What is on the page?", "7 cats"]


def main() -> None:
    HERE.mkdir(exist_ok=True)
    makers = {"colbert": colbert, "pylate": pylate, "colpali": colpali, "colqwen2": colqwen2}
    for name in sys.argv[1:] or makers:
        with TemporaryDirectory() as folder:
            arrays = makers[name](Path(folder))
            np.savez_compressed(Path(folder) / "golden.npz", **arrays)
            pack(Path(folder), HERE / f"{name}.zip")
        print(name, {key: value.shape for key, value in arrays.items()})


def colbert(folder: Path) -> dict[str, np.ndarray]:
    """ColBERT in its own layout: BERT, a matrix without a bias, and a file that names the marks of texts."""
    model = _drawn(transformers.BertModel(transformers.BertConfig(**ENCODER)), seed=1)
    matrix = torch.randn(SIZE, 56, generator=torch.Generator().manual_seed(2)).bfloat16().float() / 4
    tensors = {f"bert.{name}": value for name, value in model.state_dict().items()} | {"linear.weight": matrix}
    _save(folder, {**model.config.to_dict(), "architectures": ["HF_ColBERT"]}, tensors)
    marks = {"query_token_id": "[Q] ", "doc_token_id": "[D] ", "dim": SIZE, "attend_to_mask_tokens": False}
    (folder / "artifact.metadata").write_text(json.dumps(marks))
    return _of_texts(model, matrix, word_tokenizer(folder))


def pylate(folder: Path) -> dict[str, np.ndarray]:
    """ModernBERT with PyLate's files: a matrix in a folder of its own, and marks among its settings."""
    config = transformers.ModernBertConfig(**MODERN)
    config._attn_implementation = "eager"
    model = _drawn(transformers.ModernBertModel(config), seed=3)
    matrix = torch.randn(SIZE, 56, generator=torch.Generator().manual_seed(4)).bfloat16().float() / 4
    _save(folder, {**model.config.to_dict(), "architectures": ["ModernBertModel"]}, model.state_dict())
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": matrix.bfloat16()}, folder / "1_Dense" / "model.safetensors", {"format": "pt"})
    dense = {
        "in_features": 56,
        "out_features": SIZE,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"prompts": {}, "default_prompt_name": None, "query_prefix": "[Q] ", "document_prefix": "[D] "}
    lengths = {"query_length": 32, "document_length": 60, "attend_to_expansion_tokens": False}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**settings, **lengths}))
    return _of_texts(model, matrix, word_tokenizer(folder))


def word_tokenizer(folder: Path) -> Tokenizer:
    """Words between [CLS] and [SEP]: ``w17`` is token 17."""
    special = {token: number for number, token in enumerate(SPECIAL)}
    words = {f"w{number}": number for number in range(len(special), VOCAB)}
    own = Tokenizer(models.WordLevel({**special, **words}, unk_token="[PAD]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens([AddedToken(token, special=True) for token in special])
    ends = [(token, special[token]) for token in ("[CLS]", "[SEP]")]
    own.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return own


def _of_texts(model: torch.nn.Module, matrix: torch.Tensor, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Texts with their marks after the first token, as ColBERT and PyLate have them."""
    arrays: dict[str, np.ndarray] = {}
    vectors: dict[str, list[torch.Tensor]] = {"query": [], "document": []}
    for kind, mark, texts in (("query", "[Q] ", QUERIES), ("document", "[D] ", DOCUMENTS)):
        for number, text in enumerate(texts):
            ids = tokenizer.encode(text).ids
            ids.insert(1, tokenizer.token_to_id(mark))
            with torch.no_grad():
                hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            made = torch.nn.functional.normalize(hidden @ matrix.T, dim=-1)
            vectors[kind].append(made)
            arrays[f"{kind}{number}"] = np.frombuffer(text.encode(), np.uint8)
            arrays[f"{kind}{number}/tokens"] = np.array(ids, np.int32)
            arrays[f"{kind}{number}/vectors"] = made.numpy()
    scores = [[(query @ one.T).max(1).values.sum() for one in vectors["document"]] for query in vectors["query"]]
    return {**arrays, "scores": np.array(scores, np.float32)}


def colpali(folder: Path) -> dict[str, np.ndarray]:
    """PaliGemma whose tokens all see each other, in queries too."""
    return _seeing(folder, "paligemma", "ColPali")


def colqwen2(folder: Path) -> dict[str, np.ndarray]:
    """Qwen2-VL. Its tokens have positions on three axes, as in the makers' own code; transformers' class takes them."""
    return _seeing(folder, "qwen2-vl", "ColQwen2")


@torch.no_grad()
def _seeing(folder: Path, inner: str, kind: str) -> dict[str, np.ndarray]:
    checkpoint = seeing.CHECKPOINTS[inner]()
    of_qwen = kind == "ColQwen2"
    if of_qwen:
        checkpoint.tokens.extend(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    vlm_config = getattr(transformers, f"{'Qwen2VL' if of_qwen else 'PaliGemma'}Config")(**checkpoint.config)
    config = getattr(transformers, f"{kind}Config")(vlm_config=vlm_config, embedding_dim=SIZE)
    config._attn_implementation = vlm_config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForRetrieval")(config).float().eval()
    seeing.randomize(model, seed=sum(map(ord, kind)))
    if not of_qwen:  # whose norms multiply by 1 + weight
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "vision_tower" not in name:
                parameter.data.copy_((parameter - 1).bfloat16().float())
    model.save_pretrained(folder)
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = seeing.tokenizer_of(checkpoint)
    tokenizer.chat_template = None
    if of_qwen:
        tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    pixels = getattr(transformers, checkpoint.image_processor)(**checkpoint.pixels)
    pixels.save_pretrained(folder)
    processor = getattr(transformers, f"{kind}Processor")(image_processor=pixels, tokenizer=tokenizer)
    settings = {"query_prefix": processor.query_prefix, "visual_prompt_prefix": processor.visual_prompt_prefix}
    (folder / "processor_config.json").write_text(json.dumps({**settings, "processor_class": f"{kind}Processor"}))
    arrays: dict[str, np.ndarray] = {}
    vectors: dict[str, list[torch.Tensor]] = {"query": [], "document": []}
    for kind_of, contents in (("query", ASKED), ("document", seeing.pictures())):
        for number, content in enumerate(contents):
            text = isinstance(content, str)
            given = {"text": [content]} if text else {"images": [Image.fromarray(content)]}
            inputs = dict(processor(**given, return_tensors="pt"))
            ids = inputs["input_ids"][0]
            inputs.pop("labels", None)
            if of_qwen:
                inputs.pop("token_type_ids", None)
            if of_qwen and not text:
                kinds = (inputs["input_ids"] == processor.image_token_id).int()
                grid = inputs["image_grid_thw"]
                inputs["position_ids"] = model.vlm.get_rope_index(
                    inputs["input_ids"], image_grid_thw=grid, mm_token_type_ids=kinds
                )[0]
            made = model(**inputs).embeddings[0]
            vectors[kind_of].append(made)
            key = f"{kind_of}{number}"
            arrays[key] = np.frombuffer(content.encode(), np.uint8) if text else content
            arrays[f"{key}/tokens"] = ids.numpy().astype(np.int32)
            arrays[f"{key}/vectors"] = made.numpy()
    arrays["scores"] = processor.score_retrieval(vectors["query"], vectors["document"]).numpy()
    return arrays


def _drawn(model: Any, seed: int) -> Any:
    model = model.float().eval()
    seeing.randomize(model, seed=seed)
    return model


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config = {key: value for key, value in config.items() if key != "dtype"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    own = {name: value.detach().bfloat16().contiguous().clone() for name, value in tensors.items()}
    save_file({name: value for name, value in own.items() if "position_ids" not in name}, folder / "model.safetensors")


if __name__ == "__main__":
    main()
