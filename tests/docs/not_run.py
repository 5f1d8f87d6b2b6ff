"""Which of the commands that pages show the tests do not run, and why; and what the others are run with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tests.docs.commands import Shown

# A pattern of commands or programs, and the reason. The first that is found counts.
REASONS: Sequence[tuple[str, str]] = (
    (r"^make (serve|test)\b", "installs into the checkout; .ci/run makes these targets"),
    (r"^(uvx|pipx) ", "makes an environment of its own; tests/test_packaging.py installs"),
    (r"^pip install|^npm ", "changes the environment of the tests; tests/test_packaging.py and .ci/nightly install"),
    (r"^pip download|^tar |^cp |britannica", "fetches a book, and scores it for half an hour"),
    (r"^(docker|helm|kubectl|sky|serve run|vllm-router)\b", "a program that is not here; tests/deploy reads its files"),
    (r"machine-a|^mpiexec|^srun", "several machines or a launcher; tests/parallel and tests/engine start ranks"),
    (r"--device (cuda|gcu)", "needs an accelerator"),
    (r"(tensor|pipeline)-parallel-size|--device-ids", "needs several devices; tests/parallel has virtual ones"),
    (r"--numa|--threads 32", "needs a machine of several NUMA nodes"),
    (r"--kv-offloading-size 32", "takes 32 GiB of memory"),
    (
        r"--config retrieval|--model \S+ --model|\"model\": \"bge-small",
        "several models; tests/serve/test_several.py has tiny ones, and tests/examples a server of them",
    ),
    (
        r"--load demand|/api/(pull|chat).*hf\.co",
        "pulls from Hugging Face; tests/serve/test_pulled_only.py has hosts of its own",
    ),
    (r"--kv-transfer-config", "two servers with addresses of their own; tests/engine/tiers has such"),
    (r"^llmjax (pull|rm) ", "fetches from Hugging Face, and removes it; tests/cli/test_store.py has a hub of its own"),
    (
        r"Qwen3-Reranker|/rerank .*\"instruction\"",
        "needs that model's tokens; tests/serve/test_pooling.py has a tiny one",
    ),
    (r"\"suffix\": ", "needs a model with tokens for a gap; tests/tokenizer/test_infill.py has some"),
    (r"--scheme int4|method=\"gptq\"", "groups of 128 do not fill the small model's rows; see tests/quantization"),
    (r"^python -m benchmarks|^time \(", "measures for minutes or hours; only its --help is asked here"),
    (r"^cd \.\. && pytest", "tests run tests"),
    (r"^import numpy.*acme2|Acme2|feed_forward=", "a part of a file that a reader writes"),
    (r"random-mm", "draws ids of a larger vocabulary than the tiny model's; tests/bench/test_random_mm.py"),
    (r"/videos\b", "needs a video there; tests/models/vision/test_video.py reads some"),
    (r"blip-image-captioning", "needs that model; tests/engine/test_one_image.py has a tiny one"),
    (r"lora|LoRA|\"model\": \"sql\"", "needs an adapter for the model; tests/serve/test_adapters.py has tiny ones"),
    (r"launched\(", "a launcher of several processes; tests/test_launcher.py"),
)
# What stands in pages for a model that is large or needs an account, and what the tests put in its place.
SMALL, EMBEDDER, RERANKER, SEEING, SEEING_TOO = "{small}", "{embedder}", "{reranker}", "{seeing}", "{seeing_too}"
OF_TOKENS, OF_PAGES = "{of_tokens}", "{of_pages}"
MODELS: Mapping[str, str] = {
    r"BAAI/bge-small-en-v1\.5|sentence-transformers/all-MiniLM-L6-v2": EMBEDDER,
    r"BAAI/bge-reranker-v2-m3": RERANKER,
    r"colbert-ir/colbertv2\.0": OF_TOKENS,
    r"vidore/colqwen2-v1\.0-hf": OF_PAGES,
    r"Qwen/Qwen2\.5-VL-3B-Instruct": SEEING,
    r"/models/gemma-3-4b-it": SEEING_TOO,
    r"Qwen/Qwen[\w.-]+": SMALL,
    r"/path/to/model": SMALL,
}
MOST_CONTEXT = 8192  # of the small model


def reason(shown: Shown) -> str | None:
    """Why something is not run; None: it is."""
    text = shown.text.strip()
    return next((why for pattern, why in REASONS if re.search(pattern, text, re.DOTALL)), None)


def stood_in(text: str, models: Mapping[str, str]) -> str:
    """A command or program with models that are here.

    Args:
        models: the path of each kind of model, by its name above.
    """
    for pattern, kind in MODELS.items():
        text = re.sub(pattern, models[kind], text)
    return re.sub(r"(--max-model-len )(\d+)", lambda found: f"{found[1]}{min(int(found[2]), MOST_CONTEXT)}", text)
