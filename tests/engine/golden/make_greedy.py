"""Writes ``greedy.json`` beside it: greedy continuations of the two real models, computed by Hugging Face in f32.

Needs ``torch`` (CPU), ``transformers`` and ``gguf``, none of which these tests need. The two GGUF files lie in FOLDER:

    python tests/engine/golden/make_greedy.py FOLDER SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-Q4_K_M.gguf

Transformers dequantizes the weights itself, so nothing here shares code with what is tested. Every step runs the whole
sequence without a KV cache. A step whose two best logits are closer than ``MARGIN`` fails the script: the choice
between them would be one of rounding, so another prompt has to be taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]

HERE = Path(__file__).parent
NEW_TOKENS = 24
MARGIN = 0.002
TEXTS = {
    "capital": "The capital of France is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "numbers": "1, 2, 3, 5, 8, 13,",
    "story": "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    # More tokens than Gemma's window of 512.
    "long": "".join(f"Room {i} has {i * 7 % 10} chairs and {i * 3 % 10} tables.\n" for i in range(1, 46)) + "Room 46",
}


@torch.no_grad()
def continuation(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        margin = float(best.values[0] - best.values[1])
        if margin < MARGIN:
            raise SystemExit(f"the best two tokens are {margin:.4f} apart after {tokens[-5:]}: take another prompt")
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def main() -> None:
    folder, smollm2, gemma3 = sys.argv[1:]
    golden: dict[str, dict[str, dict[str, list[int]]]] = {}
    for name, file in (("smollm2", smollm2), ("gemma3", gemma3)):
        options = {"gguf_file": file, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **options
        ).eval()
        print(
            name,
            {key: getattr(model.config, key, None) for key in ("sliding_window", "layer_types", "rope_parameters")},
        )
        golden[name] = {}
        for case, text in TEXTS.items():
            prompt = tokenizer(text)["input_ids"]
            output = continuation(model, prompt)
            print(name, case, len(prompt), repr(tokenizer.decode(output)))
            golden[name][case] = {"prompt": prompt, "output": output}
    (HERE / "greedy.json").write_text(json.dumps(golden).replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    main()
