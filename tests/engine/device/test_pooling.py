"""Models that make vectors, compared with Hugging Face's (golden/make_pooling.py): alone, in batches and in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax import LLM, PoolingParams, SamplingParams
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import InvalidRequest
from tests.checkpoints import POOLED
from tests.levels import at_levels

F32 = np.dtype(np.float32)
DECODERS = ["qwen3-embedding", "llama-mean", "qwen2-labels", "gpt2-labels", "qwen3-reranker"]
ENCODERS = [
    "bert",
    "bert-cls",
    "xlm-roberta",
    "xlm-roberta-labels",
    "modernbert",
    "modernbert-labels",
    "nomic-bert",
    "nomic-bert-moe",
    "gte",
    "gte-labels",
]
# The same under other names, with heads that no vector needs.
MORE_ENCODERS = [
    "roberta",
    "roberta-labels",
    "bert-masked",
    "roberta-masked",
    "xlm-roberta-masked",
    "modernbert-masked",
    "new",
    "new-tokens",
]
BOTH_SIDES = ["gemma-embedding", "qwen2-both-sides"]  # decoders whose tokens attend to later ones
# Of checkpoints whose files do not say what is made of them.
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3-reranker": {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [7, 9],
        "is_original_qwen3_reranker": True,
    }
}
CASES = ("long", "short", "least", "one")


class Served(NamedTuple):
    name: str
    llm: LLM
    golden: dict[str, np.ndarray]

    def prompt(self, case: str) -> list[int]:
        return [int(token) for token in self.golden[f"{case}/tokens"]]

    def made(self, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
        """Embeddings, or logits of labels."""
        given = PoolingParams(**{"use_activation": False, **params})
        return [output.outputs.data for output in self.llm.encode(prompts, given, use_tqdm=False)]

    def check(self, case: str, vector: np.ndarray) -> None:
        expected = self.golden[f"{case}/vector"]
        assert vector.shape == expected.shape and vector.dtype == np.float32
        if self.llm.info.pooler is not None and self.llm.info.pooler.task == "classify":
            np.testing.assert_allclose(vector, expected, atol=1e-4, rtol=0)
        else:
            assert vector @ expected >= 0.99999 and abs(np.linalg.norm(vector) - 1) < 1e-5


def start(name: str, cache: str, **settings: Any) -> Served:
    """Two pages' room for chunks of decoders; encoders get what a text needs."""
    llm = LLM(
        str(POOLED / name),
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "kv_cache_dtype": "float32",
            "page_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "compilation_cache_dir": cache,
            "compile_threads": 1,
            "hf_overrides": OVERRIDES.get(name, {}),
            **settings,
        },
    )
    archive = POOLED / name / "golden.npz"
    return Served(name, llm, dict(np.load(archive)) if archive.exists() else {})


EVERY = [*DECODERS, *ENCODERS, *BOTH_SIDES]
# What they do is in others too.
COVERED = ("qwen2-labels", "gpt2-labels", "bert-cls", "xlm-roberta-labels", "modernbert", "gte", "qwen2-both-sides")


@pytest.fixture(
    scope="module",
    params=at_levels(
        [*EVERY, *MORE_ENCODERS],
        fast=[name for name in EVERY if name not in COVERED],
        slow=(*COVERED, "modernbert-masked", "new"),
    ),
)
def served(request: Any, compile_cache_dir: str) -> Iterator[Served]:
    found = start(request.param, compile_cache_dir)
    yield found
    found.llm.close()


def test_vectors_alone_and_in_mixed_batches(served: Served) -> None:
    for case in CASES:
        served.check(case, served.made([served.prompt(case)])[0])
    cases = [*CASES, *reversed(CASES), *CASES]
    for case, vector in zip(cases, served.made([served.prompt(case) for case in cases]), strict=True):
        served.check(case, vector)
    stats = served.llm.kv_stats()
    assert stats.used == 0 and stats.free + stats.cached == stats.total


EIGHT_BITS = [*ENCODERS, "roberta"]


@pytest.mark.parametrize("name", at_levels(EIGHT_BITS, fast=("bert",), slow=("modernbert", "gte")))
@pytest.mark.slow
def test_encoders_of_eight_bits(name: str, compile_cache_dir: str) -> None:
    """Vectors, or logits of labels, point where those of the weights as stored do, and are not the same."""
    found = start(name, compile_cache_dir, quantization="int8")
    vector, expected = found.made([found.prompt("long")])[0], found.golden["long/vector"]
    found.llm.close()
    angle = vector @ expected / (np.linalg.norm(vector) * np.linalg.norm(expected))
    assert 0.999 < angle < 0.99999


def test_the_token_vectors_are_pooled_to_the_text_s(served: Served) -> None:
    pooler = served.llm.info.pooler
    assert pooler is not None
    task = "token_embed" if pooler.task == "embed" else "token_classify"
    prompts = [served.prompt(case) for case in CASES]
    made = served.made(prompts, task=task, normalize=False)
    assert [len(vectors) for vectors in made] == [len(prompt) for prompt in prompts]
    if served.name in ("llama-mean", "gemma-embedding", "modernbert-labels"):
        return  # their matrices come after pooling
    for case, vectors in zip(CASES, made, strict=True):
        vector = {"last": vectors[-1], "cls": vectors[0], "mean": vectors.mean(0)}[pooler.kind]
        served.check(case, vector / (np.linalg.norm(vector) if pooler.task == "embed" else 1))


def test_what_generates_is_refused(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="does not generate text"):
        served.llm.generate([served.prompt("short")], SamplingParams(), use_tqdm=False)


def test_a_text_may_be_as_long_as_the_model_but_no_longer(served: Served) -> None:
    longest = served.llm.max_model_len
    assert longest == 64
    tokens = [3 + i % 90 for i in range(longest + 1)]
    with pytest.raises(InvalidRequest, match=f"the text has {longest + 1} tokens; this model takes at most {longest}"):
        served.made([tokens])
    whole, cut = served.made([tokens[:longest]])[0], served.made([tokens], truncate_prompt_tokens=-1)[0]
    np.testing.assert_allclose(whole, cut, atol=1e-6)


@pytest.mark.slow
def test_reward_models(tmp_path: Path, compile_cache_dir: str) -> None:
    """The last token's hidden state goes through two matrices, as Qwen's reward models have them."""
    folder = POOLED / "qwen3-embedding"
    config = json.loads((folder / "config.json").read_text())
    tensors = {f"model.{name}": tensor.read(F32) for name, tensor in stored_tensors(folder).items()}
    rng = np.random.default_rng(0)
    names = ["score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"]
    first, shift, second, offset = (rng.normal(0, 0.5, shape).astype(F32) for shape in ((32, 32), 32, (2, 32), 2))
    tensors |= dict(zip(names, (first, shift, second, offset), strict=True))
    config |= {"architectures": ["Qwen3ForProcessRewardModel"], "num_labels": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    plain = start("qwen3-embedding", compile_cache_dir)
    prompts = [plain.prompt(case) for case in CASES]
    hidden = plain.made(prompts, normalize=False)
    plain.llm.close()
    rewards = start(str(tmp_path), compile_cache_dir)
    made = rewards.llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    rewards.llm.close()
    for vector, output in zip(hidden, made, strict=True):
        expected = second @ np.maximum(first @ vector + shift, 0) + offset
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)
