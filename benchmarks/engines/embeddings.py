"""An engine that makes embeddings, as a process: ``python embeddings.py ENGINE MODEL [OPTIONS]``, without llmjax's
packages. OPTIONS are llmjax's settings as a JSON object.

A line of stdin is a JSON list of texts; the answer is a line with seconds (``wall``), seconds of all processors
(``cpu``) and the vectors of at most 32 of the texts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SHOWN = 32

Encode = Callable[[Sequence[str]], Any]


def llmjax(model: str, **options: Any) -> Encode:
    from llmjax import LLM, PoolingParams

    llm = LLM(model, **options)
    llm.warm_up()
    params = PoolingParams(truncate_prompt_tokens=-1, normalize=True)
    return lambda texts: [
        output.outputs.embedding for output in llm.embed(list(texts), pooling_params=params, use_tqdm=False)
    ]


def sentence_transformers(model: str, **options: Any) -> Encode:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]

    loaded = SentenceTransformer(model, device="cpu", **options)
    return lambda texts: loaded.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def onnx(model: str) -> Encode:
    return sentence_transformers(model, backend="onnx")


def llama_cpp(model: str) -> Encode:
    import os

    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]

    threads, room = len(os.sched_getaffinity(0)), 4096
    loaded = Llama(
        model,
        embedding=True,
        n_ctx=room,
        n_batch=room,
        n_ubatch=room,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    return lambda texts: loaded.embed(list(texts), normalize=True)


ENGINES: dict[str, Callable[..., Encode]] = {
    "llmjax": llmjax,
    "llama.cpp": llama_cpp,
    "sentence-transformers": sentence_transformers,
    "onnx": onnx,
}


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print
    name, model, *options = sys.argv[1:]
    encode = ENGINES[name](model, **json.loads(options[0] if options else "{}"))
    for line in sys.stdin:
        texts = json.loads(line)
        cpu, wall = time.process_time(), time.perf_counter()
        vectors = encode(texts)
        answer = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        shown = [[float(number) for number in vector] for vector in vectors[:SHOWN]]
        print(json.dumps(answer | {"vectors": shown}), file=answers, flush=True)


if __name__ == "__main__":
    main()
