"""Writes ``perplexity.json`` beside it: a short text's perplexities by Hugging Face's models, golden checkpoints.

Needs ``torch`` (CPU), ``transformers`` and ``safetensors``, none of which the tests need:

    python -m tests.evaluation.golden.make_perplexity

Tokens are characters (``tests/engine/golden/characters``), BOS is token 1. The figures follow the two conventions in
their own authors' way: the loop of Hugging Face's "Perplexity of fixed-length models", weighted by the tokens that are
really scored, and llama.cpp's ``llama-perplexity``, with its formula of the uncertainty.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import load_file

from tests.checkpoints import GOLDEN

HERE = Path(__file__).parent
VOCABULARY = json.loads((HERE.parents[1] / "engine" / "golden" / "characters" / "tokenizer.json").read_text())
BOS = 1
TEXT = (
    "Perplexity says how many tokens a model hesitates between, on average. It is the exponential of the mean "
    "negative log-probability of what comes next, and so depends on the text, on the tokenizer and on how much of "
    "the text before it the model may see."
)


def load(name: str) -> torch.nn.Module:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    cls = getattr(transformers, config.pop("architectures")[0])
    made = cls.config_class(**config)
    made._attn_implementation = "eager"
    model = cls(made).eval().float()
    missing, unexpected = model.load_state_dict(
        {key: value.float() for key, value in load_file(GOLDEN / name / "model.safetensors").items()}, strict=False
    )
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


@torch.no_grad()
def nlls(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Negative log-likelihoods of ids[1:], f64."""
    logprobs = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), -1)
    return -logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def strided(model: torch.nn.Module, ids: list[int], *, context: int, stride: int) -> dict[str, Any]:
    scored, previous = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        new = nlls(model, ids[begin:end])[-(end - previous) :] if end - begin > 1 else torch.zeros(0)
        scored.append(new)
        previous = end
        if end == len(ids):
            break
    every = torch.cat(scored)
    return {"context": context, "stride": stride, "tokens": len(every), "perplexity": math.exp(every.mean())}


def halves(model: torch.nn.Module, ids: list[int], *, context: int) -> dict[str, Any]:
    nll = nll2 = 0.0
    count = 0
    for i in range(len(ids) // context):
        window = [BOS, *ids[i * context + 1 : (i + 1) * context]]
        # The logits at positions context / 2 to context - 2 are compared with the tokens after them.
        for value in nlls(model, window)[context // 2 :].tolist():
            nll += value
            nll2 += value * value
            count += 1
    nll, nll2 = nll / count, nll2 / count
    perplexity = math.exp(nll)
    error = perplexity * math.sqrt((nll2 - nll * nll) / (count - 1))
    return {"context": context, "stride": None, "tokens": count, "perplexity": perplexity, "standard_error": error}


def main() -> None:
    vocabulary = VOCABULARY["model"]["vocab"]
    ids = [BOS] + [vocabulary["Ġ" if c == " " else c] for c in TEXT]
    found = {}
    for name in ("llama", "gemma3"):
        model = load(name)
        found[name] = [
            halves(model, ids, context=32),
            strided(model, ids, context=48, stride=20),
            strided(model, ids, context=40, stride=40),
        ]
    content = {"text": TEXT, "perplexity": found}
    (HERE / "perplexity.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(found)


if __name__ == "__main__":
    main()
